"""Runs workers (in this process or as processes of their own) and drives both legs of a request the way a router does."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shoal.config.transfer import TransferConfig
from shoal.config.worker import Pool, WorkerConfig
from shoal.decode_worker.worker import DecodeWorker
from shoal.errors import ShoalError
from shoal.pb.internal.v1 import worker_pb2 as pb
from shoal.pb.internal.v1 import worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.prefill_worker.worker import PrefillWorker
from shoal.rpc import error_from_rpc, open_channel
from shoal.rpc.image_spans import image_to_pb, span_to_pb
from shoal.types import PromptImage
from shoal.visibility import Visibility

MIXED = ("full", "speed:2", "speed:3:anchors=4", "speed:1:anchors=0", "pop:2", "pop:1:late", "pop:3:late")
_SOURCE = str(Path(__file__).resolve().parents[2] / "src")
TRANSFER = TransferConfig(max_entry_tokens=16, heartbeat_s=0.25, base_timeout_s=3.0, lease_s=20.0)


def make_config(pool: Pool, model: Path | str, worker_id: str = "", **changes: Any) -> WorkerConfig:
    """A small worker that checks its pool after every request."""
    defaults: dict[str, Any] = {
        "num_blocks": 4096,
        "block_size": 8,
        "min_request_tokens": 16,
        "token_budget": 64,
        "allowed_visibilities": tuple(Visibility.parse(text) for text in MIXED),
        "transfer": TRANSFER,
        "check_blocks": True,
        "max_request_s": 60.0,
    }
    return WorkerConfig(worker_id=worker_id or f"{pool}-0", pool=pool, model=str(model), **(defaults | changes))


@dataclass(frozen=True)
class Ask:
    """One request as a test writes it."""

    prompt_ids: tuple[int, ...]
    visibility: str  # resolved here with boundary 1 unless it names one
    max_tokens: int = 6
    temperature: float = 0.0
    seed: int = 0
    replay: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    cache_salt: str = ""
    num_children: int = 1
    local_below: int = 0  # fewer prefill tokens than this run on the decode worker
    images: tuple[PromptImage, ...] = ()


@dataclass
class Answer:
    """What came back on both legs."""

    reserved: pb.Reserved
    token_ids: list[int] = field(default_factory=list)
    children: dict[int, list[int]] = field(default_factory=dict)  # the same by child
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finished: pb.Finished | None = None
    prefill: pb.PrefillResponse | None = None


class Endpoint:
    """Stubs of one worker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self.decode = worker_pb2_grpc.DecodeWorkerStub(self._channel)
        self.prefill = worker_pb2_grpc.PrefillWorkerStub(self._channel)

    async def load(self, pool: Pool) -> shoal_pb2.WorkerLoad:
        stub = self.decode if pool is Pool.DECODE else self.prefill
        return await stub.GetLoad(pb.GetLoadRequest(), timeout=10)

    async def until(
        self, pool: Pool, condition: Callable[[shoal_pb2.WorkerLoad], bool], timeout_s: float = 20.0
    ) -> shoal_pb2.WorkerLoad:
        """Wait until the load fulfils a condition, and return it."""
        async with asyncio.timeout(timeout_s):
            while True:
                load = await self.load(pool)
                if condition(load):
                    return load
                await asyncio.sleep(0.02)

    async def idle(self, pool: Pool, timeout_s: float = 10.0) -> shoal_pb2.WorkerLoad:
        """Wait until nothing is held, and return the load."""
        return await self.until(
            pool,
            lambda load: not (
                load.num_used_blocks or load.num_reservations or load.num_waiting_reqs or load.num_running_reqs
                or load.num_transfers_in_flight or load.outstanding_token_layers
            ),
            timeout_s,
        )  # fmt: skip

    async def close(self) -> None:
        await self._channel.close()


def decode_request(ask: Ask, num_layers: int = 4) -> pb.DecodeRequest:
    sampling = pb.Sampling(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=1.0,
        seed=ask.seed,
        stop_token_ids=ask.stop_token_ids,
        num_logprobs=ask.num_logprobs,
    )
    visibility = str(Visibility.parse(ask.visibility).resolve(num_layers))
    return pb.DecodeRequest(
        request_id="test",
        prompt_ids=ask.prompt_ids,
        cache_salt=ask.cache_salt,
        replay_token_ids=ask.replay,
        visibility=visibility,
        sampling=sampling,
        num_children=ask.num_children,
        local_prefill=pb.LocalPrefill(below_tokens=ask.local_below) if ask.local_below else None,
        images=[span_to_pb(image.span) for image in ask.images],
    )


