"""`shoal top`: what it shows of a server's pools, plain, as JSON and on a terminal, and what it says when the server is gone."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from shoal.cli.main import cli
from shoal.cli.pools_frame import PoolsFrame
from shoal.cli.pools_table import bar, draw
from shoal.cli.top import look, look_again
from shoal.client import Client
from shoal.client.connection import Retry
from shoal.errors import Unavailable
from shoal.pb.v1 import shoal_pb2
from tests.fakes.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(2, 1) as c:
        yield c


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["top", *arguments])


def frame() -> PoolsFrame:
    info = shoal_pb2.GetServerInfoResponse(version="1.2", uptime_seconds=3725, active_requests=4)
    states = (("decode-0", "decode", "ready"), ("prefill-1", "prefill", "starting"), ("prefill-0", "prefill", "ready"),
              ("prefill-2", "prefill", "ready"), ("[red]x[/red]", "decode", "dead"))  # fmt: skip
    for worker_id, pool, state in states:
        info.workers.add(worker_id=worker_id, pool=pool, state=state, epoch=7)
    loads = [
        shoal_pb2.WorkerLoad(
            worker_id="decode-0", pool="decode", num_running_reqs=3, num_waiting_reqs=2, num_used_blocks=50, num_total_blocks=100,
            num_reservations=5, num_transfers_in_flight=1, num_staging_in_use=4, num_staging_quarantined=1,
            outstanding_token_layers=9000, resident_bytes=300 << 20,
        ),
        shoal_pb2.WorkerLoad(worker_id="prefill-0", pool="prefill", num_used_blocks=8, num_total_blocks=8, num_running_reqs=1),
        shoal_pb2.WorkerLoad(worker_id="unlisted", pool="prefill", num_used_blocks=77),
    ]  # fmt: skip
    return PoolsFrame.read("host:1", info, loads)


def drawn(shown: PoolsFrame) -> list[str]:
    console = Console(file=io.StringIO(), width=140)
    console.print(draw(shown))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_every_worker_has_a_row_and_every_pool_a_total() -> None:
    head, columns, *rows = drawn(frame())
    assert head == "shoal 1.2 at host:1, up 1 h 02 min; requests: 4; workers ready: 2 of 5"
    assert columns.split() == [
        "worker",
        "state",
        "epoch",
        "runs",
        "waits",
        "blocks",
        "reserved",
        "moves",
        "staging",
        "work",
        "memory",
    ]
    assert [row.split()[0] for row in rows] == ["prefill-0", "prefill-1", "prefill-2", "[red]x[/red]", "decode-0", "all", "all"]
    by_id = {row.split()[0]: " ".join(row.split()[1:]) for row in rows[:5]}
    assert by_id["decode-0"] == "ready 7 3 2 █████····· 50/100 5 1 4 (1 quarantined) 9000 300 MiB"
    assert by_id["prefill-0"].startswith("ready 7 1 0 ██████████ 8/8")
    assert by_id["prefill-1"] == "starting 7" + " –" * 8 and by_id["prefill-2"].startswith("silent")
    assert rows[-2].split()[:4] == ["all", "3", "prefill", "1"] and "8/8" in rows[-2]  # unlisted workers are not counted
    assert drawn(PoolsFrame("a:1", "1", 5, 0, ()))[1] == "no workers are known yet"


@pytest.mark.parametrize(
    ("used", "total", "shown"),
    [(0, 0, "    "), (0, 9, "····"), (1, 10**6, "▏···"), (1, 2, "██··"), (5, 16, "█▎··"), (999, 1000, "███▉"),
     (9, 9, "████"), (12, 9, "████")],
)  # fmt: skip
def test_bars(used: int, total: int, shown: str) -> None:
    assert bar(used, total, 4) == shown


def test_what_replays_say_of_visibilities_is_below() -> None:
    info = shoal_pb2.GetServerInfoResponse()
    info.quality.add(visibility="pop:20", state="served")
    info.quality.add(visibility="speed:22", state="served", num_samples=60, agreement=0.9312, kl_nats=0.1)
    info.quality.add(
        visibility="speed:8", state="full", reason="kl", num_samples=7, agreement=0.5, kl_nats=2, num_replaced_requests=9
    )
    seen = PoolsFrame.read("host:1", info, [])
    assert drawn(replace(seen, workers=frame().workers))[-3:] == [
        "quality of pop:20: not measured yet",
        "quality of speed:22: 93.1% of tokens agree with full depth, 0.100 nats (60 requests)",
        "quality of speed:8: served as full (kl; 9 requests); since then 50.0% of tokens agree with full depth, "
        "2.000 nats (7 requests)",
    ]
    assert seen.to_mapping()["quality"][2]["reason"] == "kl"


async def test_one_look_plain_and_as_json(cluster: Cluster) -> None:
    cluster.decode[0].outstanding, cluster.prefill[1].is_silent = 4321, True
    plain = await asyncio.to_thread(run, "-a", cluster.address, "--once")
    assert plain.exit_code == 0 and "\x1b" not in plain.stdout
    assert "decode-0" in plain.stdout and "4321" in plain.stdout and "silent" in plain.stdout and "all 2 prefill" in plain.stdout
    result = await asyncio.to_thread(run, "-a", cluster.address, "--once", "--json")
    seen = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1 and [w["worker_id"] for w in seen["workers"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert seen["totals"]["decode"]["outstanding_token_layers"] == 4321 and seen["workers"][1]["holds"] is None
    nobody = run("-a", "127.0.0.1:1", "--once")
    assert nobody.exit_code == 3 and "no server answers at 127.0.0.1:1" in nobody.stderr and not nobody.stdout
    assert run("--interval-s", "0").exit_code == 2


async def test_a_server_that_goes_is_named_and_the_last_look_stays(cluster: Cluster) -> None:
    def watch() -> tuple[PoolsFrame | None, str]:
        with Client(cluster.address, retry=Retry(attempts=1)) as client:
            looks = look_again(lambda: look(client), 0.0)
            first, trouble = next(looks)
            assert first is not None and len(first.workers) == 3 and not trouble
            asyncio.run_coroutine_threadsafe(cluster.router.stop(), loop).result()
            return next(looks)

    loop = asyncio.get_running_loop()
    shown, trouble = await asyncio.to_thread(watch)
    assert shown is not None and len(shown.workers) == 3
    assert "no server answers" in trouble and "trying again" in trouble


def test_an_answer_after_a_silence_ends_the_trouble() -> None:
    answers = iter([Unavailable("nobody"), frame(), Unavailable("nobody"), frame()])

    def see() -> PoolsFrame:
        match next(answers):
            case PoolsFrame() as seen:
                return seen
            case error:
                raise error

    looks = look_again(see, 1.0, sleep=lambda _: None)
    got = [next(looks) for _ in range(4)]
    assert [(shown is None, bool(trouble)) for shown, trouble in got] == [
        (True, True),
        (False, False),
        (False, True),
        (False, False),
    ]


async def test_a_terminal_shows_it_live_until_interrupted(cluster: Cluster) -> None:
    def watch() -> tuple[int, bytes]:
        ours, theirs = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "COLUMNS": "140", "TERM": "xterm"}
        # A shell's background jobs ignore SIGINT, and so would their children. Not by preexec_fn: that forks, and a fork of this
        # process, in which gRPC's threads run, can die.
        heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
        top = [sys.executable, "-m", "shoal.cli.main", "top", "-a", cluster.address, "-i", "0.1"]
        command = [sys.executable, "-c", heed, *top]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            seen = b""
            try:
                while seen.count(b"decode-0") < 2:  # two looks
                    seen += os.read(ours, 65536)
                process.send_signal(signal.SIGINT)
                with suppress(OSError):  # EIO: the other end has closed. A terminal that nobody reads would hold it up
                    while piece := os.read(ours, 65536):
                        seen += piece
                status = process.wait(20)
            finally:
                process.kill()
                os.close(ours)
            return status, seen

    status, seen = await asyncio.wait_for(asyncio.to_thread(watch), 60)
    assert status == 0 and b"\x1b[?1049h" in seen and b"Traceback" not in seen
