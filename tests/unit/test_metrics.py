"""The metric registry: names carry room and unit, counters end in _total, everything declared shows up in the exposition."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import metrics


@pytest.mark.parametrize(
    ("declare", "name"),
    [
        (metrics.counter, "shoal_test_sent_bytes"),  # a counter without _total
        (metrics.counter, "shoal_test_sent_total"),  # no unit
        (metrics.counter, "sent_bytes_total"),  # no prefix
        (metrics.gauge, "shoal_test_wait_ms"),  # an unknown unit
        (metrics.gauge, "shoal_test_waiting"),
        (metrics.gauge, "shoal_test_held_bytes_total"),  # a gauge that claims to count
        (metrics.histogram, "shoal_test_step_second"),
        (metrics.histogram, "shoal_test_step_seconds_total"),
        (metrics.gauge, "shoal_bytes"),  # no room
        (metrics.gauge, "shoal_Test_held_bytes"),
        (metrics.gauge, "shoal_test__held_bytes"),
    ],
)
def test_names_without_prefix_or_unit_are_refused(declare: Callable[[str, str], object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        declare(name, "never registered")
    assert not re.search(rf"\b{name}\b", metrics.exposition().decode())


def test_declared_metrics_are_exposed_with_their_values() -> None:
    counter = metrics.counter("shoal_test_example_bytes_total", "An example.", ["kind"])
    histogram = metrics.histogram("shoal_test_example_seconds", "An example.")
    gauge = metrics.gauge("shoal_test_example_blocks", "An example.")
    try:
        counter.labels("payload").inc(12)
        histogram.observe(0.02)
        gauge.set(3)
        lines = metrics.exposition().decode().splitlines()
        assert 'shoal_test_example_bytes_total{kind="payload"} 12.0' in lines
        assert 'shoal_test_example_seconds_bucket{le="0.025"} 1.0' in lines
        assert "shoal_test_example_blocks 3.0" in lines
        with pytest.raises(ValueError, match="Duplicated"):
            metrics.gauge("shoal_test_example_blocks", "Again.")
    finally:
        for collector in (counter, histogram, gauge):
            metrics.REGISTRY.unregister(collector)


def test_everything_shoal_declares_follows_the_rules() -> None:
    """A fresh process imports every module (one that needs an optional package is passed over) and prints what is declared."""
    code = (
        "import importlib, pkgutil, prometheus_client, shoal\n"
        "from shoal import metrics\n"
        "for found in pkgutil.walk_packages(shoal.__path__, 'shoal.'):\n"
        "    if found.name.startswith('shoal.pb') or found.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name is None or error.name.startswith('shoal'): raise\n"
        "print(metrics.exposition().decode())\n"
        "print('#ELSEWHERE', [n for n in prometheus_client.REGISTRY._names_to_collectors if n.startswith('shoal')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    exposition, _, elsewhere = result.stdout.partition("#ELSEWHERE ")
    assert elsewhere.strip() == "[]", "declared outside shoal.metrics, where no rule holds"
    rule = re.compile(rf"shoal(_[a-z0-9]+)+_({'|'.join(metrics.UNITS)})")
    names = re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)$", exposition, re.MULTILINE)
    help_texts = dict(re.findall(r"^# HELP (\S+) (.*)$", exposition, re.MULTILINE))
    for name, kind in names:
        if name.endswith("_created"):
            continue  # the client library's time stamps
        assert rule.fullmatch(name.removesuffix("_total")), f"{name} must be shoal_<room>[_<what>]_<unit>"
        assert name.endswith("_total") == (kind == "counter"), name
        assert help_texts[name].strip(), f"{name} has no help text"
