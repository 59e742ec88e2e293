"""What a section hands back: typed tables of samples. Knows Markdown and JSON; measures nothing."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Row:
    """One case; samples by column. A column without samples was not measured."""

    label: str
    samples: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Table:
    """One question. `base`: the column that is compared with every other one, as base / other."""

    title: str
    heading: str  # of the labels
    unit: str
    rows: tuple[Row, ...]
    base: str | None = None
    note: str = ""  # what was done, in a sentence or two
    marks: dict[str, str] | None = None  # column → the mark its ratio is held to, as text
    is_plotted: bool = True

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.samples))

    def markdown(self) -> str:
        """Median (least–most) of every column, and base / other."""
        others = [name for name in self.columns if self.base and name != self.base]
        head = [self.heading, *(f"{name}, {self.unit}" for name in self.columns), *(f"{self.base} / {name}" for name in others)]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in self.rows:
            cells = [_cell(row.samples.get(name)) for name in self.columns]
            cells += [_ratio(row.samples.get(self.base or ""), row.samples.get(name)) for name in others]
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
        parts = [f"### {self.title}", self.note, "\n".join(lines)]
        if self.marks:
            parts.append("Marks: " + "; ".join(f"{self.base} / {name} {mark}" for name, mark in self.marks.items()) + ".")
        return "\n\n".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        rows = tuple(Row(row["label"], {k: tuple(v) for k, v in row["samples"].items()}) for row in data["rows"])
        return cls(**{**data, "rows": rows})


def _cell(samples: tuple[float, ...] | None) -> str:
    if not samples:
        return "–"
    median = statistics.median(samples)
    digits = 1 if median < 100 else 0
    text = f"{median:,.{digits}f}"
    return text if len(samples) == 1 else f"{text} ({min(samples):,.{digits}f}–{max(samples):,.{digits}f})"


def _ratio(own: tuple[float, ...] | None, other: tuple[float, ...] | None) -> str:
    return f"{statistics.median(own) / statistics.median(other):.2f}" if own and other else "–"
