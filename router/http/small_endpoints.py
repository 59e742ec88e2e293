"""Everything beside completions: models, health, metrics, tokenize, detokenize. Translates; knows no socket."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import shoal
from shoal.errors import NotFound
from shoal.metrics import REGISTRY
from shoal.pb.v1 import shoal_pb2
from shoal.router.http.chat_question import read_chat_messages
from shoal.router.http.endpoints import HttpLimits
from shoal.router.http.errors import BadField
from shoal.router.http.fields import Fields
from shoal.router.http.logprobs import TokenNames
from shoal.router.service import RouterService
from shoal.router.validation import check_token_ids

TOKENIZE_FIELDS: Final = frozenset(("model", "prompt", "messages", "tools", "add_special_tokens", "return_token_strs"))
DETOKENIZE_FIELDS: Final = frozenset(("model", "tokens"))


class SmallEndpoints:
    """They raise shoal.errors, which the app turns into answers."""

    def __init__(self, service: RouterService, limits: HttpLimits) -> None:
        self._service, self._limits = service, limits
        self._names = TokenNames(service.parts.tokenizer)
        self._created = int(time.time())

    def index(self, routes: Sequence[Route]) -> Callable[[Request], Awaitable[Response]]:
        """GET /: every endpoint, for whoever opens the address in a browser."""
        listed = {
            f"{'GET' if 'GET' in (route.methods or ()) else 'POST'} {route.path}": str(inspect.getdoc(route.endpoint)).partition(
                ": "
            )[2]
            or "OpenAI's"
            for route in routes
        }

        async def answer(request: Request) -> Response:
            return JSONResponse({"shoal": shoal.__version__, "model": self._model()["id"], "endpoints": listed})

        return answer

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name, served = request.path_params["model"], self._model()
        if name != served["id"]:
            raise NotFound(f"model {name!r} is not served here; the model is {served['id']!r}")
        return JSONResponse(served)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while a pair of workers can serve and no drain has begun, else 503."""
        serving = self._service.is_serving
        return JSONResponse({"status": "serving" if serving else "not serving"}, 200 if serving else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: Prometheus metrics of this router."""
        return Response(await asyncio.to_thread(generate_latest, REGISTRY), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a prompt, or of messages as the chat template writes them."""
        fields = await self._limits.read(request)
        fields.check_known(TOKENIZE_FIELDS)
        question = shoal_pb2.TokenizeRequest(model=fields.text("model") or "")
        if (add_special_tokens := fields.flag("add_special_tokens")) is not None:
            question.add_special_tokens = add_special_tokens
        if (fields.raw("prompt") is None) == (fields.raw("messages") is None):
            raise BadField("prompt", "send either prompt or messages")
        if fields.raw("messages") is not None:
            if question.add_special_tokens:
                raise BadField("add_special_tokens", "add_special_tokens is for prompt: a chat template writes its own")
            question.chat.CopyFrom(read_chat_messages(fields))
        else:
            question.text = fields.need(fields.text("prompt"), "prompt")
        found = await self._service.tokenize(question)
        answer: dict[str, Any] = {
            "count": len(found.token_ids),
            "max_model_len": found.max_context_length,
            "tokens": list(found.token_ids),
        }
        if fields.flag("return_token_strs"):
            answer["token_strs"] = [self._names.name(token_id) for token_id in found.token_ids]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens included."""
        fields: Fields = await self._limits.read(request)
        fields.check_known(DETOKENIZE_FIELDS)
        token_ids: list[int] = fields.need(fields.ids("tokens"), "tokens")
        check_token_ids(token_ids, self._service.parts.admission.limits.vocab_size, "tokens")
        question = shoal_pb2.DetokenizeRequest(token_ids=token_ids, model=fields.text("model") or "")
        return JSONResponse({"prompt": (await self._service.detokenize(question)).text})

    def _model(self) -> dict[str, Any]:
        info = self._service.model_info()
        return {
            "id": info.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "shoal",
            "max_model_len": info.max_context_length,
            "shoal": {
                "visibilities": list(info.allowed_visibilities),
                "max_boundary_tokens": info.max_boundary_tokens,
                "supports_vision": info.supports_vision,
                "num_layers": info.num_layers,
                "revision": info.revision,
                "adapter": info.adapter,
                "dtype": info.dtype,
                "license": info.license,
            },
        }
