"""Pools that change while requests run: scaled up and down, every worker replaced, two routers, one of them dying or hanging."""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.controller.owner import Owner
from shoal.engine.local import LocalResult
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import open_channel
from tests.e2e.conftest import command_environment
from tests.e2e.test_system import TIE, Case, ask, make_cases, reference

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TRAFFIC_WITHIN_S = 10.0
NUM_CLIENTS = 4  # two for each router


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], tiny_model: Path) -> Iterator[Any]:
    """One worker in each pool, behind two routers."""
    yield serve(
        *("--model", str(tiny_model), "--visibilities", "full,speed:2", "--routers", "2"),
        *("--hang-timeout-s", "3"),
    )


@pytest.fixture(scope="module")
def cases(tiny_model: Path) -> list[tuple[Case, LocalResult]]:
    own = make_cases(str(tiny_model), ["full:boundary=1", "speed:2:boundary=2"], 120, 150)[:12]
    return list(zip(own, reference(str(tiny_model), own), strict=True))


def routers(cluster: Any) -> list[str]:
    host, _, port = cluster.address.rpartition(":")
    return [cluster.address, f"{host}:{int(port) + 1}"]


async def order(cluster: Any, *arguments: str) -> tuple[int, str]:
    """Run a command of `shoal` against the cluster: its status and what it printed."""
    command = [sys.executable, "-m", "shoal.cli.main", *arguments, "--address", cluster.address]
    options: dict[str, Any] = {"env": command_environment(cluster.log.parent), "stderr": subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, **options)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, output.decode()


def check(case: Case, answer: shoal_pb2.GenerateComplete, expected: LocalResult) -> None:
    """The undisturbed tokens, unless from a step whose two best scores lie as near as makes no difference."""
    got, want = list(answer.output_ids), list(expected.token_ids)
    assert len(got) == len(want) == case.max_tokens and answer.finish_reason == "length", answer
    differs = next((index for index in range(len(want)) if got[index] != want[index]), None)
    if differs is not None:
        (_, best), (_, second) = expected.logprobs[differs].top
        assert best - second < TIE, f"token {differs} is {got[differs]}, not {want[differs]}: {answer.notices}"


