"""Puts a router together and runs it: model files, registry, dispatcher, server, health. The one place that knows them all."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from shoal.config.router import RouterConfig
from shoal.constraints import ConstraintVetter
from shoal.errors import InternalError, InvalidConfig, ShoalError
from shoal.model_files import load_tokenizer, open_model
from shoal.pb.v1 import shoal_pb2, shoal_pb2_grpc
from shoal.router.admission import Admission
from shoal.router.dispatch import Dispatcher
from shoal.router.doorkeeper import TokenInterceptor
from shoal.router.endpoints import ControllerEndpoints, EndpointSource, StaticEndpoints
from shoal.router.http import HttpServer, http_app
from shoal.router.images import ImageCheck
from shoal.router.quality import QualityGates
from shoal.router.registry import Registry
from shoal.router.service import Parts, RouterService
from shoal.router.servicer import ShoalServicer
from shoal.router.shadow import Shadows
from shoal.router.tenants import TokenBook
from shoal.router.text import PromptEncoder
from shoal.router.validation import RequestLimits
from shoal.rpc import Address, ClusterLink, RpcServer, serve_metrics
from shoal.rpc.metrics_http import MetricsServer
from shoal.rpc.tls import http_context, server_credentials

_log = logging.getLogger(__name__)


class Router:
    """A router of one process. `start` binds and returns at once; health is SERVING once a pair of workers is ready."""

    def __init__(self, config: RouterConfig, *, endpoints: EndpointSource | None = None) -> None:
        """Reads the model's configuration and tokenizer, no weights. Raises InvalidConfig. `endpoints` replaces the source."""
        self.config = config
        model = open_model(config.model)
        tokenizer = load_tokenizer(model)
        shape = model.config.shape
        if config.max_context is not None and config.max_context > shape.max_context:
            raise InvalidConfig(f"max_context {config.max_context} exceeds the model's own {shape.max_context}")
        limits = RequestLimits(
            num_layers=shape.num_layers,
            vocab_size=shape.vocab_size,
            max_context=config.max_context or shape.max_context,
            eos_token_ids=model.config.eos_token_ids,
            visibilities=config.visibilities,
            max_boundary_tokens=config.max_boundary_tokens,
            model=model.name,
        )
        self._constraints = ConstraintVetter(config.model)
        self._changed = asyncio.Event()
        self.has_served = asyncio.Event()  # set for good once requests can be served
        link, router_id = ClusterLink(config.cluster), f"router-{secrets.token_hex(8)}"
        self.registry = Registry(
            revision=model.revision, on_change=self._changed.set, link=link, decode_alone=config.prefill_fallback
        )
        gates = QualityGates(config.shadow, limits.policies)
        images = ImageCheck(model.vision, config.images, shape.num_layers)
        dispatcher = Dispatcher(
            self.registry,
            shape,
            max_retries=config.max_retries,
            max_wait_s=config.max_wait_s,
            disaggregation=config.disaggregation,
            falls_back=config.prefill_fallback,
            caller=router_id,
        )
        self._shadows = Shadows(config.shadow, dispatcher, gates, look_s=config.load_interval_s)
        self._shadowing: asyncio.Task[None] | None = None
        parts = Parts(
            config=config,
            model=model,
            tokenizer=tokenizer,
            admission=Admission(PromptEncoder(tokenizer, model.vision), limits, self._constraints, gates, images),
            dispatcher=dispatcher,
            registry=self.registry,
            gates=gates,
            shadows=self._shadows,
        )
        self._endpoints = endpoints or _endpoint_source(config, link, router_id)
        self.service = RouterService(parts, time.monotonic)
        book = TokenBook(config.tokens_file) if config.tokens_file else None
        interceptors = [] if book is None else [TokenInterceptor(book)]
        self._server = RpcServer(interceptors=interceptors, credentials=server_credentials(config.tls))
        self.http_address: Address | None = None
        self._http = (
            HttpServer(http_app(self.service, config, book), http_context(config.tls)) if config.http_listen is not None else None
        )
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Address:
        """Returns the address it serves at. Raises InvalidConfig when an address cannot be bound."""
        self._server.add(
            shoal_pb2_grpc.add_ShoalServicer_to_server,
            ShoalServicer(self.service),
            shoal_pb2.DESCRIPTOR.services_by_name["Shoal"],
        )
        listen = Address.parse(self.config.listen, "the router's address")
        address = await self._server.start(listen, allow_wildcard=self.config.allow_wildcard)
        try:
            await self._start_http()
            if self.config.health_listen is not None:
                probes = Address.parse(self.config.health_listen, "the address of health")
                await self._server.start_health(probes, allow_wildcard=self.config.allow_wildcard)
        except ShoalError:
            await self._stop_servers(0.0)
            raise
        self._spawn(self.registry.follow(self._endpoints), "follow endpoints")
        self._spawn(self.registry.poll_reports(self.config.load_interval_s), "poll reports")
        self._spawn(self._publish_health(), "publish health")
        if self.config.shadow.rate:
            self._spawn(self._shadows.run(), "shadow requests")
            self._shadowing = self._tasks[-1]
        return address

    async def _start_http(self) -> None:
        allow_wildcard = self.config.allow_wildcard
        if self.config.metrics is not None:
            metrics = Address.parse(self.config.metrics, "the address of metrics")
            self._metrics = serve_metrics(metrics, self.config.cluster, allow_wildcard=allow_wildcard)
            scheme = "https" if self.config.cluster.tls.is_on else "http"
            _log.info("metrics at %s://%s/metrics", scheme, self._metrics.address)
        if self._http is not None and self.config.http_listen is not None:
            listen = Address.parse(self.config.http_listen, "the address of HTTP")
            self.http_address = await self._http.start(listen, allow_wildcard=allow_wildcard)
            if self._http.task is not None:
                self._tasks.append(self._http.task)
            _log.info("OpenAI's API at %s://%s/v1", "https" if self.config.tls.is_on else "http", self.http_address)

    async def _stop_servers(self, grace_s: float) -> None:
        self.service.drain()
        await asyncio.gather(self._server.stop(grace_s), *([self._http.stop(grace_s)] if self._http is not None else []))
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)

    async def stop(self, grace_s: float = 0.0) -> None:
        """NOT_SERVING first, then let running requests finish for so long, then end."""
        if self._shadowing is not None:
            self._shadowing.cancel()  # first: nobody waits for replays
        await self._stop_servers(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.close()
        await self._constraints.close()

    async def failed(self) -> None:
        """Waits until one of the router's own tasks ends, which none should, and raises InternalError that names it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            cause = None if task.cancelled() else task.exception()
            raise InternalError(f"the router's task {task.get_name()!r} ended: {cause}") from cause

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _publish_health(self) -> None:
        serving: bool | None = None
        while True:
            self._changed.clear()
            if (now := self.registry.can_serve) is not serving:
                serving = now
                _log.info("%s", "serving" if serving else "not serving: no ready pair of prefill and decode workers")
                await self._server.set_serving(serving)
                if serving:
                    self.has_served.set()
            await self._changed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()


def _endpoint_source(config: RouterConfig, link: ClusterLink, router_id: str) -> EndpointSource:
    if config.controller is not None:
        return ControllerEndpoints(config.controller, router_id=router_id, link=link)
    return StaticEndpoints(config.workers, link=link)
