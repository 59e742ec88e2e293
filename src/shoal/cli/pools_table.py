"""Draws one look at the pools with rich: rows, bars, totals. Knows no server; what workers say is text, never markup."""

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.pools_frame import SILENT, Holdings, PoolsFrame, QualityRow

_BAR_WIDTH: Final = 10
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_STATE_STYLES: Final = {"ready": "green", "draining": "yellow", "starting": "cyan", "dead": "red", SILENT: "red"}
_COLUMNS: Final = ("runs", "waits", "blocks", "reserved", "moves", "staging", "work", "memory")
_NO_REPORT: Final = ("–",) * len(_COLUMNS)


def draw(frame: PoolsFrame) -> RenderableType:
    """Head line, one row for each worker, one for each pool with more than one."""
    num_ready = sum(row.state == "ready" for row in frame.workers)
    head = Text.assemble(
        ("shoal ", "bold"), f"{frame.version} at {frame.address}, up {_duration(frame.uptime_s)}; "
        f"requests: {frame.num_active_requests}; workers ready: {num_ready} of {len(frame.workers)}"
        + (", colocated" if frame.workers and all(row.colocated for row in frame.workers) else ""),
    )  # fmt: skip
    if not frame.workers:
        return Group(head, Text("no workers are known yet"))
    table = Table(box=None, pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "blocks" else "right", no_wrap=True)
    for row in frame.workers:
        state = Text(row.state, style=_STATE_STYLES.get(row.state, ""))
        cells = _NO_REPORT if row.holds is None else _cells(row.holds)
        table.add_row(Text(row.worker_id), state, str(row.epoch), *cells)
    for pool, total in frame.totals().items():
        num = sum(row.pool == pool for row in frame.workers)
        if num > 1:
            table.add_row(Text(f"all {num} {pool}"), "", "", *_cells(total), style="bold")
    return Group(head, table, *map(quality_line, frame.quality))


def quality_line(row: QualityRow) -> Text:
    """One line about a shallow visibility."""
    found = "not measured yet"
    if row.num_samples:
        agrees = f"{row.agreement:.1%} of tokens agree with full depth, {row.kl_nats:.3f} nats"
        found = f"{agrees} ({row.num_samples} requests)"
    if row.state == "served":
        return Text(f"quality of {row.visibility}: {found}")
    why = f"served as full ({row.reason}; {row.num_replaced_requests} requests); since then "
    return Text(f"quality of {row.visibility}: {why}{found}", style="bold red")


def bar(used: int, total: int, width: int = _BAR_WIDTH) -> str:
    """`used` of `total` in block characters; never empty when something is used, never full when something is free."""
    if total <= 0:
        return " " * width
    eighths = width * 8 * min(used, total) // total
    if used > 0:
        eighths = max(1, eighths)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width, "·")


def _cells(holds: Holdings) -> tuple[RenderableType, ...]:
    staging = str(holds.num_staging_in_use)
    if holds.num_staging_quarantined:
        staging += f" ({holds.num_staging_quarantined} quarantined)"
    blocks = f"{bar(holds.num_used_blocks, holds.num_total_blocks)} {holds.num_used_blocks}/{holds.num_total_blocks}"
    if holds.num_cached_blocks:
        blocks += f" ({holds.num_cached_blocks} cached)"
    return (
        str(holds.num_running),
        str(holds.num_waiting),
        blocks,
        str(holds.num_reservations),
        str(holds.num_transfers_in_flight),
        staging,
        str(holds.outstanding_token_layers),
        f"{holds.resident_bytes / 2**20:.0f} MiB",
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