class Load:
    """What clients have got so far. They ask without pause, over both routers, and stop at the first error."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, shoal_pb2.GenerateComplete]] = []

    def served_by(self, worker_id: str) -> list[float]:
        """When answers came in which the worker took part."""
        return [at for at, answer in self.answers if worker_id in (answer.transfer.prefill_worker, answer.transfer.decode_worker)]


@asynccontextmanager
async def load(cluster: Any, cases: list[tuple[Case, LocalResult]]) -> AsyncIterator[Load]:
    """Steady load for the length of the block; every answer is checked. No block is left afterwards."""
    seen, ended = Load(), asyncio.Event()

    async def client(index: int, stub: Any) -> None:
        turn = index
        while not ended.is_set():
            case, expected = cases[turn % len(cases)]
            answer = await ask(stub, case)
            check(case, answer, expected)
            seen.answers.append((time.monotonic(), answer))
            turn += 1

    channels = [open_channel(address) for address in routers(cluster)]
    stubs = [shoal_pb2_grpc.ShoalStub(channel) for channel in channels]
    clients = [asyncio.create_task(client(index, stubs[index % 2])) for index in range(NUM_CLIENTS)]
    try:
        yield seen
    finally:
        ended.set()
        await asyncio.gather(*clients)
        for channel in channels:
            await channel.close()
    await asyncio.to_thread(cluster.wait_until_idle)


async def test_a_dry_run_and_bad_orders_change_nothing(cluster: Any) -> None:
    before = cluster.workers()
    status, output = await order(cluster, "scale", "--decode", "2", "--prefill", "1", "--dry-run")
    assert (status, output.splitlines()) == (0, ["decode-1: would start", "done: nothing was changed"])
    status, output = await order(cluster, "restart", "--rolling", "--dry-run", "--pool", "decode")
    assert (status, output.count("would be replaced")) == (0, 1)
    for arguments, code, words in (
        (("scale",), 2, "name what to change"),
        (("scale", "--prefill", "0"), 2, "the prefill pool needs at least 1 worker"),
        (("scale", "--decode", "900"), 4, "lower --kv-memory or the number of workers"),
        (("restart", "--rolling", "--surge", "0"), 2, "the prefill pool has one worker"),
        (("scale", "--decode", "2", "--controller", "127.0.0.1:1"), 3, "127.0.0.1:1"),
    ):
        status, output = await order(cluster, *arguments)
        assert status == code and words in output, (arguments, status, output)
    assert cluster.workers() == before


async def test_new_workers_take_traffic_and_those_that_go_lose_nothing(
    cluster: Any, cases: list[tuple[Case, LocalResult]]
) -> None:
    async with load(cluster, cases) as seen:
        status, output = await order(cluster, "scale", "--prefill", "1", "--decode", "2")
        assert status == 0, output
        assert "decode-1: ready, takes requests" in output and "decode-1: connected to its peers" in output, output
        assert output.splitlines()[-1].startswith("done in")
        told_at = time.monotonic()
        async with asyncio.timeout(TRAFFIC_WITHIN_S):
            while not seen.served_by("decode-1"):  # noqa: ASYNC110  (clients fill a list)
                await asyncio.sleep(0.02)
        first = min(seen.served_by("decode-1")) - told_at
        print(f"the first answer with decode-1 ended {first:+.2f} s from the end of `shoal scale`:\n{output}")
        status, output = await order(cluster, "scale", "--decode", "1", "--drain-s", "0.1")
        assert status == 0 and "decode-1: gone" in output, output
        print(output)
    assert set(cluster.workers()) == {"prefill-0", "decode-0"}
    told = [notice for _, answer in seen.answers for notice in answer.notices]
    print(f"{len(seen.answers)} answers, {len(told)} notices: {sorted(set(told))[:3]}")


async def test_a_rolling_restart_under_load_loses_nothing(cluster: Any, cases: list[tuple[Case, LocalResult]]) -> None:
    before = cluster.workers()
    async with load(cluster, cases) as seen:
        status, output = await order(cluster, "restart", "--rolling", "--drain-s", "0.1")
        assert status == 0 and output.count(": gone") == 2, output
        print(output)
    after = cluster.workers()
    assert len(after) == 2 and all(worker.state == "ready" for worker in after.values())
    assert not {(n, w.epoch) for n, w in before.items()} & {(n, w.epoch) for n, w in after.items()}
    moved = [answer for _, answer in seen.answers if answer.num_retries]
    assert all(answer.notices for answer in moved)
    print(f"{len(seen.answers)} answers, {len(moved)} of them handed over: {moved[0].notices if moved else ''}")


async def test_a_hung_and_a_dead_router_are_started_again_and_strand_nothing(cluster: Any) -> None:
    first, second = routers(cluster)
    for number, words in (
        (signal.SIGSTOP, "the router-1 did not move for 3 s and was killed; starting it again"),
        (signal.SIGKILL, "the router-1 was killed by signal 9; starting it again (for the 2. time)"),
    ):
        async with open_channel(first) as one, open_channel(second) as other:
            stubs = [shoal_pb2_grpc.ShoalStub(channel) for channel in (one, other)]
            long = Case(tuple(range(7, 60)), "full:boundary=1", 900)
            running = asyncio.create_task(ask(stubs[1], long))
            beside = asyncio.create_task(ask(stubs[0], long))
            await asyncio.sleep(0.3)
            (router,) = [p for p in cluster.descendants() if "router-1" in p.cmdline()]
            router.send_signal(number)
            struck_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await running
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            print(f"{number.name}: the client heard after {time.monotonic() - struck_at:.2f} s")
            assert len((await beside).output_ids) == 900
        await asyncio.to_thread(cluster.wait_until_idle)
        await asyncio.to_thread(cluster.wait_for, lambda words=words: words in cluster.log.read_text())
        async with open_channel(second) as channel:
            case = Case((5, 6, 7), "full:boundary=1", 3)
            async with asyncio.timeout(20):
                while True:  # it listens before it knows its workers
                    try:
                        assert len((await ask(shoal_pb2_grpc.ShoalStub(channel), case)).output_ids) == 3
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.1)
    assert re.search(r"the router ", cluster.log.read_text()) is None  # the first one was not touched


def test_a_hung_controller_is_told_of_and_serving_goes_on(cluster: Any) -> None:
    controllers = [process for process in cluster.descendants() if "shoal.launch.controller" in process.cmdline()]
    (controller,) = [process for process in controllers if process.ppid() in {other.pid for other in controllers}]
    controller.send_signal(signal.SIGSTOP)  # its guardian, which does nothing but wait, is let be
    try:
        said = "the controller has not moved for 3 s: requests go on"
        cluster.wait_for(lambda: said in cluster.log.read_text())
        assert all(worker.state == "ready" for worker in cluster.workers().values())
    finally:
        controller.send_signal(signal.SIGCONT)
    cluster.wait_for(lambda: "the controller moves again" in cluster.log.read_text())
    assert all(worker.state == "ready" for worker in cluster.workers().values())


def test_a_second_ctrl_c_leaves_neither_processes_nor_files(cluster: Any) -> None:
    """Ends the cluster of this module."""
    own = {cluster.process.pid, *(process.pid for process in cluster.descendants())}
    marks = [*Path("/tmp").glob("shoal-ray-*/owner"), *Path(tempfile.gettempdir()).glob("shoal-secret-*/owner")]
    folders = [mark.parent for mark in marks if (owner := Owner.read(mark.read_text())) is not None and owner.pid in own]
    assert len(folders) == 2 and list(cluster.log.parent.glob("shoal/services/*.json"))
    cluster.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    cluster.stop(signal.SIGINT, expected_status=None)
    assert not [folder for folder in folders if folder.exists()]
    assert not list(cluster.log.parent.glob("shoal/services/*.json"))
