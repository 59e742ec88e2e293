"""Sessions over real servers and channels: calls beside each other, every way one can end, and what a broken stream does."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from shoal.errors import CapacityExceeded, InternalError, InvalidRequest
from shoal.pb.internal.v1 import session_pb2 as pb
from shoal.pb.internal.v1 import session_pb2_grpc
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import Address, RpcServer, Session, SessionCall, error_from_rpc, open_channel, time_remaining_s
from shoal.rpc.session_client import MANY_MESSAGES
from tests.fakes.workers import until

SERVICE = shoal_pb2.DESCRIPTOR.services_by_name["Shoal"]
GENERATE, ABORT = "/shoal.v1.Shoal/Generate", "/shoal.v1.Shoal/Abort"
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class Servicer(shoal_pb2_grpc.ShoalServicer):
    """Generate counts to the request's `n`, one message each, or does what its id says."""

    def __init__(self) -> None:
        self.running = 0
        self.num_sent: dict[str, int] = {}
        self.remaining_s = 0.0
        self.metadata: Any = ()
        self.go = asyncio.Event()

    async def Generate(self, request: shoal_pb2.GenerateRequest, context: Any) -> AsyncIterator[shoal_pb2.GenerateResponse]:
        self.running += 1
        self.remaining_s, self.metadata = time_remaining_s(context, 1000.0), context.invocation_metadata()
        try:
            for number in range(request.sampling_params.n):
                self.num_sent[request.request_id] = number + 1
                yield shoal_pb2.GenerateResponse(request_id=f"{request.request_id}-{number}")
            match request.request_id:
                case "full":
                    raise CapacityExceeded("no room", retry_after_s=7)
                case "bug":
                    raise ValueError("secret words")
                case "hang":
                    await self.go.wait()
        finally:
            self.running -= 1

    async def Abort(self, request: shoal_pb2.AbortRequest, context: Any) -> shoal_pb2.AbortResponse:
        if not request.request_ids:
            raise InvalidRequest("name one")
        return shoal_pb2.AbortResponse(num_aborted=len(request.request_ids))


class Ends:
    """A server with sessions, and a caller's session with it."""

    def __init__(self) -> None:
        self.servicer, self.server = Servicer(), RpcServer()
        self.server.add(shoal_pb2_grpc.add_ShoalServicer_to_server, self.servicer, SERVICE)
        self.server.add_sessions()

    async def __aenter__(self) -> "Ends":
        self.address = str(await self.server.start(Address("127.0.0.1", 0)))
        self.channel = open_channel(self.address)
        self.session = Session(self.channel)
        self.serving = asyncio.create_task(self.session.run())
        await until(lambda: self.session.is_open)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.serving.cancel()
        await asyncio.wait({self.serving})
        await self.channel.close(None)
        await self.server.stop()

    def generate(self, request_id: str, n: int = 3, timeout_s: float | None = 20.0, **more: Any) -> SessionCall:
        request = shoal_pb2.GenerateRequest(request_id=request_id)
        request.sampling_params.n = n
        return self.session.start(GENERATE, request.SerializeToString(), shoal_pb2.GenerateResponse.FromString, timeout_s, **more)

    def abort(self, *ids: str) -> SessionCall:
        message = shoal_pb2.AbortRequest(request_ids=ids).SerializeToString()
        return self.session.start(ABORT, message, shoal_pb2.AbortResponse.FromString, 20.0)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with Ends() as both:
        yield both


async def read_all(call: SessionCall) -> list[str]:
    ids = []
    while (message := await call.read()) is not EOF:
        ids.append(message.request_id)
    return ids


