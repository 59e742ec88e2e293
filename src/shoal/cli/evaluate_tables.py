"""The tables of `shoal eval`. Knows results by their fields; computes shares and nothing else."""

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_WIDTH: Final = 132


def print_scores(task: str, data: str, scores: Sequence[Any]) -> None:
    """Perplexity and divergence, a row a subject."""
    first = scores[0]
    title = f"{task}: {first.num_tokens} response tokens of {first.num_examples} examples, {data}"
    table = _table(title, "", "perplexity", "95 %", "÷ full", "95 %", "KL, nats", "top-1 agrees")
    for own in scores:
        interval = (
            f"{_figure(own.perplexity_low)}–{_figure(own.perplexity_high)}",
            f"{_figure(own.ratio_low, 3)}–{_figure(own.ratio_high, 3)}",
        )
        cells = (own.name, _figure(own.perplexity), interval[0], _figure(own.ratio, 3), interval[1], f"{own.kl:.3f}")
        table.add_row(*cells, f"{own.agreement:.1%}")
    _show(table)


def print_rates(loops: Sequence[Any], choices: Sequence[Any], code: Sequence[Any]) -> None:
    """Loop rates, multiple choice and HumanEval."""
    if loops:
        table = _table("loops: greedy answers", "", "answers", "end in a loop", "distinct 4-grams", "tokens, mean")
        for own in loops:
            rate = f"{own.num_looping} = {own.num_looping / own.num_answers:.0%}"
            table.add_row(own.visibility, str(own.num_answers), rate, f"{own.distinct:.1%}", f"{own.mean_tokens:.0f}")
        _show(table)
    if choices:
        table = _table("choices: the answer of least loss a character", "", "questions", "right", "±", "as full depth")
        for own in choices:
            count = own.num_questions
            cells = (f"{own.num_right} = {own.num_right / count:.1%}", f"{own.error:.1%}", f"{own.num_as_full / count:.1%}")
            table.add_row(own.visibility, str(count), *cells)
        _show(table)
    if code:
        table = _table("humaneval: greedy, one attempt", "", "problems", "passed")
        for own in code:
            table.add_row(own.visibility, str(own.num_problems), f"{own.num_passed} = {own.num_passed / own.num_problems:.1%}")
        _show(table)


def print_needles(needles: Sequence[Any]) -> None:
    """A row for each visibility and length, a column for each depth."""
    if not needles:
        return
    depths = sorted({own.depth for own in needles})
    table = _table("needle: found, by depth in the prompt (0 = its beginning)", "", "tokens", *map(str, depths), "all")
    cells: dict[tuple[str, int], dict[float, Any]] = {}
    for own in needles:
        cells.setdefault((own.visibility, own.num_tokens), {})[own.depth] = own
    for (visibility, length), row in cells.items():
        found, asked = (sum(getattr(own, name) for own in row.values()) for name in ("num_found", "num_prompts"))
        each = [f"{row[depth].num_found}/{row[depth].num_prompts}" for depth in depths]
        table.add_row(visibility, str(length), *each, f"{found / asked:.0%}")
    _show(table)


def print_harness(results: Sequence[Any]) -> None:
    """lm-eval's metrics."""
    if not results:
        return
    table = _table("lm-eval, through Score", "", "visibility", "shots", "metric", "value", "±")
    for own in results:
        error = "" if own.error is None else f"{own.error:.4f}"
        table.add_row(own.task, own.visibility, str(own.num_shots), own.metric, f"{own.value:.4f}", error)
    _show(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, header_style="")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _show(table: Table) -> None:
    console = Console(width=_WIDTH, highlight=False)
    console.print(table)
    console.print()


def _figure(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value < 10_000 else f"{value:.2g}"
