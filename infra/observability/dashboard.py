"""Rows and panels as Grafana's JSON (schema 39, Grafana 10 and later). Knows the format; chooses no panel."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from infra.observability.panels import Panel, Query, Row
from infra.observability.promql import scoped

UID: Final = "shoal"
_COLUMNS, _HEIGHT = 24, 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_SCOPE: Final = 'job=~"$job"'


def dashboard(rows: Sequence[Row]) -> str:
    """The file's text, the same for the same rows."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        head = {"id": len(panels) + 1, "type": "row", "title": row.title, "collapsed": row.folded, "panels": []}
        placed, height = _place(row.panels, y + 1, first_id=1000 * (rows.index(row) + 1))
        panels.append(head | {"gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}} | ({"panels": placed} if row.folded else {}))
        panels += [] if row.folded else placed
        y += 1 + (0 if row.folded else height)
    whole = {
        "uid": UID,
        "title": "Shoal",
        "description": "Made by `python -m infra.observability` from the metrics that Shoal declares.",
        "tags": ["shoal"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _place(panels: Sequence[Panel], top: int, first_id: int) -> tuple[list[dict[str, Any]], int]:
    """Panels side by side, line by line, and how high they stand."""
    placed, x, y = [], 0, top
    for index, panel in enumerate(panels):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        placed.append(_panel(panel, first_id + index) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}})
        x += panel.width
    return placed, y + _HEIGHT - top if panels else 0


def _panel(panel: Panel, panel_id: int) -> dict[str, Any]:
    targets = [_target(query, chr(ord("A") + index), instant=panel.table) for index, query in enumerate(panel.queries)]
    common: dict[str, Any] = {
        "id": panel_id,
        "title": panel.title,
        "description": panel.note,
        "datasource": _SOURCE,
        "targets": targets,
        "type": "table" if panel.table else "timeseries",
    }
    if panel.table:
        hidden = {"excludeByName": {"Time": True}}
        return common | {
            "fieldConfig": {"defaults": {}, "overrides": []},
            "transformations": [{"id": "organize", "options": hidden}],
        }
    custom: dict[str, Any] = {"drawStyle": "line", "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    custom |= {"stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}
    return common | {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    }


def _target(query: Query, reference: str, *, instant: bool) -> dict[str, Any]:
    how = {"instant": True, "range": False, "format": "table"} if instant else {"instant": False, "range": True}
    return {
        "refId": reference,
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": scoped(query.expression, _SCOPE),
        "legendFormat": query.legend or "__auto",
    } | how


def _variables() -> list[Mapping[str, Any]]:
    jobs = "label_values(shoal_build_info, job)"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "job",
            "label": "Cluster (job)",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": jobs, "refId": "jobs"},
            "definition": jobs,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