async def error_of(call: SessionCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value


async def test_calls_beside_each_other_get_their_own_answers_in_order(ends: Ends) -> None:
    calls = {f"c{index}": ends.generate(f"c{index}", n=index) for index in range(30)}
    for request_id, call in reversed(calls.items()):
        assert await read_all(call) == [f"{request_id}-{number}" for number in range(int(request_id[1:]))]
    assert (await ends.abort("a", "b").read()).num_aborted == 2
    assert ends.session.num_calls == 0


async def test_a_call_left_ends_at_the_server_and_no_other_does(ends: Ends) -> None:
    left, kept = ends.generate("hang", n=1), ends.generate("hang", n=2)
    assert (await left.read()).request_id == "hang-0"
    await until(lambda: ends.servicer.running == 2)
    left.cancel()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left.read()
    await until(lambda: ends.servicer.running == 1)
    ends.servicer.go.set()
    assert await read_all(kept) == ["hang-0", "hang-1"]


async def test_a_call_cancelled_in_the_message_that_began_it_leaves_nothing(ends: Ends) -> None:
    start = pb.StartCall(method=GENERATE, message=shoal_pb2.GenerateRequest(request_id="hang").SerializeToString(), timeout_s=60)
    requests = [pb.SessionRequest(call=1, start=start), pb.SessionRequest(call=1, cancel=pb.CancelCall())]
    last = pb.StartCall(method=ABORT, message=shoal_pb2.AbortRequest(request_ids=["a"]).SerializeToString())
    stream = session_pb2_grpc.SessionsStub(ends.channel).Open()
    await stream.read()
    await stream.write(pb.SessionRequests(requests=[*requests, pb.SessionRequest(call=2, start=last)]))
    while not any(reply.call == 2 and reply.HasField("end") for reply in (await stream.read()).replies):
        pass
    sessions = ends.server._sessions
    assert sessions is not None
    sessions.drain()
    assert await asyncio.wait_for(stream.read(), 10) is EOF, "a session without calls ends when its server drains"


async def test_a_reader_that_is_cancelled_leaves_its_call(ends: Ends) -> None:
    reading = asyncio.create_task(read_all(ends.generate("hang")))
    await until(lambda: ends.servicer.running == 1)
    reading.cancel()
    await until(lambda: ends.servicer.running == 0)
    assert ends.session.num_calls == 0 and ends.session.is_open


async def test_errors_come_with_code_words_and_trailing_metadata(ends: Ends) -> None:
    error = await error_of(ends.generate("full"))
    mapped = error_from_rpc(error)
    assert isinstance(mapped, CapacityExceeded) and (str(mapped), mapped.retry_after_s) == ("no room", 7.0)
    error = await error_of(ends.abort())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "name one")
    error = await error_of(ends.generate("bug"))
    assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in (error.details() or "")
    assert await read_all(ends.generate("after")) == ["after-0", "after-1", "after-2"]


async def test_messages_before_an_error_are_read_first(ends: Ends) -> None:
    call = ends.generate("full", n=2)
    await until(lambda: ends.session.num_calls == 0)
    assert [(await call.read()).request_id for _ in range(2)] == ["full-0", "full-1"]
    await error_of(call)


async def test_deadline_and_metadata_reach_the_handler_and_the_deadline_ends_both_ends(ends: Ends) -> None:
    call = ends.generate("hang", timeout_s=0.4, metadata=(("traceparent", "00-1-2-3"),))
    assert (await error_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < ends.servicer.remaining_s <= 0.4
    assert ("traceparent", "00-1-2-3") in ends.servicer.metadata
    await until(lambda: ends.servicer.running == 0)
    await read_all(ends.generate("none", timeout_s=None))
    assert ends.servicer.remaining_s == 1000.0


async def test_the_server_keeps_deadlines_by_itself(ends: Ends) -> None:
    async with raw_stream(ends) as stream:
        await stream.write(pb.SessionRequests(requests=[start(1, "hang", n=0, timeout_s=0.2)]))
        reply = await next_reply(stream)
        assert reply.end.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert ends.servicer.running == 0


async def test_a_killed_server_ends_every_call_as_unavailable(ends: Ends) -> None:
    calls = [ends.generate("hang", n=1) for _ in range(5)]
    await until(lambda: ends.servicer.running == 5)
    await ends.server.stop()
    for call in calls:
        assert (await call.read()).request_id == "hang-0"
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "session" in (error.details() or "")
    assert ends.servicer.running == 0 and not ends.session.is_open
    with pytest.raises(InternalError, match="not open"):
        ends.generate("late")


async def test_a_caller_that_goes_strands_nothing(ends: Ends) -> None:
    calls = [ends.generate("hang") for _ in range(5)]
    await until(lambda: ends.servicer.running == 5)
    await ends.channel.close(None)
    await until(lambda: ends.servicer.running == 0)
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(call)


async def test_stopping_waits_for_calls_and_not_for_idle_sessions(ends: Ends) -> None:
    call = ends.generate("hang", n=1)
    await call.read()
    stopping = asyncio.create_task(ends.server.stop(20.0))
    await asyncio.sleep(0.1)
    late = await error_of(ends.generate("late"))
    assert late.code() is grpc.StatusCode.UNAVAILABLE and not stopping.done()
    ends.servicer.go.set()
    assert await call.read() is EOF
    await asyncio.wait_for(stopping, 5)
    await asyncio.wait_for(ends.serving, 5)  # it ended well


async def test_a_slow_reader_neither_blocks_others_nor_gathers_without_bound(ends: Ends) -> None:
    slow = ends.generate("slow", n=50_000)
    assert (await slow.read()).request_id == "slow-0"
    fast = await asyncio.wait_for(read_all(ends.generate("fast", n=2_000)), 20)
    assert len(fast) == 2_000
    await asyncio.sleep(0.3)
    ahead = ends.servicer.num_sent["slow"]
    assert MANY_MESSAGES <= ahead < 25_000  # what was under way when it was paused
    await asyncio.sleep(0.3)
    assert ends.servicer.num_sent["slow"] == ahead
    rest = await asyncio.wait_for(read_all(slow), 60)
    assert rest == [f"slow-{number}" for number in range(1, 50_000)]


async def test_a_thousand_calls_leave_nothing_behind(ends: Ends) -> None:
    async def one(index: int) -> None:
        call = ends.generate("hang" if index % 3 == 0 else "plain", n=2)
        await call.read()
        if index % 3 == 0:
            call.cancel()
        else:
            assert len(await read_all(call)) == 1

    await one(0)
    num_tasks = len(asyncio.all_tasks())
    for chunk in range(20):
        await asyncio.gather(*(one(chunk * 50 + index) for index in range(50)))
    await until(lambda: ends.servicer.running == ends.session.num_calls == 0)
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
    gc.collect()
    assert sum(type(thing) is SessionCall for thing in gc.get_objects()) <= 1


async def test_what_cannot_be_called_or_read_ends_that_call_alone(ends: Ends) -> None:
    parse = shoal_pb2.GenerateResponse.FromString
    unknown = await error_of(ends.session.start("/shoal.v1.Shoal/Nothing", b"", parse, 5.0))
    assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED and "Nothing" in (unknown.details() or "")
    itself = await error_of(ends.session.start("/shoal.internal.v1.Sessions/Open", b"", parse, 5.0))
    assert itself.code() is grpc.StatusCode.UNIMPLEMENTED
    broken = await error_of(ends.session.start(GENERATE, b"\xff\xff\xff", parse, 5.0))
    assert broken.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await read_all(ends.generate("after", n=1)) == ["after-0"]


async def test_a_server_without_sessions_says_unimplemented() -> None:
    server = RpcServer()
    server.add(shoal_pb2_grpc.add_ShoalServicer_to_server, Servicer(), SERVICE)
    address = await server.start(Address("127.0.0.1", 0))
    async with server, open_channel(str(address)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Session(channel).run()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([("start", 1), ("start", 1)], "call 1 of the session was begun before"),
        ([("start", 5), ("start", 3)], "call 3 of the session was begun before"),
        ([("start", 0)], "call 0"),
        ([("cancel", 9)], "call 9, which was never begun"),
        ([("start", 1), ("nothing", 1)], "nothing known"),
    ],
)
async def test_envelopes_that_make_no_sense_end_the_session_with_words(
    ends: Ends, requests: list[tuple[str, int]], words: str
) -> None:
    beside = ends.generate("hang", n=1)
    assert await beside.read()
    async with raw_stream(ends) as stream:
        made = [start(number, "hang") if kind == "start" else pb.SessionRequest(call=number) for kind, number in requests]
        for (kind, _), request in zip(requests, made, strict=True):
            if kind == "cancel":
                request.cancel.SetInParent()
        await stream.write(pb.SessionRequests(requests=made))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not EOF:
                continue
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in (caught.value.details() or "")
    await until(lambda: ends.servicer.running == 1)
    beside.cancel()


