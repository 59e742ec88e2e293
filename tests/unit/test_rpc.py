"""The gRPC plumbing on real servers and channels: status table, leaking nothing, binding, health, reflection, deadlines."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from shoal import errors
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.rpc import (
    Address,
    RpcServer,
    error_from_rpc,
    error_from_status,
    open_channel,
    open_sync_channel,
    serve_metrics,
    time_remaining_s,
    to_status,
)
from shoal.rpc.server import SERVER_OPTIONS

SERVICE = shoal_pb2.DESCRIPTOR.services_by_name["Shoal"]
LOOPBACK = Address("127.0.0.1", 0)


class Raising(shoal_pb2_grpc.ShoalServicer):
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.remaining_s = -1.0
        self.closed = asyncio.Event()

    async def Abort(self, request: shoal_pb2.AbortRequest, context: object) -> shoal_pb2.AbortResponse:
        self.remaining_s = time_remaining_s(context, 1000.0)
        if self.error is not None:
            raise self.error
        return shoal_pb2.AbortResponse(num_aborted=len(request.request_ids))

    async def Generate(self, request: shoal_pb2.GenerateRequest, context: object) -> AsyncIterator[shoal_pb2.GenerateResponse]:
        try:
            yield shoal_pb2.GenerateResponse(request_id=request.request_id)
            if self.error is not None:
                raise self.error
            await asyncio.sleep(60)
        finally:
            self.closed.set()


async def started(servicer: Raising) -> tuple[RpcServer, Address]:
    server = RpcServer()
    server.add(shoal_pb2_grpc.add_ShoalServicer_to_server, servicer, SERVICE)
    return server, await server.start(LOOPBACK)


def all_errors() -> list[type[errors.ShoalError]]:
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.ShoalError)]


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_has_a_status_and_comes_back_as_itself_or_its_base(cls: type[errors.ShoalError]) -> None:
    back = error_from_status(to_status(cls("why")), "why")
    assert str(back) == "why"
    assert issubclass(cls, type(back)) or cls is errors.ShoalError
    assert len(all_errors()) >= 13


@pytest.mark.parametrize("cls", [c for c in all_errors() if c not in (errors.ShoalError, errors.InternalError)])
async def test_a_shoal_error_travels_with_its_message(cls: type[errors.ShoalError]) -> None:
    server, address = await started(Raising(cls("change this")))
    async with server, open_channel(str(address)) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(shoal_pb2.AbortRequest())
        assert (caught.value.code(), caught.value.details()) == (to_status(cls("")), "change this")
        assert issubclass(cls, type(error_from_rpc(caught.value)))


@pytest.mark.parametrize("error", [RuntimeError("secret prompt"), errors.InternalError("secret state")])
async def test_anything_else_is_internal_with_an_id_that_the_log_has(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    server, address = await started(Raising(error))
    async with server, open_channel(str(address)) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Abort(shoal_pb2.AbortRequest())
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            _ = [r async for r in stub.Generate(shoal_pb2.GenerateRequest())]
    for caught in (unary, stream):
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())
        incident_id = str(caught.value.details()).rsplit(" ", 1)[-1]
        assert len(incident_id) == 12 and incident_id in caplog.text


BROKEN = [
    (b"\x0a\x02\xff\xfe", "request_id is not valid UTF-8"),
    (b"\x2a\x04\x2a\x02\xc3\x28", "sampling_params.stop is not valid UTF-8"),
    (b"\x22\x06\x0a\x04\x12\x02\xe6\x97", "chat.messages.content is not valid UTF-8"),
    (b"\x30\x01\x1a\x01\x80", "text is not valid UTF-8"),
    (b"\x0a\x7f\x41", "the request is no shoal.v1.GenerateRequest message"),
    (b"\xff" * 12, "the request is no shoal.v1.GenerateRequest message"),
    (b"\x2a\x02\x0d\x00", "the request is no shoal.v1.GenerateRequest message"),
]


@pytest.mark.parametrize(("data", "words"), BROKEN)
async def test_what_cannot_be_read_is_the_callers_error_and_names_the_field(data: bytes, words: str) -> None:
    servicer = Raising()
    server, address = await started(servicer)
    async with server, open_channel(str(address)) as channel:
        call = channel.unary_stream("/shoal.v1.Shoal/Generate", None, shoal_pb2.GenerateResponse.FromString)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [reply async for reply in call(data)]
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, words)
        unary = channel.unary_unary("/shoal.v1.Shoal/Abort", None, shoal_pb2.AbortResponse.FromString)
        with pytest.raises(grpc.aio.AioRpcError, match="request_ids is not valid UTF-8"):
            await unary(b"\x0a\x01\xff")


async def test_a_downstream_status_passes_through() -> None:
    inner, inner_address = await started(Raising(errors.CapacityExceeded("the pool is full; retry later")))

    class Forwarding(Raising):
        async def Abort(self, request: shoal_pb2.AbortRequest, context: object) -> shoal_pb2.AbortResponse:
            async with open_channel(str(inner_address)) as channel:
                return await shoal_pb2_grpc.ShoalStub(channel).Abort(request)

    outer, outer_address = await started(Forwarding())
    async with inner, outer, open_channel(str(outer_address)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shoal_pb2_grpc.ShoalStub(channel).Abort(shoal_pb2.AbortRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the pool is full; retry later"


async def test_a_cancelled_stream_closes_its_handler() -> None:
    servicer = Raising()
    server, address = await started(servicer)
    async with server, open_channel(str(address)) as channel:
        call = shoal_pb2_grpc.ShoalStub(channel).Generate(shoal_pb2.GenerateRequest(request_id="a"))
        assert (await call.read()).request_id == "a"
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), 2)


async def test_deadlines_pass_on_and_have_a_maximum() -> None:
    servicer = Raising()
    server, address = await started(servicer)
    async with server, open_channel(str(address)) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        await stub.Abort(shoal_pb2.AbortRequest())
        assert servicer.remaining_s == 1000.0
        await stub.Abort(shoal_pb2.AbortRequest(), timeout=30)
        assert 20 < servicer.remaining_s < 32


async def test_a_port_in_use_is_noticed() -> None:
    server, address = await started(Raising())
    async with server:
        assert address.port > 0
        with pytest.raises(errors.InvalidConfig, match=r"port is in use.*another port"):
            await RpcServer().start(address)


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", ":0", "*:0"])
async def test_a_wildcard_must_be_asked_for(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="every interface"):
        await RpcServer().start(Address.parse(text))
    with pytest.raises(errors.InvalidConfig, match="every interface"):
        serve_metrics(Address.parse(text))


async def test_an_asked_for_wildcard_binds() -> None:
    server = RpcServer()
    async with server:
        assert (await server.start(Address("0.0.0.0", 0), allow_wildcard=True)).port > 0


@pytest.mark.parametrize("text", ["", "localhost", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "::1:50051", "h:5x"])
def test_bad_addresses_show_the_form(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=r"127\.0\.0\.1:50051|\[::1\]:50051"):
        Address.parse(text)


def test_addresses_print_as_they_parse() -> None:
    assert [str(Address.parse(t)) for t in ("127.0.0.1:0", "[::1]:50051")] == ["127.0.0.1:0", "[::1]:50051"]
    assert Address.parse("[::1]:50051") == Address("::1", 50051)


async def test_health_follows_the_server_and_reflection_names_the_services() -> None:
    server, address = await started(Raising())
    async with server, open_channel(str(address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

        not_serving, serving = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
        assert [await check(s) for s in ("", "shoal.v1.Shoal")] == [not_serving, not_serving]
        await server.set_serving(True)
        assert [await check(s) for s in ("", "shoal.v1.Shoal")] == [serving, serving]

        def names() -> set[str]:
            with open_sync_channel(str(address)) as sync_channel:
                return set(ProtoReflectionDescriptorDatabase(sync_channel).get_services())

        assert await asyncio.to_thread(names) >= {"shoal.v1.Shoal", "grpc.health.v1.Health"}
        await server.drain()
        await server.set_serving(True)
        assert [await check(s) for s in ("", "shoal.v1.Shoal")] == [not_serving, not_serving]
        # calls go on while draining
        assert (await shoal_pb2_grpc.ShoalStub(channel).Abort(shoal_pb2.AbortRequest(request_ids=["a"]))).num_aborted == 1


async def test_messages_larger_than_grpcs_default_pass() -> None:
    server, address = await started(Raising())
    async with server, open_channel(str(address)) as channel:
        request = shoal_pb2.AbortRequest(request_ids=["x" * (8 << 20)])
        assert (await shoal_pb2_grpc.ShoalStub(channel).Abort(request)).num_aborted == 1


async def test_a_message_over_the_limit_is_refused_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(SERVER_OPTIONS)["grpc.max_receive_message_length"] == 256 << 20
    small = {"grpc.max_receive_message_length": 1 << 20}  # the same refusal, without 256 MB
    monkeypatch.setattr("shoal.rpc.server.SERVER_OPTIONS", tuple((dict(SERVER_OPTIONS) | small).items()))
    server, address = await started(Raising())
    async with server, open_channel(str(address)) as channel:
        stub = shoal_pb2_grpc.ShoalStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(shoal_pb2.AbortRequest(request_ids=["x" * (2 << 20)]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Abort(shoal_pb2.AbortRequest(request_ids=["x"]))).num_aborted == 1


async def test_nobody_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shoal_pb2_grpc.ShoalStub(channel).Abort(shoal_pb2.AbortRequest(), timeout=5)
    assert isinstance(error_from_rpc(caught.value), errors.Unavailable)


def test_metrics_are_served_on_the_named_interface() -> None:
    import urllib.request

    server = serve_metrics(LOOPBACK)
    try:
        body = urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5).read()
        assert isinstance(body, bytes)
        with pytest.raises(errors.InvalidConfig, match="another port"):
            serve_metrics(server.address)
    finally:
        server.close()


def test_grpcs_own_words_do_not_reach_users() -> None:
    late = error_from_status(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)")
    assert "allow more time" in str(late)
    gone = error_from_status(grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed (GOAWAY received))")
    assert "closed the connection" in str(gone)
