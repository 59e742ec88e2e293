"""A completion's figures as a table on stderr. Knows how to print; makes no call."""

from rich.console import Console
from rich.table import Table

from shoal.client import Completion


def print_stats(done: Completion) -> None:
    """Times, tokens, bytes and KV of one answer."""
    times, transfer = done.timings, done.transfer
    asked = f" instead of {done.requested_visibility} ({done.visibility_reason})" if done.requested_visibility else ""
    table = Table(title=f"{done.visibility}{asked} · {done.finish_reason}", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    parts = (
        f"tokenize {times.tokenize_ms:.1f} + reserve {times.reserve_ms:.1f} + prefill {times.prefill_ms:.1f} "
        f"+ transfer {times.transfer_ms:.1f} + first step {times.first_step_ms:.1f}"
    )
    table.add_row("TTFT", f"{times.ttft_ms:.1f} ms", parts)
    table.add_row("TPOT", f"{times.tpot_ms:.1f} ms", "mean time per later token")
    table.add_row("total", f"{times.total_ms:.1f} ms", "")
    cached = f"{done.cached_tokens} of the prompt's were cached" if done.cached_tokens else ""
    seen = f"{done.image_tokens} of the prompt's are images'" if done.image_tokens else ""
    table.add_row("tokens", f"{done.prompt_tokens} + {done.completion_tokens}", ", ".join(filter(None, (seen, cached))))
    table.add_row("on the wire", _size(transfer.payload_bytes), _wire_words(done))
    table.add_row("decode KV", _size(done.decode_kv_bytes), f"{done.decode_kv_layer_tokens} layer-tokens")
    workers = f"{transfer.prefill_worker} → {transfer.decode_worker}" if transfer.prefill_worker else transfer.decode_worker
    table.add_row("workers", workers, f"{done.num_retries} retries" if done.num_retries else "")
    table.add_row("seed", str(done.seed), "")
    Console(stderr=True).print(table)


def _wire_words(done: Completion) -> str:
    transfer = done.transfer
    if not transfer.num_entries:
        here = transfer.prefill_at == "decode_worker"
        return f"prefilled on decode ({transfer.prefill_reason})" if here else "nothing had to be transferred"
    equal = "equal to the plan" if transfer.payload_bytes == transfer.plan_bytes else f"the plan says {transfer.plan_bytes} bytes"
    saved = 1 - transfer.payload_bytes / transfer.full_depth_bytes if transfer.full_depth_bytes else 0.0
    return f"{transfer.payload_bytes} bytes, {equal}; full depth {_size(transfer.full_depth_bytes)} ({saved:.0%} saved)"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
