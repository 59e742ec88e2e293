"""What a handoff adds to TTFT, and where it goes: arithmetic over requests as their callers and both workers timed them."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.pools import Timed
from shoal.pb.internal.v1 import worker_pb2 as pb

_COLUMNS = (
    "visibility", "prompt", "TTFT split", "TTFT alone", "split − alone", "first step", "exposed", "one layer",
    "apart", "beside", "reserved", "to compute", "compute", "after", "alone's own", "a later step",
)  # fmt: skip


def print_exposed_head(backend: str) -> None:
    """The columns, and what they mean."""
    print(
        f"\n### Exposed transfer by {backend}, one core a pool (ms: median, spread)\n\n"
        "alone: the same prompt in one worker on the prefill pool's core. exposed: split − alone − first step, of each pair.\n"
        "first step: decode's, from the last entry's arrival to the token. one layer: a layer's bytes at the handoff's rate.\n"
        "apart: exposed, without the difference of the two compute times. beside: CPU time of the prefill worker's other\n"
        "threads meanwhile, more than alone's. Where compute varies by more than is exposed, read these: it is at most\n"
        "their sum, and what the caches lose.\n"
        "The parts of split: reserved: until the caller knows where to send; to compute: the call of the prefill worker, its\n"
        "queue, and decode's notice of the end; compute: the prefill worker's steps, with what runs beside them on its core;\n"
        "after: from the last layer to decode's acknowledgement. alone's own: the same prompt in the worker alone, calls left\n"
        "out. a later step: time per token of 23 more.\n\n"
        f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"
    )


def print_exposed(
    visibility: str, length: int, split: Sequence[Timed], alone: Sequence[Timed], steps: Timed, layer_ms: float
) -> None:
    """One row; `split` and `alone` are pairs."""
    gaps = [(a.ttft - b.ttft) * 1e3 for a, b in zip(split, alone, strict=True)]
    first = [_of(t).first_token_ms - _of(t).transfer_done_ms for t in split]
    prefills = [t.prefill for t in split if t.prefill is not None]
    before = [_of(t).transfer_done_ms - p.compute_ms - p.after_compute_ms for t, p in zip(split, prefills, strict=True)]
    exposed = [gap - step for gap, step in zip(gaps, first, strict=True)]
    slower = [p.compute_ms - _of(t).first_token_ms for p, t in zip(prefills, alone, strict=True)]
    cells = [
        ms(t.ttft * 1e3 for t in split),
        ms(t.ttft * 1e3 for t in alone),
        ms(gaps),
        ms(first),
        ms(exposed),
        f"{layer_ms:.1f}",
        ms(whole - more for whole, more in zip(exposed, slower, strict=True)),
        ms(a.beside_ms - b.beside_ms for a, b in zip(split, alone, strict=True)),
        ms(t.reserved * 1e3 for t in split),
        ms(before),
        ms(p.compute_ms for p in prefills),
        ms(p.after_compute_ms for p in prefills),
        ms(_of(t).first_token_ms for t in alone),
        f"{steps.tpot * 1e3:.1f}",
    ]
    print(f"| {visibility} | {length} | {' | '.join(cells)} |", flush=True)


def ms(values: Iterable[float]) -> str:
    """Median and spread."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f} ({ordered[0]:.1f}–{ordered[-1]:.1f})"


def _of(timed: Timed) -> pb.Finished:
    assert timed.finished is not None
    return timed.finished