async def test_bytes_that_are_no_envelope_end_the_session_with_words(ends: Ends) -> None:
    call = ends.channel.stream_stream("/shoal.internal.v1.Sessions/Open")()
    await call.read()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not EOF:
            continue
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "envelope" in (caught.value.details() or "")


@pytest.mark.parametrize("reply", [pb.SessionReply(call=99, message=b""), pb.SessionReply(call=1)])
async def test_a_server_whose_replies_make_no_sense_loses_the_session(reply: pb.SessionReply) -> None:
    class Odd(session_pb2_grpc.SessionsServicer):
        async def Open(self, requests: Any, context: Any) -> AsyncIterator[pb.SessionReplies]:
            yield pb.SessionReplies()
            async for _ in requests:
                yield pb.SessionReplies(replies=[reply])

    server = RpcServer()
    service = pb.DESCRIPTOR.services_by_name["Sessions"]
    server.add(session_pb2_grpc.add_SessionsServicer_to_server, Odd(), service)
    address = await server.start(Address("127.0.0.1", 0))
    async with server, open_channel(str(address)) as channel:
        session = Session(channel)
        serving = asyncio.create_task(session.run())
        await until(lambda: session.is_open)
        call = session.start(GENERATE, b"", shoal_pb2.GenerateResponse.FromString, 5.0)
        assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(InternalError, match=r"call 99|kind None"):
            await serving


def start(number: int, request_id: str, n: int = 1, timeout_s: float | None = None) -> pb.SessionRequest:
    request = shoal_pb2.GenerateRequest(request_id=request_id)
    request.sampling_params.n = n
    message = request.SerializeToString()
    return pb.SessionRequest(call=number, start=pb.StartCall(method=GENERATE, message=message, timeout_s=timeout_s))


async def next_reply(stream: Any) -> pb.SessionReply:
    while not (replies := (await stream.read()).replies):
        continue
    return replies[0]  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def raw_stream(ends: Ends) -> AsyncIterator[Any]:
    stub: Any = session_pb2_grpc.SessionsStub(ends.channel)
    stream = stub.Open()
    try:
        await stream.read()
        yield stream
    finally:
        stream.cancel()
