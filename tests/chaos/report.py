"""Tables for people and JSON for machines. Knows results; judges nothing."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.killer import Hit
from tests.chaos.plan import Deed
from tests.chaos.run import Result


def show(results: Sequence[Result], console: Console) -> None:
    """One table of what was asked and came back, one of strikes, and what must not be."""
    console.print(_requests(results))
    console.print(_strikes(results))
    for result in results:
        for violation in result.verdict.violations[:40]:
            at = "" if violation.request is None else f" request {violation.request}"
            console.print(f"{result.setting.model}: {violation.kind}{at}: {violation.detail}", style="red", markup=False)
    num_bad = sum(len(result.verdict.violations) for result in results)
    console.print(f"[bold]{'nothing that must not be' if not num_bad else f'{num_bad} VIOLATIONS'}")


def _requests(results: Sequence[Result]) -> Table:
    table = Table("requests", *(result.setting.model for result in results), title="asked and answered")
    rows: dict[str, list[str]] = {}

    def row(name: str, values: Sequence[object]) -> None:
        rows[name] = [str(value) for value in values]

    row("sent", [result.num_asked for result in results])
    names = sorted({name for result in results for name in result.verdict.counts}, key=_order)
    for name in names:
        row(name, [result.verdict.counts.get(name, 0) for result in results])
    row("violations", [len(result.verdict.violations) for result in results])
    row("kill → final error of requests it hit, retry included", [_spread(result.verdict.error_waits_s) for result in results])
    row("longest silence of resumed streams, median / max", [_spread(result.verdict.resumed_gaps_s) for result in results])
    row("all given back after the last", [_seconds(result.idle_after_s) for result in results])
    row("seconds, reference apart", [f"{result.seconds:.0f} + {result.reference_s:.0f}" for result in results])
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _strikes(results: Sequence[Result]) -> Table:
    heads = ("strikes", "model", "times", "router sends no more", "controller knows", "SERVING again")
    table = Table(*heads, title="strikes: seconds since, median / max")
    for result in results:
        for deed in Deed:
            for pool in ("prefill", "decode", ""):
                hits = [hit for hit in result.hits if hit.deed is deed and _pool(hit) == pool]
                if hits:
                    spreads = [[hit.dropped_s for hit in hits], [hit.noticed_s for hit in hits], [hit.back_s for hit in hits]]
                    cells = [_spread([value for value in values if value is not None]) for values in spreads]
                    table.add_row(f"{_WORDS[deed]} {pool}".strip(), result.setting.model, str(len(hits)), *cells)
    return table


_WORDS = {
    Deed.KILL: "SIGKILL",
    Deed.PAIR: "SIGKILL prefill and decode",
    Deed.HANG: "SIGSTOP",
    Deed.PAUSE: "SIGSTOP, SIGCONT",
    Deed.ROUTER: "SIGKILL router",
    Deed.HANG_ROUTER: "SIGSTOP router",
    Deed.CONTROLLER: "SIGKILL controller",
    Deed.ORPHAN: "SIGKILL controller and worker",
}


def _pool(hit: Hit) -> str:
    return hit.name.partition("-")[0] if hit.deed in (Deed.KILL, Deed.HANG, Deed.PAUSE) else ""


def _order(name: str) -> tuple[int, str]:
    heads = ("callers stayed", "left by", "stayed: answered", "stayed", "left", "retried", "near")
    return next((i for i, head in enumerate(heads) if name.startswith(head)), len(heads)), name


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "–"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def write_json(results: Sequence[Result], path: Path) -> None:
    """Every strike and every violation; no token ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = [
        {
            "setting": asdict(result.setting),
            "num_asked": result.num_asked,
            "counts": dict(result.verdict.counts),
            "violations": [asdict(violation) for violation in result.verdict.violations],
            "error_waits_s": result.verdict.error_waits_s,
            "resumed_gaps_s": result.verdict.resumed_gaps_s,
            "strikes": [asdict(hit) for hit in result.hits],
            "idle_after_s": result.idle_after_s,
            "held": result.held,
            "seconds": result.seconds,
            "reference_s": result.reference_s,
        }
        for result in results
    ]
    path.write_text(json.dumps({"runs": runs}, indent=1, default=sorted))  # sets as lists
