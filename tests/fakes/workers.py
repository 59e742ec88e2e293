"""A decode and a prefill worker that speak the internal protos over real gRPC and generate a scripted answer."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shoal.config.disaggregation import DisaggregationRule
from shoal.errors import ShoalError
from shoal.pb.internal.v1 import worker_pb2, worker_pb2_grpc
from shoal.pb.v1 import shoal_pb2
from shoal.placement.disaggregate import PrefillSite, choose_prefill_site
from shoal.rpc import Address, RpcServer
from shoal.visibility import Visibility

NUM_LAYERS = 30
ENTRY_BYTES = 100  # of the fake plan: one entry per layer below K
_numbers = itertools.count()


async def until(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    """Wait for something another task will do. TimeoutError when it does not."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Wire:
    """Stands for KV transfer: decode waits until prefill has delivered an attempt."""

    def __init__(self) -> None:
        self.delivered: dict[str, asyncio.Event] = defaultdict(asyncio.Event)


def fingerprint(revision: str, **changes: Any) -> worker_pb2.Fingerprint:
    fields = dict(
        revision=revision, num_layers=NUM_LAYERS, hidden_size=576, num_kv_heads=3, head_dim=64, dtype="float32",
        block_size=16, rope="default", max_entry_bytes=8 << 20, max_entry_tokens=2048,
    )  # fmt: skip
    return worker_pb2.Fingerprint(**{**fields, **changes})


class FakeWorker:
    pool = ""

    def __init__(
        self, wire: Wire, revision: str, worker_id: str, allowed: tuple[str, ...] = ("full", "speed:22", "pop:20"), epoch: int = 1
    ) -> None:
        self.wire, self.worker_id = wire, worker_id
        self.description = worker_pb2.WorkerDescription(
            worker_id=worker_id, pool=self.pool, epoch=epoch, fingerprint=fingerprint(revision),
            allowed_visibilities=allowed, max_boundary_tokens=64,
        )  # fmt: skip
        self.seen: list[Any] = []
        self.running = 0
        self.error: ShoalError | None = None  # raised before any work
        self.next_error: ShoalError | None = None  # before that of the next request alone
        self.background_error: ShoalError | None = None  # before that of replays
        self.hang = False
        self.outstanding = 0
        self.report: dict[str, Any] = {}  # more of its load report
        self.is_silent = False  # gives no load report
        self.knows_sessions = True  # else it is of an older version
        self.server = RpcServer()

    def _error(self) -> ShoalError | None:
        error, self.next_error = self.next_error or self.error, None
        return error

    async def start(self) -> None:
        stem = "DecodeWorker" if self.pool == "decode" else "PrefillWorker"
        register = getattr(worker_pb2_grpc, f"add_{stem}Servicer_to_server")
        self.server.add(register, self, worker_pb2.DESCRIPTOR.services_by_name[stem])
        if self.knows_sessions:
            self.server.add_sessions()
        self.description.address = str(await self.server.start(Address("127.0.0.1", 0)))

    async def stop(self) -> None:
        await self.server.stop()

    async def idle(self) -> None:
        """Wait until no call runs, 2 s at most: what 'ends both legs' means."""
        await until(lambda: not self.running)

    async def busy(self) -> None:
        await until(lambda: self.running > 0)

    async def Describe(self, request: Any, context: Any) -> worker_pb2.WorkerDescription:
        return self.description

    async def GetLoad(self, request: Any, context: Any) -> shoal_pb2.WorkerLoad:
        if self.is_silent:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no report")
        return shoal_pb2.WorkerLoad(
            worker_id=self.worker_id, pool=self.pool, num_running_reqs=self.running, outstanding_token_layers=self.outstanding,
            **self.report,
        )  # fmt: skip


