"""The router as a process of its own: flags, uvloop, metrics, signals."""

import asyncio
import os
import signal
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process

from shoal.client import AsyncClient, Sampling
from shoal.model_files import open_model
from shoal.rpc import Address, RpcServer
from tests.fakes.workers import FakeDecodeWorker, FakePrefillWorker, Wire


async def router(*arguments: str) -> Process:
    command = (sys.executable, "-m", "shoal.router", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})


async def test_a_router_process_serves_measures_and_drains_on_sigterm() -> None:
    wire, revision = Wire(), open_model("smollm2-135m").revision
    prefill, decode = FakePrefillWorker(wire, revision, "prefill-0"), FakeDecodeWorker(wire, revision, "decode-0")
    await prefill.start()
    await decode.start()
    decode.delay_s = 0.05
    process = await router(
        "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--visibilities", "full,speed:22",
        "--worker", f"prefill={prefill.description.address}", "--worker", f"decode={decode.description.address}",
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert line.startswith("router listening on 127.0.0.1:")
    metrics = ""
    while "serving" not in (log := (await asyncio.wait_for(process.stderr.readline(), 20)).decode()) or "not serving" in log:
        metrics = log.split("metrics at ")[1].strip() if "metrics at " in log else metrics
    async with AsyncClient(line.split()[-1]) as client:
        done = await client.complete("Why?", sampling=Sampling(max_tokens=3), visibility="speed:22")
        assert done.completion_tokens == 3
        body = (await asyncio.to_thread(lambda: urllib.request.urlopen(metrics, timeout=5).read())).decode()
        assert 'shoal_router_requests_total{outcome="length",visibility="speed:22"} 1.0' in body
        assert "shoal_router_generated_tokens_total 3.0" in body
        for name in ("ttft_seconds", "tpot_seconds", "itl_seconds", "retried_requests", "active_streams", "ready_workers"):
            assert f"shoal_router_{name}" in body
        running = asyncio.create_task(client.complete("Why?", sampling=Sampling(max_tokens=10)))
        while decode.num_sent < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert (await running).completion_tokens == 10  # it was let finish
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert "Traceback" not in (await process.stderr.read()).decode()
    await prefill.stop()
    await decode.stop()


async def test_flags_that_cannot_work_end_with_one_line() -> None:
    taken = RpcServer()
    async with taken:
        address = str(await taken.start(Address("127.0.0.1", 0)))
        cases = (
            (("--controller", "127.0.0.1:1", "--listen", address), "port is in use"),
            (("--controller", "127.0.0.1:1", "--listen", "0.0.0.0:0"), "every interface"),
            (("--controller", "127.0.0.1:1", "--visibilities", "full,deep"), "unknown visibility 'deep'"),
            (("--controller", "nowhere"), "must be host:port"),
            ((), "either a controller"),
        )
        processes = [await router(*arguments) for arguments, _ in cases]
        for process, (arguments, words) in zip(processes, cases, strict=True):
            _, errors = await asyncio.wait_for(process.communicate(), 40)
            assert process.returncode == 2, arguments
            last = errors.decode().splitlines()[-1]
            assert last.startswith("error: ") and words in last and "Traceback" not in errors.decode()
