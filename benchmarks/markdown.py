"""A Markdown table of cells. Knows no figures."""

from collections.abc import Iterable, Sequence


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines; the first row is the headings."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
