"""One request is one trace over router, prefill, transfer and decode, under its caller's span; without OpenTelemetry, nothing."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal.pb.v1 import shoal_pb2
from shoal.rpc import tracing
from tests.e2e.served import served
from tests.fakes.cluster import Cluster

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MARK = "zqxjkvbw"


@pytest.fixture
def exporter() -> Iterator[Any]:
    """Keeps finished spans in memory."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    kept = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    tracing.use_provider(provider)
    yield kept
    tracing.use_provider(None)


def ask(request_id: str) -> shoal_pb2.GenerateRequest:
    sampling = shoal_pb2.SamplingParams(max_tokens=4)
    return shoal_pb2.GenerateRequest(request_id=request_id, text=f"{MARK} " * 8, visibility="speed:2", sampling_params=sampling)


async def test_one_request_is_one_trace_under_its_callers_span(tiny_model: Path, exporter: Any) -> None:
    async with served(tiny_model) as system:
        await system.completes(ask("first"), metadata=(("traceparent", CALLER),))
        await system.completes(ask("second"))
        await system.all_free()
    spans = exporter.get_finished_spans()
    mine = {span.name: span for span in spans if f"{span.context.trace_id:032x}" in CALLER}
    root = mine["request"]
    assert f"{root.parent.span_id:016x}" in CALLER and root.attributes["shoal.request_id"] == "first"
    whole = ("attempt", "decode request", "prefill task", "transfer sent", "transfer received")
    for name in whole:
        assert mine[name].parent.span_id == root.context.span_id, name
        assert mine[name].end_time - mine[name].start_time > 0
    states = {
        "attempt": ("reserving", "prefilling", "decoding"),
        "decode request": ("queued", "reserved", "receiving", "ready", "running"),
        "prefill task": ("queued", "holding", "computing", "computed"),
    }
    for name, inside in states.items():
        parts = [mine[f"{name}: {state}"] for state in inside]
        assert all(part.parent.span_id == mine[name].context.span_id for part in parts)
        assert parts[0].start_time == mine[name].start_time and parts[-1].end_time == mine[name].end_time
        assert [part.end_time for part in parts[:-1]] == [part.start_time for part in parts[1:]]
    assert {mine[name].attributes.get("shoal.attempt_id") for name in states} == {mine["attempt"].attributes["shoal.attempt_id"]}
    sent, received = (mine[f"transfer {what}"].attributes["shoal.payload_bytes"] for what in ("sent", "received"))
    assert sent == received > 0
    others = [span for span in spans if span.name == "request" and span.context.trace_id != root.context.trace_id]
    assert [span.attributes["shoal.request_id"] for span in others] == ["second"] and others[0].parent is None
    assert not [span for span in spans if MARK in str(span.attributes) or MARK in span.name]


async def test_a_trace_joins_at_the_http_door(exporter: Any) -> None:
    async with Cluster() as c, httpx2.AsyncClient(base_url=c.http) as http:
        c.decode[0].script = [40]
        for headers in ({"traceparent": CALLER}, {}):
            answer = await http.post("/v1/completions", json={"prompt": MARK, "max_tokens": 2}, headers=headers)
            assert answer.status_code == 200
    joined, own = (span for span in exporter.get_finished_spans() if span.name == "request")
    assert f"{joined.context.trace_id:032x}" in CALLER and f"{joined.parent.span_id:016x}" in CALLER
    assert own.parent is None and own.context.trace_id != joined.context.trace_id


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing.configure_tracing("router")
    tracing.continue_trace([("traceparent", CALLER)])
    with tracing.traced("request") as attributes:
        attributes["outcome"] = "stop"
        tracing.trace_past("transfer sent", 0.1)
        assert tracing.trace_metadata() == ()


@pytest.mark.skipif(importlib.util.find_spec("opentelemetry") is not None, reason="the package is installed")
def test_an_endpoint_without_the_package_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        tracing.configure_tracing("router")
    assert "pip install -e '.[trace]'" in caplog.text and tracing.trace_metadata() == ()