def prefill_request(ask: Ask, reserved: pb.Reserved) -> pb.PrefillRequest:
    split = Visibility.parse(reserved.visibility).split(len(ask.prompt_ids))
    return pb.PrefillRequest(
        request_id="test",
        attempt_id=reserved.attempt_id,
        prompt_ids=ask.prompt_ids[: split.num_prefill_tokens],
        num_prompt_tokens=split.num_prompt_tokens,
        visibility=reserved.visibility,
        cached_tokens=reserved.cached_tokens,
        plan_digest=reserved.plan_digest,
        decode_address=reserved.transfer_address,
        decode_worker_id=reserved.worker_id,
        decode_epoch=reserved.epoch,
        cache_salt=ask.cache_salt,
        images=map(image_to_pb, ask.images),
    )


async def generate(ask: Ask, prefill: Endpoint, decode: Endpoint, *, num_layers: int = 4, timeout_s: float = 60.0) -> Answer:
    """Both legs joined: the first error ends the other and is raised as Shoal's own."""
    call = decode.decode.Decode(decode_request(ask, num_layers), timeout=timeout_s)
    legs: list[asyncio.Task[Any]] = []
    try:
        events = aiter(call)
        first = await anext(events)
        assert first.WhichOneof("event") == "reserved"
        answer = Answer(first.reserved)
        legs.append(asyncio.create_task(_read(events, answer)))
        if first.reserved.num_entries:
            legs.append(asyncio.create_task(_prefill(prefill, prefill_request(ask, first.reserved), answer, timeout_s)))
        await asyncio.gather(*legs)
        return answer
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    finally:
        for leg in legs:
            leg.cancel()
        call.cancel()


async def _read(events: AsyncIterator[pb.DecodeEvent], answer: Answer) -> None:
    async for event in events:
        if event.WhichOneof("event") == "finished":
            answer.finished = event.finished
        else:
            answer.token_ids += event.tokens.token_ids
            answer.children.setdefault(event.tokens.index, []).extend(event.tokens.token_ids)
            answer.logprobs += event.tokens.logprobs
            answer.top += [dict(zip(top.token_ids, top.values, strict=True)) for top in event.tokens.top_logprobs]
    assert answer.finished is not None


async def _prefill(prefill: Endpoint, request: pb.PrefillRequest, answer: Answer, timeout_s: float) -> None:
    answer.prefill = await prefill.prefill.Prefill(request, timeout=timeout_s)


async def generate_all(asks: Sequence[Ask], prefill: Endpoint, decode: Endpoint, **options: Any) -> list[Answer]:
    return list(await asyncio.gather(*(generate(ask, prefill, decode, **options) for ask in asks)))


@asynccontextmanager
async def in_process(
    prefill: WorkerConfig, decode: WorkerConfig, **seams: Any
) -> AsyncIterator[tuple[PrefillWorker, DecodeWorker, Endpoint, Endpoint]]:
    """One worker of each pool on this event loop, with real gRPC and a real pair between them. Idle at the end, or it fails."""
    workers = PrefillWorker(prefill, **seams), DecodeWorker(decode)
    endpoints = [Endpoint(await worker.start()) for worker in workers]
    try:
        yield *workers, *endpoints  # type: ignore[misc]
        await endpoints[0].idle(Pool.PREFILL)
        await endpoints[1].idle(Pool.DECODE)
    finally:
        for endpoint in endpoints:
            await endpoint.close()
        for worker in workers:
            await worker.stop(0.0)


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, pool: Pool) -> None:
        self.process = process
        self.pool = pool
        self.endpoint = Endpoint(address)

    @classmethod
    async def start(cls, config: WorkerConfig, folder: Path, faults: dict[str, Any] | None = None) -> "WorkerProcess":
        path = folder / f"{config.worker_id}-{config.epoch}.json"
        path.write_text(json.dumps(config.to_dict()))
        environment = os.environ | {"PYTHONPATH": _SOURCE} | ({"SHOAL_FAULTS": json.dumps(faults)} if faults else {})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"shoal.{config.pool}_worker",
            str(path),
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if not line:
            raise RuntimeError(f"{config.worker_id} did not start (exit status {await process.wait()})")
        return cls(process, json.loads(line)["address"], config.pool)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """SIGTERM (a drain), or nothing more than reaping when it is dead already."""
        await self.endpoint.close()
        if self.process.returncode is None:
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), 15)
        except TimeoutError:
            self.kill()
            await self.process.wait()
            raise


@asynccontextmanager
async def processes(
    folder: Path, *configs: WorkerConfig, faults: dict[str, Any] | None = None
) -> AsyncIterator[list[WorkerProcess]]:
    """Worker processes, started side by side; `faults` are the prefill workers'. None is left behind."""
    starts = [WorkerProcess.start(c, folder, faults if c.pool is Pool.PREFILL else None) for c in configs]
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    running = [outcome for outcome in outcomes if isinstance(outcome, WorkerProcess)]
    try:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        yield running
    finally:
        await asyncio.gather(*(worker.close() for worker in running))


async def ends_with(call: Any) -> ShoalError:
    """The error a call ends with."""
    try:
        await call
    except ShoalError as error:
        return error
    raise AssertionError("the call succeeded")
