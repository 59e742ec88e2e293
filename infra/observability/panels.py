"""What a panel is, and the usual ways to ask for a metric. Knows expressions; knows nothing of Grafana's format.

`WINDOW` stands for the range of a rate; Grafana fills it in from the width of the picture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shoal.metrics import Declared

WINDOW: Final = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One curve or more. `legend` names each in Grafana's way, as in {{pool}}."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `unit` is Grafana's: s, bytes, Bps, percentunit, reqps, short."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    note: str = ""
    stacked: bool = False
    table: bool = False  # the labels of what is 1, as rows
    width: int = 8  # of 24


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


def rate(name: str, *by: str, matchers: str = "") -> str:
    """Per second, over all processes."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate({name}{matchers}[{WINDOW}]))"


def quantile(share: float, name: str, *by: str) -> str:
    """Of a histogram, over all processes."""
    return f"histogram_quantile({share}, {rate(name + '_bucket', *by, 'le')})"


def mean(name: str, *by: str) -> str:
    """Of a histogram."""
    return f"{rate(name + '_sum', *by)} / {rate(name + '_count', *by)}"


def per_second(name: str, *by: str, says: str = "") -> tuple[Query, ...]:
    """A counter's rate, split by labels; `says` stands before their values."""
    return (Query(rate(name, *by), _legend(says, by) or "all"),)


def p95(name: str, *by: str, says: str = "") -> tuple[Query, ...]:
    """Of a histogram, split by labels."""
    return (Query(quantile(0.95, name, *by), _legend(says, by) or "p95"),)


def level(name: str, *by: str, says: str = "", how: str = "sum") -> tuple[Query, ...]:
    """A gauge, split by labels."""
    return (Query(f"{how} by ({', '.join(by)}) ({name})" if by else f"{how}({name})", _legend(says, by) or "all"),)


def of_both(make: Callable[[str], str]) -> tuple[Query, ...]:
    """An expression for each pool."""
    return tuple(Query(make(pool), pool) for pool in ("prefill", "decode"))


def quantiles(name: str, *by: str) -> tuple[Query, ...]:
    """p50, p95 and p99, split by labels."""
    split = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(Query(quantile(share, name, *by), f"p{round(100 * share)}{split}") for share in (0.5, 0.95, 0.99))


def plain_panel(metric: Declared) -> Panel:
    """A metric by itself: a counter's rate, a gauge, a histogram's quantiles."""
    title = metric.help_text.rstrip(".")
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    name = metric.name.removesuffix("_total")
    unit = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}.get(name.rpartition("_")[2], "short")
    if metric.kind == "histogram":
        return Panel(title, unit, quantiles(metric.name), note=f"`{metric.name}`")
    if metric.kind == "counter":
        unit = {"s": "s", "bytes": "Bps"}.get(unit, "cps")
        return Panel(title, unit, (Query(rate(metric.name, *metric.labels), legend or "all"),), note=f"`{metric.name}`")
    by = f"by ({', '.join(metric.labels or ('instance',))})"
    return Panel(title, unit, (Query(f"sum {by} ({metric.name})", legend or "{{instance}}"),), note=f"`{metric.name}`")


def _legend(says: str, by: tuple[str, ...]) -> str:
    return " ".join([*([says] if says else []), *(f"{{{{{label}}}}}" for label in by)])
