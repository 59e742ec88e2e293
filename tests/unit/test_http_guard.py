"""Connections that bring no request end in words, are counted, and leave the others alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router

from shoal.metrics import REGISTRY
from shoal.router.http.connection import ConnectionLimits
from shoal.router.http.server import HttpServer
from shoal.rpc import Address
from shoal.rpc.open_files import raise_open_files
from tests.fakes.workers import until

LIMITS = ConnectionLimits(max_connections=3, header_s=0.5, max_header_bytes=1000)
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def _answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


async def _long(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        for _ in range(10):
            await asyncio.sleep(LIMITS.header_s / 5)
            yield "part,"

    return StreamingResponse(parts())


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = HttpServer(Router([Route("/", _answer), Route("/long", _long)]), limits=LIMITS)
    yield (await server.start(Address("127.0.0.1", 0))).port
    await server.stop()


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def told(reader: asyncio.StreamReader) -> bytes:
    """All until the server closes the connection."""
    return await asyncio.wait_for(reader.read(), 20 * LIMITS.header_s)


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One answer of a connection that goes on."""
    return await asyncio.wait_for(reader.readuntil(b"here"), 10)


def closed(reason: str) -> float:
    return REGISTRY.get_sample_value("shoal_router_closed_connections_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize("data", [b"", b"\r\n", b"GET / HTTP/1.1\r\nx-a: ", b"POST / HTTP/1.1\r\n"])
async def test_one_without_a_whole_request_is_closed_in_time(port: int, data: bytes) -> None:
    before = closed("late_headers")
    reader, writer = await connect(port, data)
    words = await told(reader)
    assert words.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"no whole request arrived within 0.5 s" in words
    assert closed("late_headers") == before + 1
    writer.close()


async def test_a_byte_now_and_then_gains_no_time(port: int) -> None:
    reader, writer = await connect(port, b"GET / HTTP/1.1\r\nx-a: ")
    began_at = asyncio.get_running_loop().time()
    reading = asyncio.create_task(told(reader))
    while not reading.done():
        writer.write(b"a")
        await asyncio.sleep(LIMITS.header_s / 10)
    assert b" 408 " in await reading and asyncio.get_running_loop().time() - began_at < 10 * LIMITS.header_s
    writer.close()


async def test_headers_without_end_are_refused(port: int) -> None:
    reader, writer = await connect(port, b"GET / HTTP/1.1\r\n" + b"x-a: 1\r\n" * 500)
    assert b" 431 Request Header Fields Too Large" in await told(reader)
    writer.close()


async def test_a_body_that_goes_on_after_its_answer_is_not_taken_for_headers(port: int) -> None:
    reader, writer = await connect(port, b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 6000\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"Not Found"), 10)
    writer.write(b"x" * 3000)
    await asyncio.sleep(0.1)
    writer.write(b"x" * 3000 + WHOLE)
    await answer(reader)
    writer.close()


async def test_one_too_many_is_told_so_and_the_others_go_on(port: int) -> None:
    held = [await connect(port, WHOLE) for _ in range(3)]
    for reader, _ in held:
        await answer(reader)
    reader, writer = await connect(port, WHOLE)
    assert b" 503 " in (words := await told(reader)) and b"more than 3 connections are open" in words
    held[0][1].write(WHOLE)
    await answer(held[0][0])
    for _, each in (*held, (reader, writer)):
        each.close()
    await asyncio.sleep(0.1)
    reader, writer = await connect(port, WHOLE)
    await answer(reader)
    writer.close()


async def test_an_idle_connection_may_ask_again_and_a_second_request_has_the_same_limits(port: int) -> None:
    reader, writer = await connect(port, WHOLE)
    await answer(reader)
    await asyncio.sleep(1.5 * LIMITS.header_s)
    writer.write(WHOLE)
    await answer(reader)
    writer.write(b"\r\nGET / HT")
    assert b" 408 " in await told(reader)
    writer.close()


async def test_a_long_answer_is_not_cut_by_half_a_request_behind_it(port: int) -> None:
    reader, writer = await connect(port, WHOLE.replace(b"/ ", b"/long ") + b"GET / HTTP/1.1\r\nx-a: ")
    text = await told(reader)
    assert text.count(b"part,") == 10 and b" 408 " in text
    writer.close()


async def test_the_log_tells_now_and_then(port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.router.http.connection._LOG_EVERY_S", 0.5)

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "without a request" in record.message]

    for reader, writer in [await connect(port), await connect(port), await connect(port)]:
        await told(reader)
        writer.close()
    words = "HTTP connections without a request; the last: no whole request arrived within 0.5 s"
    await until(lambda: len(lines()) == 2)
    assert lines() == [f"closed 1 {words}", f"closed 2 {words}"]


def test_as_many_files_as_the_system_allows() -> None:
    assert raise_open_files() == raise_open_files() >= 256
