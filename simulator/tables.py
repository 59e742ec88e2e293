"""Rows of frozen dataclasses as CSV, JSON or a terminal table. Knows fields and number formats; knows no meaning."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_csv(rows: "Sequence[DataclassInstance]") -> str:
    """A header and one line per row; "" without rows."""
    if not rows:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def to_json(rows: "Sequence[DataclassInstance]", about: Mapping[str, Any]) -> str:
    """{"about": what was asked, "rows": […]}."""
    return json.dumps({"about": dict(about), "rows": [asdict(row) for row in rows]}, indent=1)


def to_table(rows: "Sequence[DataclassInstance]", title: str, headings: Mapping[str, str]) -> Table:
    """The fields named in `headings`, in that order; numbers to the right. `_bytes` and `_share` fields are scaled."""
    table = Table(title=title, title_justify="left")
    for name, heading in headings.items():
        is_text = bool(rows) and isinstance(getattr(rows[0], name), str)
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(name, getattr(row, name)) for name in headings))
    return table


def cell(name: str, value: object) -> str:
    """One value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return human_bytes(value)
    if isinstance(value, float) and name.endswith(("_share", "_attainment")):
        return f"{100 * value:.1f}%"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def human_bytes(num_bytes: float) -> str:
    """With a decimal unit, as links and GPUs are sold: 4.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
