"""The one registry of metrics. Every metric is declared at import, with a unit in its name; nothing else may create one.

Naming follows Prometheus: `shoal_<room>_<what>_<unit>`, counters end in `_total`.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
)
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

REGISTRY = CollectorRegistry()


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """Declare a counter; `name` ends in `_<unit>_total`."""
    _check(name.removesuffix("_total"), counts=name.endswith("_total"))
    return Counter(name, help_text, labels, registry=REGISTRY)


def gauge(name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
    """Declare a gauge; `name` ends in `_<unit>`."""
    _check(name)
    return Gauge(name, help_text, labels, registry=REGISTRY)


def histogram(name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS) -> Histogram:
    """Declare a histogram; `name` ends in `_<unit>`."""
    _check(name)
    return Histogram(name, help_text, labels, registry=REGISTRY, buckets=buckets)


def exposition() -> bytes:
    """All metrics of this process in Prometheus' text format."""
    return generate_latest(REGISTRY)


def _check(name: str, *, counts: bool = True) -> None:
    if not name.startswith("shoal_") or not name.endswith(tuple("_" + unit for unit in UNITS)) or not counts:
        raise ValueError(f"metric {name!r} must be shoal_<room>_<what>_<unit>, unit one of {', '.join(UNITS)}")
