"""Worker processes kept to given CPUs, and requests sent to them as a router sends them. Knows no figures."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from shoal.config.worker import Pool, WorkerConfig
from shoal.pb.internal.v1 import worker_pb2 as pb
from shoal.pb.internal.v1 import worker_pb2_grpc
from shoal.router.calls import WorkerCalls
from shoal.rpc import open_channel
from shoal.visibility import Visibility

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
LOCAL = 1 << 30  # every prompt is shorter


@dataclass
class Timed:
    """One request as its caller saw it; seconds."""

    begin: float = 0.0  # by the performance counter
    ttft: float = 0.0
    reserved: float = 0.0  # since the call
    beside_ms: float = 0.0  # CPU time of the threads that do not compute, of the worker that prefills
    token_times: list[float] = field(default_factory=list)  # since the call
    prefill: pb.PrefillResponse | None = None
    finished: pb.Finished | None = None

    @property
    def tpot(self) -> float:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def longest_pause(self, since: float) -> float:
        """Between two tokens, the later one after this moment of the performance counter."""
        times = pairwise(self.token_times)
        return max((after - before for before, after in times if self.begin + after > since), default=0.0)


class RunningWorker:
    """A worker process, and calls to it as a router makes them."""

    def __init__(self, process: asyncio.subprocess.Process, pool: Pool, address: str) -> None:
        self.process, self.address = process, address
        self._channel = open_channel(address)
        make = worker_pb2_grpc.DecodeWorkerStub if pool is Pool.DECODE else worker_pb2_grpc.PrefillWorkerStub
        self.calls = WorkerCalls(str(pool), address, self._channel, make(self._channel))

    async def open(self) -> None:
        """Open the session that a router would have open."""
        self.calls.open_session()
        while not self.calls.is_open:  # noqa: ASYNC110  # milliseconds, once
            await asyncio.sleep(0.01)

    def thread_times(self) -> dict[str, int]:
        """CPU time of each thread of the process, in nanoseconds."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}

    async def close(self) -> None:
        await self.calls.close()
        await self._channel.close(None)
        self.process.terminate()
        await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def worker(folder: Path, pool: Pool, model: str, visibilities: list[str], **changes: Any) -> AsyncIterator[RunningWorker]:
    """One worker in a process of its own, with `shoal serve`'s settings unless changed."""
    name = changes.pop("worker_id", f"{pool}-0")
    config = WorkerConfig(
        name, pool, model, allowed_visibilities=tuple(Visibility.parse(text) for text in visibilities), **changes
    )
    config = replace(config, transfer=config.transfer.within(config.token_budget))
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config.to_dict()))
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": str(config.num_threads)}
    command = (sys.executable, "-m", f"shoal.{pool}_worker", str(path))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    running = RunningWorker(process, pool, json.loads(line)["address"])
    await running.open()
    try:
        yield running
    finally:
        await running.close()


async def ask_beside(
    decode: RunningWorker, prefill: RunningWorker | None, prompt: list[int], visibility: str, max_tokens: int
) -> Timed:
    """`ask`, and what else than computing took CPU time of the worker that prefills: all threads but the busiest."""
    worker = prefill or decode
    before = worker.thread_times()
    timed = await ask(decode, prefill, prompt, visibility, max_tokens)
    spent = sorted(after - before.get(thread, 0) for thread, after in worker.thread_times().items())
    timed.beside_ms = sum(spent[:-1]) / 1e6
    return timed


async def ask(
    decode: RunningWorker,
    prefill: RunningWorker | None,
    prompt: list[int],
    visibility: str,
    max_tokens: int,
    begun: asyncio.Event | None = None,  # set with the first token
) -> Timed:
    """Both legs of one request; without a prefill worker decode runs the prompt itself."""
    split = Visibility.parse(visibility).split(len(prompt))
    request = pb.DecodeRequest(
        prompt_ids=prompt,
        visibility=visibility,
        sampling=pb.Sampling(max_tokens=max_tokens, top_p=1.0),
        local_prefill=pb.LocalPrefill(below_tokens=0 if prefill is not None else LOCAL),
    )
    begin = time.perf_counter()
    timed, leg = Timed(begin), None
    call = decode.calls.decode(request, 300)
    while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
        match event.WhichOneof("event"):
            case "reserved" if event.reserved.num_entries:
                assert prefill is not None
                reserved, timed.reserved = event.reserved, time.perf_counter() - begin
                task = pb.PrefillRequest(
                    attempt_id=reserved.attempt_id,
                    prompt_ids=prompt[: split.num_prefill_tokens],
                    num_prompt_tokens=len(prompt),
                    visibility=visibility,
                    plan_digest=reserved.plan_digest,
                    decode_address=reserved.transfer_address,
                    decode_worker_id=reserved.worker_id,
                    decode_epoch=reserved.epoch,
                    cached_tokens=reserved.cached_tokens,
                )
                leg = asyncio.ensure_future(prefill.calls.prefill(task, 300))
            case "tokens":
                timed.token_times += [time.perf_counter() - begin] * len(event.tokens.token_ids)
                if begun is not None:
                    begun.set()
            case "finished":
                timed.finished = event.finished
    timed.ttft = timed.token_times[0]
    if leg is not None:
        timed.prefill = await leg
    return timed


def resolved(text: str, num_layers: int) -> str:
    """A visibility as the router would resolve it, boundary 1."""
    return str(Visibility.parse(text).resolve(num_layers, 1))
