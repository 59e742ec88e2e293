"""One request and its answer on the wire: bodies in, JSON or server-sent events out, and an end when the client leaves.

Knows ASGI; knows no endpoint.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from shoal.errors import InvalidRequest, Unavailable
from shoal.router.http.errors import BodyTooLarge, BodyTooSlow, ErrorAnswer, answer_error
from shoal.router.http.fields import Fields, dump_json, parse_json
from shoal.router.http.list_sizes import check_lists, check_structure

_DRAINED_TIMES: Final = 4  # a body so many times too long is still read to its end, so that the client sees the answer
Headers = Iterable[tuple[str, str]]


async def read_fields(request: Request, max_bytes: int, timeout_s: float) -> Fields:
    """The body's JSON object. Raises InvalidRequest (400), BodyTooLarge (413), BodyTooSlow (408)."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(f"the content type is {kind!r}; send JSON with content-type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise InvalidRequest(f"the body's content-encoding is {coding!r}; send it as it is: small bodies can unpack to huge ones")
    too_large = BodyTooLarge(f"the body exceeds the limit of {max_bytes} bytes; shorten it")
    declared = int(request.headers.get("content-length", "0"))  # the parser lets only numbers of 64 bits through
    waits = request.headers.get("expect", "").lower() == "100-continue"  # nothing is sent until we ask for it
    if declared > (max_bytes if waits else _DRAINED_TIMES * max_bytes):
        raise too_large
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes <= max_bytes:
                    body += piece
                elif num_bytes > _DRAINED_TIMES * max_bytes:
                    break
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None
    if num_bytes > max_bytes:
        raise too_large
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    check_structure(body)
    value = parse_json(bytes(body))
    check_lists(value)
    return Fields(value)


class Exchange:
    """An answer that is worked out while the client waits; the work is cancelled at once when it leaves.

    Work that is cancelled because the server stops ends with words: Unavailable, or a stream's last event.
    """

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tell(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        async with _while_client_stays(receive) as presence:
            try:
                await self._work(tell)
            except asyncio.CancelledError:
                if presence.has_left:
                    raise
                presence.task.uncancel()
                stopping = Unavailable("the router is stopping; retry the request")
                if not started:
                    raise stopping from None
                await _send_event(send, dump_json(answer_error(stopping).body))
                await send({"type": "http.response.body", "body": b""})


@dataclass(slots=True)
class _Presence:
    """Of the client."""

    task: asyncio.Task[Any]
    has_left: bool = False


@asynccontextmanager
async def _while_client_stays(receive: Receive) -> AsyncIterator[_Presence]:
    task = asyncio.current_task()
    assert task is not None
    presence = _Presence(task)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        presence.has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        try:
            yield presence
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
    except asyncio.CancelledError:
        if not presence.has_left or task.uncancel() > 0:
            raise


async def send_json(send: Send, value: Any, status: int = 200, headers: Headers = ()) -> None:
    """A whole answer."""
    body = dump_json(value).encode()
    await _start(send, status, "application/json", (*headers, ("content-length", str(len(body)))))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, answer: ErrorAnswer) -> None:
    """An error's answer; the connection ends, since some of the body may be unread."""
    headers = (*answer.headers, ("connection", "close")) if answer.status in (401, 408, 413) else answer.headers
    await send_json(send, answer.body, answer.status, headers)


async def send_events(
    send: Send, events: AsyncGenerator[Mapping[str, Any], None], to_error: Callable[[Exception], ErrorAnswer]
) -> None:
    """Server-sent events, ended by `[DONE]`. An error before the first event is raised; a later one is the last event."""
    started = False
    try:
        async for event in events:
            if not started:
                started = True
                await _start(
                    send, 200, "text/event-stream; charset=utf-8", (("cache-control", "no-store"), ("x-accel-buffering", "no"))
                )
            await _send_event(send, dump_json(event))
    except Exception as error:
        if not started:
            raise
        await _send_event(send, dump_json(to_error(error).body))
    else:
        await _send_event(send, "[DONE]")
    finally:
        await events.aclose()
    await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _start(send: Send, status: int, kind: str, headers: Headers) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (("content-type", kind), *headers)]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
