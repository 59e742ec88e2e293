"""One picture a table, by matplotlib where it is installed (`pip install shoal[bench]`). Knows tables; measures nothing."""

import re
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.tables import Table


def draw(tables: Iterable[Table], folder: Path) -> dict[str, Path]:
    """Title → SVG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"
    folder.mkdir(parents=True, exist_ok=True)
    return {table.title: _bars(table, folder) for table in tables if table.is_plotted and table.columns}


def _bars(table: Table, folder: Path) -> Path:
    """Grouped bars of medians with their ranges; a logarithmic axis where values lie far apart."""
    from matplotlib import pyplot

    names, count = table.columns, len(table.rows)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.6 * count + 2), 3.6))
    width, seen = 0.8 / len(names), []
    for index, name in enumerate(names):
        at, medians, below, above = [], [], [], []
        for row_index, row in enumerate(table.rows):
            samples = row.samples.get(name)
            if not samples:
                continue
            median = statistics.median(samples)
            at.append(row_index + (index - (len(names) - 1) / 2) * width)
            medians.append(median)
            below.append(median - min(samples))
            above.append(max(samples) - median)
        seen += medians
        axes.bar(at, medians, width, yerr=[below, above], label=name, error_kw={"linewidth": 0.8})
    if seen and max(seen) > 20 * min(seen):
        axes.set_yscale("log")
    axes.set_xticks(range(count), [row.label for row in table.rows])
    axes.set_xlabel(table.heading)
    axes.set_ylabel(table.unit)
    axes.set_title(table.title, fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = folder / (re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-") + ".svg")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
