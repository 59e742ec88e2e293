"""docs/metrics.md lists exactly what the code declares, and a served request moves the metrics that the page points at."""

import os
import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shoal import __version__, metrics
from shoal.errors import Unavailable
from shoal.router import instruments
from tests.fakes.cluster import Cluster, request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def declared() -> str:
    """What the command prints, in a process of its own: this one may hold a test's metrics."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "shoal.launch.metrics_page"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=150).stdout


def value(name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def test_the_page_holds_what_is_declared_and_names_nothing_else() -> None:
    printed = declared()
    assert PAGE.partition("<!-- declared -->\n")[2].partition("<!-- end -->")[0] == printed, (
        "put the command's output there, then run `python -m infra.observability`"
    )
    names = set(re.findall(r"^\| `(shoal_\w+)`", printed, re.MULTILINE))
    assert len(names) > 60 and set(re.findall(r"\bshoal_\w+", PAGE)) - {"shoal_build"} <= names


async def test_every_measure_of_a_request_moves_with_it() -> None:
    policy = {"visibility": "speed:22"}
    timed = [f"shoal_router_{what}_seconds_count" for what in ("ttft", "tpot", "queue", "prefill", "exposed_transfer")]
    names = [*timed, *(f"shoal_router_transfer_{what}_bytes_total" for what in ("payload", "full_depth", "saved"))]
    before = {name: value(name, **policy) for name in names}
    lost = value("shoal_router_retried_requests_total", reason="unavailable")
    async with Cluster() as cluster:
        done = await cluster.complete(request(max_tokens=3, visibility="speed:22"))
        moved = {name: value(name, **policy) - before[name] for name in names}
        cluster.decode[0].error = Unavailable("lost")
        await cluster.status(request(max_tokens=3))
    crossed, full = done.transfer.payload_bytes, done.transfer.full_depth_bytes
    assert [moved[name] for name in names] == [1.0] * len(timed) + [crossed, full, full - crossed] and 0 < crossed < full
    assert value("shoal_router_retried_requests_total", reason="unavailable") == lost + 1
    assert value("shoal_router_requests_total", outcome="length", **policy) >= 1


def test_every_process_says_what_it_runs() -> None:
    assert value("shoal_build_info", version=__version__) == 1.0 and instruments.FALLBACKS is not None
