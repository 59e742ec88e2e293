"""Asks for a token at both doors, before a message or a body is read. Knows gRPC's and ASGI's shapes; knows no limits."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.errors import Unauthenticated
from shoal.router.instruments import UNAUTHENTICATED
from shoal.router.tenants import CURRENT, Tenant, TokenBook
from shoal.rpc.cluster import Guard, refuse

OPEN_PATHS: Final = ("/health",)


class TokenInterceptor(Guard):
    """Of the gRPC door."""

    header = "authorization"

    def __init__(self, book: TokenBook) -> None:
        self._book = book

    def admit(self, handler: Any, brought: list[Any]) -> Any:
        try:
            tenant = self._book.authenticate(_single(brought))
        except Unauthenticated as error:
            UNAUTHENTICATED.labels("grpc").inc()
            return refuse(handler, str(error))
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=_answering_for(tenant, handler.unary_unary))
        return handler._replace(unary_stream=_streaming_for(tenant, handler.unary_stream))


def _answering_for(tenant: Tenant, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        CURRENT.set(tenant)  # each call has a task of its own, and with it a context
        return await behaviour(request, context)

    return answer


def _streaming_for(
    tenant: Tenant, behaviour: Callable[..., AsyncGenerator[Any, None]]
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def answer(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        CURRENT.set(tenant)
        async with aclosing(behaviour(request, context)) as replies:
            async for reply in replies:
                yield reply

    return answer


class TokenApp:
    """Of the HTTP door: an ASGI app around the one that answers. `/health` answers everybody."""

    def __init__(self, app: ASGIApp, book: TokenBook) -> None:
        self._app, self._book = app, book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            brought = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
            try:
                CURRENT.set(self._book.authenticate(_single(brought)))
            except Unauthenticated:
                UNAUTHENTICATED.labels("http").inc()
                raise
        await self._app(scope, receive, send)


def _single(values: list[Any]) -> str | None:
    """The only one; several are as good as none, or two parties could read different ones."""
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
