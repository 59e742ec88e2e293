"""Traces of requests through OpenTelemetry, when it is installed and an endpoint is named; else nothing. Knows no room, no text.

A request's span is the root (or the child of its client's); what happens on the way is told when it is over, from the times that
the state machines have noted anyway. W3C `traceparent` carries the trace between processes, in gRPC metadata.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Final

_log = logging.getLogger(__name__)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")  # OpenTelemetry's own variables
_CARRIED: Final = ("traceparent", "tracestate")
_tracers: list[Any] = []  # none: nothing is traced; else one
_CONTEXT: ContextVar[Any] = ContextVar("shoal_trace", default=None)  # OpenTelemetry's, holding the parent of what comes
Attribute = str | int | float | None


def configure_tracing(process: str) -> None:
    """Send spans where OTEL_EXPORTER_OTLP_ENDPOINT says (OTLP over HTTP). Unset: nothing; without the package: a warning."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        _log.warning("%s asks for traces, but %s is not installed: pip install -e '.[trace]'", _ENDPOINTS[0], error.name)
        return
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal", "service.instance.id": process}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use_provider(provider)


def use_provider(provider: Any) -> None:
    """Trace through this OpenTelemetry provider; None turns tracing off."""
    _tracers[:] = [] if provider is None else [provider.get_tracer("shoal")]


def continue_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """What this call's context does from now on belongs to the trace that came with the call, if one did."""
    if not _tracers:
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried = {key: value for key, value in metadata or () if key in _CARRIED and isinstance(value, str)}
    _CONTEXT.set(TraceContextTextMapPropagator().extract(carried))


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """What a call to another process brings along."""
    if not _tracers:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carried, context=_CONTEXT.get())
    return tuple(carried.items())


def traced(name: str) -> AbstractContextManager[dict[str, Attribute]]:
    """A span around what is done inside, the parent of all of it. Put attributes into the dictionary at any time."""
    return _traced(name) if _tracers else nullcontext({})


@contextmanager
def _traced(name: str) -> Iterator[dict[str, Attribute]]:
    from opentelemetry import trace

    attributes: dict[str, Attribute] = {}
    before = _CONTEXT.get()
    span = _tracers[0].start_span(name, context=before)
    _CONTEXT.set(trace.set_span_in_context(span, before))
    try:
        yield attributes
    finally:
        span.set_attributes(_known(attributes))
        span.end()
        _CONTEXT.set(before)  # not by token: a generator may be closed from another context


def trace_past(name: str, seconds: float, **attributes: Attribute) -> None:
    """A span that ends now and began so many seconds ago."""
    now = time.monotonic()
    trace_states(name, {"": now - seconds, "end": now}, **attributes)


def trace_states(name: str, times: Mapping[Any, float], **attributes: Attribute) -> None:
    """A span over the states of something that has ended, and one inside it for each state but the last. Times are monotonic."""
    if not _tracers or not times:
        return
    from opentelemetry import trace

    offset_ns = time.time_ns() - time.monotonic_ns()
    moments = [(state, int(moment * 1e9) + offset_ns) for state, moment in sorted(times.items(), key=lambda item: item[1])]
    last, ended = moments[-1]
    own = _known(attributes) | ({} if last == "end" else {"end": str(last)})
    whole = _tracers[0].start_span(name, context=_CONTEXT.get(), start_time=moments[0][1], attributes=own)
    inside = trace.set_span_in_context(whole, _CONTEXT.get())
    for (state, began), (_, stopped) in pairwise(moments):
        if state:
            _tracers[0].start_span(f"{name}: {state}", context=inside, start_time=began).end(end_time=stopped)
    whole.end(end_time=ended)


def _known(attributes: Mapping[str, Attribute]) -> dict[str, str | int | float]:
    return {f"shoal.{name}": value for name, value in attributes.items() if value is not None and value != ""}
