"""`shoal serve` as a process: how it starts, refuses, is explored by reflection, and ends without leaving anything."""

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from shoal.cli.preflight import check_port, free_port
from shoal.controller.owner import FOLDER_MARK, RAY_PREFIX, SHORT_FOLDER, Owner
from shoal.errors import InvalidConfig
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_sync_channel
from tests.e2e.conftest import command_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], tiny_model: Path) -> Any:
    """One worker each, with metrics; a test of this module ends it."""
    ports = _free_ports_in_a_row(4)
    return serve("--model", str(tiny_model), "--visibilities", "full,speed:2", "--metrics-port", str(ports))


def test_a_session_over_reflection(cluster: Any) -> None:
    with open_sync_channel(cluster.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"shoal.v1.Shoal", "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("shoal.v1.Shoal").FindMethodByName("Generate")
        assert method.server_streaming and [f.name for f in method.input_type.oneofs_by_name["input"].fields] == [
            "tokenized",
            "text",
            "chat",
        ]
        call = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = GetMessageClass(method.input_type)(text="shoals of fish", visibility="speed:2", stream=True)
        request.sampling_params.max_tokens = 5
        request.sampling_params.ignore_eos = True
        responses = list(call(request, timeout=30))
    kinds = [response.WhichOneof("response") for response in responses]
    assert kinds[-1] == "complete" and set(kinds[:-1]) == {"chunk"}
    final = responses[-1].complete
    assert len(final.output_ids) == 5 and final.transfer.payload_bytes == final.transfer.plan_bytes > 0


def test_the_ready_line_names_the_address_and_a_command(cluster: Any) -> None:
    cluster.wait_for(lambda: len(cluster.output) >= 2)
    assert cluster.address in cluster.output[0] and f"shoal generate --address {cluster.address}" in cluster.output[1]


def test_a_port_in_use_is_refused_before_anything_starts(cluster: Any, tiny_model: Path) -> None:
    arguments = ["--model", str(tiny_model), "--listen", cluster.address]
    command = [sys.executable, "-c", "from shoal.cli.serve import serve; serve()", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, env=os.environ | {"PYTHONPATH": _source()})
    assert ended.returncode == 2
    assert f"--listen {cluster.address}: Address already in use" in ended.stderr
    assert "Ray" not in ended.stderr


def test_every_process_serves_metrics_and_pairs_are_warm_before_the_first_request(cluster: Any) -> None:
    port = int(_argument(cluster, "--metrics-port"))
    names = ("shoal_router_ready_workers", "shoal_controller_workers", "shoal_prefill_worker_total_blocks")
    for offset, name in enumerate((*names, "shoal_decode_worker_total_blocks")):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + offset}/metrics", timeout=5) as answer:
            assert name in answer.read().decode()
    assert "is up" in cluster.log.read_text()


def test_ctrl_c_lets_running_requests_finish_and_leaves_nothing(cluster: Any) -> None:
    with open_sync_channel(cluster.address) as channel:
        request = shoal_pb2.GenerateRequest(text="shoals", stream=True, visibility="full")
        request.sampling_params.max_tokens = 300
        request.sampling_params.ignore_eos = True
        stream = shoal_pb2_grpc.ShoalStub(channel).Generate(request, timeout=60)
        assert next(stream).HasField("chunk")
        cluster.process.send_signal(signal.SIGINT)
        *_, last = stream
    assert last.complete.completion_tokens == 300
    cluster.stop(signal.SIGCONT)  # it is ending already
    assert cluster.log.read_text().rstrip().endswith("stopped")