class FakeDecodeWorker(FakeWorker, worker_pb2_grpc.DecodeWorkerServicer):
    """Generates `script` (repeated for ever), `batch` tokens a message."""

    pool = "decode"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.script: list[int] = [100, 101, 102, 103, 104, 105, 106, 107]
        self.batch = 1
        self.reserve_s = 0.0  # before the reservation
        self.delay_s = 0.0  # before each message of tokens
        self.fail_after: tuple[int, ShoalError] | None = None  # so many tokens of this stream, then the error
        self.forget_end = False  # end the stream without a final message
        self.cached_tokens = 0
        self.num_sent = 0

    async def Decode(self, request: worker_pb2.DecodeRequest, context: Any) -> AsyncIterator[worker_pb2.DecodeEvent]:
        self.seen.append(request)
        self.running += 1
        try:
            if (error := self.background_error if request.background else self._error()) is not None:
                raise error
            async for event in self._events(request):
                yield event
        finally:
            self.running -= 1

    async def AbortRequests(self, request: worker_pb2.AbortRequestsRequest, context: Any) -> worker_pb2.AbortRequestsResponse:
        return worker_pb2.AbortRequestsResponse()

    async def _events(self, request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        visibility = Visibility.parse(request.visibility)
        split = visibility.split(len(request.prompt_ids))
        await asyncio.sleep(self.reserve_s)
        attempt_id = f"attempt-{next(_numbers)}"
        local = request.local_prefill
        prefill = choose_prefill_site(
            DisaggregationRule(local.below_tokens, local.cached_share or 1.0),
            split.num_prefill_tokens,
            self.cached_tokens,
            is_colocated=self.description.colocated,
            has_prefill_worker=not local.no_prefill_worker,
            has_images=any(image.start + image.num_tokens > self.cached_tokens for image in request.images),
        )
        num_entries = visibility.depth(NUM_LAYERS) if prefill.site is PrefillSite.PREFILL_WORKER else 0
        yield worker_pb2.DecodeEvent(
            reserved=worker_pb2.Reserved(
                attempt_id=attempt_id, visibility=request.visibility, plan_digest="digest", num_entries=num_entries,
                plan_bytes=num_entries * ENTRY_BYTES, lease_s=30, worker_id=self.worker_id, epoch=self.description.epoch,
                cached_tokens=self.cached_tokens, prefill_at=prefill.site, prefill_reason=prefill.reason,
            )
        )  # fmt: skip
        if num_entries:
            await self.wire.delivered[attempt_id].wait()
        if self.hang:
            await asyncio.sleep(60)
        sampling, first = request.sampling, len(request.replay_token_ids)
        tokens = itertools.islice(itertools.cycle(self.script), first, first + sampling.max_tokens)
        if request.continuation_ids:
            tokens = itertools.islice(request.continuation_ids, len(request.continuation_ids))
        finished = worker_pb2.Finished(
            finish_reason="length",
            received_payload_bytes=num_entries * ENTRY_BYTES,
            kv_layer_tokens=7,
            kv_bytes=70,
            prefill_ms=1.5 if prefill.is_local else 0.0,
        )
        sent = 0
        for chunk in _batched(tokens, self.batch):
            if self.fail_after is not None and sent >= self.fail_after[0]:
                raise self.fail_after[1]
            stop = next((i for i, token in enumerate(chunk) if token in sampling.stop_token_ids), None)
            chunk = chunk if stop is None else chunk[: stop + 1]
            message = worker_pb2.SampledTokens(token_ids=chunk)
            if sampling.HasField("num_logprobs"):
                message.logprobs.extend(-0.5 for _ in chunk)
                tops = [shoal_pb2.TopLogProbs(values=[-0.5], token_ids=[t]) for t in chunk]
                message.top_logprobs.extend(tops if sampling.num_logprobs else [])
            await asyncio.sleep(self.delay_s)
            sent += len(chunk)
            self.num_sent += len(chunk)
            for message.index in range(request.num_children or 1):  # every child says the same
                yield worker_pb2.DecodeEvent(tokens=message)
            if stop is not None:
                finished.finish_reason, finished.matched_token_id = "stop", chunk[-1]
                break
        if not self.forget_end:
            for finished.index in range(request.num_children or 1):
                yield worker_pb2.DecodeEvent(finished=finished)


class FakePrefillWorker(FakeWorker, worker_pb2_grpc.PrefillWorkerServicer):
    pool = "prefill"
    hang_delivered = False  # deliver, and do not answer

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Any) -> worker_pb2.PrefillResponse:
        self.seen.append(request)
        self.running += 1
        try:
            if (error := self._error()) is not None:
                raise error
            if self.hang:
                await asyncio.sleep(60)
            self.wire.delivered[request.attempt_id].set()
            if self.hang_delivered:
                await asyncio.sleep(60)
            sent = Visibility.parse(request.visibility).depth(NUM_LAYERS) * ENTRY_BYTES
            return worker_pb2.PrefillResponse(sent_payload_bytes=sent, queue_ms=1, compute_ms=2, after_compute_ms=0.5)
        finally:
            self.running -= 1


def _batched(items: Any, size: int) -> Any:
    while chunk := tuple(itertools.islice(items, size)):
        yield chunk
