"""Routes, errors and request ids of the HTTP door. Knows which path leads where; translates nothing."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.config.router import RouterConfig
from shoal.errors import ShoalError
from shoal.router.doorkeeper import TokenApp
from shoal.router.http import small_endpoints
from shoal.router.http.chat_question import CHAT_FIELDS
from shoal.router.http.completion_question import COMPLETION_FIELDS
from shoal.router.http.endpoints import Completions, HttpLimits, request_id
from shoal.router.http.errors import answer_error, as_shoal_error, error_body
from shoal.router.instruments import HTTP_REQUESTS
from shoal.router.service import RouterService
from shoal.router.tenants import TokenBook
from shoal.rpc.tracing import continue_trace

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FIELDS: Final[Mapping[str, Collection[str]]] = {
    _CHAT: CHAT_FIELDS,
    _COMPLETIONS: COMPLETION_FIELDS,
    "/tokenize": small_endpoints.TOKENIZE_FIELDS,
    "/detokenize": small_endpoints.DETOKENIZE_FIELDS,
}


def http_app(service: RouterService, config: RouterConfig, book: TokenBook | None = None) -> ASGIApp:
    """The whole door; with `book` it asks for tokens."""
    limits = HttpLimits(config.http_max_body_bytes, config.http_body_timeout_s, config.max_request_s)
    completions, small = Completions(service, limits), small_endpoints.SmallEndpoints(service, limits)
    routes = [
        Route(_CHAT, completions.chat, methods=["POST"]),
        Route(_COMPLETIONS, completions.completions, methods=["POST"]),
        Route("/v1/models", small.models, methods=["GET"]),
        Route("/v1/models/{model:path}", small.model, methods=["GET"]),
        Route("/health", small.health, methods=["GET"]),
        Route("/metrics", small.metrics, methods=["GET"]),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
    ]
    routes.insert(0, Route("/", small.index(routes), methods=["GET"]))
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ShoalError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
    }
    inner: ASGIApp = Router(routes, redirect_slashes=False)
    app = ExceptionMiddleware(inner if book is None else TokenApp(inner, book), handlers)
    return _Door(app, frozenset(route.path for route in routes))


class _Door:
    """Echoes request ids, counts answers, and turns what nobody foresaw into an incident."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # lets Starlette raise its 404 and 405 rather than write them in plain text
        request = Request(scope, receive)
        path = scope["path"] if scope["path"] in self._paths else "other"
        continue_trace((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        status: int | None = None

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id(request).encode("latin-1"))]
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except Exception as error:  # noqa: BLE001  # nothing is swallowed: logged with its traceback, and the request fails
            answer = answer_error(as_shoal_error(error))
            if status is None:
                await JSONResponse(answer.body, answer.status)(scope, receive, tell)
        finally:
            HTTP_REQUESTS.labels(path, str(status or 499)).inc()


async def _on_error(request: Request, error: ShoalError) -> Response:
    answer = answer_error(error, _FIELDS.get(request.url.path, ()))
    headers = dict(answer.headers) | ({"connection": "close"} if answer.status in (401, 408, 413) else {})
    return JSONResponse(answer.body, answer.status, headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    words = {
        404: f"there is nothing at {request.url.path}; GET / lists what there is",
        405: f"{request.url.path} does not take {request.method}",
    }
    body = error_body(words.get(error.status_code, error.detail), "invalid_request_error", None, None)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)
