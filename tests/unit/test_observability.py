"""The dashboard and the alerts refer to declared metrics and labels only; their files are what the code makes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.observability import __main__ as observability
from infra.observability.alerts import ALERTS
from infra.observability.dashboard import dashboard
from infra.observability.panels import Panel, Query, Row, plain_panel
from infra.observability.promql import faults, metrics_in, scoped
from infra.observability.rows import rows
from shoal.metrics import Declared

ROOT = Path(__file__).parents[2]
KNOWN = {
    metric.name: metric
    for metric in (
        Declared("shoal_x_ended_requests_total", "counter", ("outcome",), "Ended"),
        Declared("shoal_x_used_blocks", "gauge", ("group",), "Used"),
        Declared("shoal_x_wait_seconds", "histogram", (), "Waits"),
    )
}


def test_everything_is_right_as_it_lies_there() -> None:
    """In a process of its own: this one may hold metrics that tests declared. promtool too, where it is installed."""
    command = [sys.executable, "-m", "infra.observability", "--check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rate(shoal_x_ended_requests_total[5m])", ""),
        ('sum by (outcome, job) (rate(shoal_x_ended_requests_total{outcome!~"stop|length",instance="a:1"}[5m]))', ""),
        ("histogram_quantile(0.95, sum by (le) (rate(shoal_x_wait_seconds_bucket[5m])))", ""),
        ("rate(shoal_x_wait_seconds_sum[5m]) / rate(shoal_x_wait_seconds_count[5m])", ""),
        ('up == 0 and on (job, instance) max_over_time(shoal_x_used_blocks{group="lower"}[1h])', ""),
        ("shoal_x_usd_blocks", "shoal_x_usd_blocks is not declared"),
        ("rate(shoal_x_ended_requests[5m])", "shoal_x_ended_requests is not declared"),
        ("rate(shoal_x_ended_requests_total_bucket[5m])", "is not declared"),
        ("shoal_x_ended_requests_total", "only grows"),
        ("shoal_x_ended_requests_total[5m]", "needs a range where"),
        ("rate(shoal_x_ended_requests_total)", "needs a range where"),
        ('rate(shoal_x_ended_requests_total{reason="x"}[5m])', "has no label 'reason'"),
        ("sum by (pool) (rate(shoal_x_ended_requests_total[5m]))", "has the label 'pool'"),
        ("rate(shoal_x_used_blocks[5m])", "a gauge and has no rate"),
        ("rate(shoal_x_wait_seconds[5m])", "use _bucket, _sum or _count"),
        ("sum(rate(shoal_x_wait_seconds_bucket[5m]))", "outside histogram_quantile"),
        ("histogram_quantile(0.9, sum(rate(shoal_x_wait_seconds_bucket[5m])))", "needs `le` kept"),
    ],
)
def test_an_expression_that_cannot_be_right_is_told(expression: str, words: str) -> None:
    found = faults(expression, KNOWN)
    assert not found if not words else any(words in each for each in found), found


def test_every_metric_has_a_panel_also_one_that_is_declared_tomorrow() -> None:
    shown = {
        name
        for row in rows(KNOWN)
        for panel in row.panels
        for query in panel.queries
        for name in metrics_in(query.expression, KNOWN)
    }
    assert shown == KNOWN.keys()
    for metric in KNOWN.values():
        assert not [fault for query in plain_panel(metric).queries for fault in faults(query.expression, KNOWN)]


def test_the_dashboard_is_the_same_each_time_and_grafana_can_place_it() -> None:
    made = [Row("A", tuple(Panel(str(n), "s", (Query("shoal_x_used_blocks"),)) for n in range(4))), Row("B", (), folded=True)]
    text = dashboard(made)
    assert text == dashboard(made)
    panels = json.loads((ROOT / "infra" / "dashboards" / "shoal.json").read_text())["panels"] + json.loads(text)["panels"]
    inside = [panel for panel in panels for panel in (panel, *panel.get("panels", []))]
    ids = [panel["id"] for panel in inside[: -len(json.loads(text)["panels"])]]
    assert len(ids) == len(set(ids))
    places = [tuple(panel["gridPos"].values()) for panel in json.loads(text)["panels"]]
    assert len(set(places)) == len(places) and all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_queries_are_kept_to_the_chosen_jobs() -> None:
    assert scoped('rate(shoal_x_a{b="c"}[5m]) / shoal_x_d', 'job=~"$job"') == (
        'rate(shoal_x_a{job=~"$job",b="c"}[5m]) / shoal_x_d{job=~"$job"}'
    )


def test_alerts_say_what_to_read() -> None:
    rules = yaml.safe_load((ROOT / "infra" / "alerts" / "shoal.rules.yaml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == len(ALERTS) > 20
    for rule in rules:
        assert rule["annotations"]["runbook_url"].startswith("docs/troubleshooting.md#")
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]
    assert observability.anchors("## Requests are refused (RESOURCE_EXHAUSTED)\n") == {"requests-are-refused-resource_exhausted"}