def test_ctrl_c_while_starting_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_model), "--listen", f"127.0.0.1:{free_port('127.0.0.1')}"]
    command = [sys.executable, "-c", "from shoal.cli.serve import serve; serve()", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": _source()}
    )
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + 30
    while not any(p.name() == "raylet" for p in seen.values() if p.is_running()):
        assert time.monotonic() < deadline and process.poll() is None
        seen |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        time.sleep(0.1)
    owners = {mark: Owner.read(mark.read_text()) for mark in Path(SHORT_FOLDER).glob(f"{RAY_PREFIX}*/{FOLDER_MARK}")}
    [folder] = [mark.parent for mark, owner in owners.items() if owner is not None and owner.pid in seen]
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 0
    _, left = psutil.wait_procs(list(seen.values()), timeout=5)
    assert not left, [p.name() for p in left]
    assert not folder.exists()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Ray of two nodes on this machine, labelled pool=prefill and pool=decode; yields its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    port = free_port("127.0.0.1")
    common = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--block", "--disable-usage-stats"]
    ray = str(Path(sys.executable).with_name("ray"))
    nodes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> None:
        """Start a node and wait until it says that it runs."""
        log = tmp_path / f"node-{len(nodes)}.log"
        with log.open("w") as stream:
            command = [ray, "start", *arguments, *common]
            nodes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True))
        deadline = time.monotonic() + 60
        while "--block" not in log.read_text():
            assert nodes[-1].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    try:
        start("--head", f"--port={port}", "--include-dashboard=false", "--labels=pool=prefill")
        start(f"--address=127.0.0.1:{port}", "--labels=pool=decode")
        yield f"127.0.0.1:{port}"
    finally:
        processes = [child for node in nodes for child in psutil.Process(node.pid).children(recursive=True)]
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(20)
        for process in psutil.wait_procs(processes, timeout=5)[1]:
            process.kill()


def test_labels_place_the_pools_and_a_restarted_controller_adopts_its_workers(
    two_nodes: str, serve: Callable[..., Any], tiny_model: Path
) -> None:
    """What it was scaled to included."""
    started = serve("--model", str(tiny_model), "--ray-address", two_nodes, "--pool-labels", "--grace-s", "2")

    def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal.cli.main", "scale", "--address", started.address, *arguments]
        environment = command_environment(started.log.parent)
        return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)

    refused = scale("--prefill", "3")
    words = "2 more prefill workers of 1 CPU each do not fit: Ray has free places for 1 on nodes labelled pool=prefill"
    assert refused.returncode == 4 and words in refused.stderr, refused
    done = scale("--decode", "2")
    assert done.returncode == 0 and "decode-1: ready" in done.stdout, done
    assert started.workers().keys() == {"prefill-0", "decode-0", "decode-1"}
    before = {name: (worker.epoch, worker.address) for name, worker in started.workers().items()}
    raylets = {name: _raylet_of(_listener(address)) for name, (_, address) in before.items()}
    assert raylets["prefill-0"] != raylets["decode-0"]

    controller = started.child("shoal.launch.controller")
    controller.kill()
    started.wait_for(lambda: "adopted" in started.log.read_text().split("starting it again")[-1])
    started.wait_for(lambda: {n: (w.epoch, w.address) for n, w in started.workers().items() if w.state == "ready"} == before)
    listeners = [_listener(address) for _, address in before.values()]
    started.stop()
    assert not psutil.wait_procs(listeners, timeout=10)[1], "workers outlived serve"


def _listener(address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    pid = next(c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
    return psutil.Process(pid)


def _raylet_of(process: psutil.Process) -> int:
    return next(parent.pid for parent in process.parents() if parent.name() == "raylet")


def _argument(cluster: Any, flag: str) -> str:
    arguments = list(cluster.process.args)
    return str(arguments[arguments.index(flag) + 1])


def _free_ports_in_a_row(count: int) -> int:
    """The first of so many ports that nothing holds now."""
    for _ in range(50):
        first = free_port("127.0.0.1")
        try:
            for port in range(first, first + count):
                check_port("127.0.0.1", port, "")
        except InvalidConfig:
            continue
        return first
    raise AssertionError("no free ports in a row")


def _source() -> str:
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", ""))))


def test_one_pool_serves_alone_on_the_cpu_it_is_kept_to(serve: Callable[..., Any], tiny_model: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    alone = serve("--model", str(tiny_model), "--visibilities", "speed:2", "--colocated", "--decode-cpus", str(cpu))
    assert "1 colocated; speed:2" in alone.output[0]
    assert {name: (worker.pool, worker.colocated) for name, worker in alone.workers().items()} == {"decode-0": ("decode", True)}
    process = alone.worker_process("decode-0")
    assert {tuple(os.sched_getaffinity(thread.id)) for thread in process.threads()} == {(cpu,)}
    with open_sync_channel(alone.address) as channel:
        request = shoal_pb2.GenerateRequest(text="shoals of fish swim " * 40, visibility="speed:2")
        request.sampling_params.max_tokens = 4
        [reply] = shoal_pb2_grpc.ShoalStub(channel).Generate(request, timeout=60)
    transfer = reply.complete.transfer
    assert (transfer.prefill_at, transfer.prefill_reason, transfer.payload_bytes) == ("decode_worker", "colocated", 0)
    assert alone.wait_until_idle().keys() == {"decode-0"}
    alone.stop()
