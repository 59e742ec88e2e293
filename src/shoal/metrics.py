"""The one registry of metrics. Every metric is declared at import, with a unit in its name; nothing else may create one.

Naming follows Prometheus: `shoal_<room>_<what>_<unit>` (`_<what>` may be missing), counters end in `_total`.
"""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import shoal

UNITS = (
    "seconds",
    "bytes",
    "tokens",
    "blocks",
    "requests",
    "transfers",
    "workers",
    "streams",
    "ratio",
    "info",
    "layers",
    "pairs",
    "state",
    "transitions",
    "connections",
    "nats",
)
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_NAME = re.compile(rf"shoal(_[a-z0-9]+)+_({'|'.join(UNITS)})")

REGISTRY = CollectorRegistry()
Metric = TypeVar("Metric", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class Declared:
    """What was said of a metric when it was declared."""

    name: str
    kind: str  # counter, gauge, histogram
    labels: tuple[str, ...]
    help_text: str


DECLARED: list[Declared] = []  # in this process so far


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """Declare a counter; `name` ends in `_<unit>_total`."""
    _check(name, counts=True)
    DECLARED.append(Declared(name, "counter", tuple(labels), help_text))
    return _quick(Counter(name, help_text, labels, registry=REGISTRY))


def gauge(name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
    """Declare a gauge; `name` ends in `_<unit>`."""
    _check(name, counts=False)
    DECLARED.append(Declared(name, "gauge", tuple(labels), help_text))
    return _quick(Gauge(name, help_text, labels, registry=REGISTRY))


def histogram(name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS) -> Histogram:
    """Declare a histogram; `name` ends in `_<unit>`."""
    _check(name, counts=False)
    DECLARED.append(Declared(name, "histogram", tuple(labels), help_text))
    return _quick(Histogram(name, help_text, labels, registry=REGISTRY, buckets=buckets))


def _quick(metric: Metric) -> Metric:
    """The same, remembering which series labels name: to look one up takes a lock and a tuple of texts."""
    metric.labels = lru_cache(maxsize=1024)(metric.labels)  # type: ignore[method-assign]
    return metric


def exposition() -> bytes:
    """All metrics of this process in Prometheus' text format."""
    return generate_latest(REGISTRY)


def _check(name: str, *, counts: bool) -> None:
    if not _NAME.fullmatch(name.removesuffix("_total") if counts else name) or counts != name.endswith("_total"):
        form = "shoal_<room>[_<what>]_<unit>" + ("_total" if counts else "")
        raise ValueError(f"metric {name!r} must be {form}, in lower case, unit one of {', '.join(UNITS)}")


_BUILD = gauge("shoal_build_info", "1 for what runs in this process", ("version", "python"))
_BUILD.labels(shoal.__version__, platform.python_version()).set(1)
