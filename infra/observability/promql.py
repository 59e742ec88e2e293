"""What an expression in PromQL may refer to: declared series and their labels. Reads enough of the language to tell, no more."""

import re
from collections.abc import Mapping
from typing import Final

from shoal.launch.metrics_page import import_everything
from shoal.metrics import DECLARED, Declared

TARGET_LABELS: Final = frozenset({"job", "instance"})  # what Prometheus adds to every series of a target
OF_PROMETHEUS: Final = frozenset({"up"})  # its own series about each target
PARTS: Final = {"_bucket": frozenset({"le"}), "_sum": frozenset[str](), "_count": frozenset[str]()}  # of a histogram
RANGED: Final = frozenset({"rate", "increase", "last_over_time", "max_over_time", "min_over_time", "avg_over_time", "changes"})

_SERIES = re.compile(r"\b(shoal_\w+|up)\b(\{[^}]*\})?(\[[^\]]+\])?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"[^\"]*\"")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_CALL = re.compile(r"(\w+)\s*\($")


def declared() -> dict[str, Declared]:
    """Every metric of every process, by name."""
    import_everything()
    return {metric.name: metric for metric in DECLARED}


def metrics_in(expression: str, known: Mapping[str, Declared]) -> set[str]:
    """Names of the declared metrics that an expression reads."""
    found = {_metric(series, known) for series, _, _ in _SERIES.findall(expression)}
    return {metric.name for metric, _ in found if metric is not None}


def faults(expression: str, known: Mapping[str, Declared]) -> list[str]:
    """What is wrong with an expression, in words: unknown series or labels, a counter without a rate, a bare histogram."""
    words: list[str] = []
    labels = set(TARGET_LABELS)
    for found in _SERIES.finditer(expression):
        series, matchers, window = found.groups()
        metric, own = _metric(series, known)
        if metric is None and series not in OF_PROMETHEUS:
            words.append(f"{series} is not declared")
            continue
        allowed = TARGET_LABELS | own | (frozenset(metric.labels) if metric else frozenset())
        labels |= allowed
        words += [f"{series} has no label {name!r}" for name in _MATCHER.findall(matchers or "") if name not in allowed]
        if matchers and not _MATCHER.search(matchers):
            words.append(f"cannot read the matchers {matchers} of {series}")
        call = _CALL.search(expression[: found.start()])
        is_ranged = call is not None and call[1] in RANGED
        if bool(window) != is_ranged:
            words.append(f"{series} needs a range where, and only where, a function takes one")
        if metric is None:
            continue
        if metric.kind == "histogram" and not own and series == metric.name:
            words.append(f"{series} is a histogram; use _bucket, _sum or _count")
        counts = metric.kind in ("counter", "histogram")
        if counts and not is_ranged:
            words.append(f"{series} only grows; take its rate or increase")
        if not counts and is_ranged and call is not None and call[1] in ("rate", "increase"):
            words.append(f"{series} is a gauge and has no rate")
        if series.endswith("_bucket") and "histogram_quantile" not in expression:
            words.append(f"{series} outside histogram_quantile")
    for names in _GROUPING.findall(expression):
        unknown = {name.strip() for name in names.split(",") if name.strip()} - labels
        words += [f"no series of this expression has the label {name!r}" for name in sorted(unknown)]
    if "histogram_quantile" in expression and not re.search(r"by \((?:[^)]*, )?le\b", expression):
        words.append("histogram_quantile needs `le` kept")
    return words


def scoped(expression: str, matcher: str) -> str:
    """The expression with one more matcher at every series."""

    def add(found: re.Match[str]) -> str:
        series, matchers, window = found.groups()
        inside = f"{matcher},{matchers[1:-1]}" if matchers and matchers != "{}" else matcher
        return f"{series}{{{inside}}}{window or ''}"

    return _SERIES.sub(add, expression)


def _metric(series: str, known: Mapping[str, Declared]) -> tuple[Declared | None, frozenset[str]]:
    """The metric behind a series, and labels that only this series of it has."""
    if (metric := known.get(series)) is not None:
        return metric, frozenset()
    for suffix, labels in PARTS.items():
        metric = known.get(series.removesuffix(suffix)) if series.endswith(suffix) else None
        if metric is not None and metric.kind == "histogram":
            return metric, labels
    return None, frozenset()
