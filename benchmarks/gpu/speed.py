"""Times of the large model: rates of its two kinds of work, first tokens by policy and length, decode steps by context."""

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu import peaks
from benchmarks.gpu.clock import median_seconds, seconds
from benchmarks.gpu.model import Bench
from benchmarks.gpu.report import Line
from benchmarks.gpu.sizes import Sizes
from shoal.engine.dtypes import torch_dtype
from shoal.placement.tables import KvLayout
from shoal.visibility import Visibility

_STEPS = 20


def measure(device: torch.device, sizes: Sizes, deadline: float) -> Iterator[Line]:
    """The rates, prefill, then decode; longest last, and none begun after the deadline."""
    peak, copied = peaks.matrix_flops(device, sizes), peaks.copy_bytes(device, sizes)
    bench = Bench.make(sizes, device)
    yield Line("back end", str(bench.decoder.backend))
    yield _linear_rate(device, sizes, peak)
    yield _attention_rate(device, sizes, peak)
    bench.first_token("full", sizes.chunk_tokens, sizes.chunk_tokens)  # compiles, allocates
    for length in (*sizes.prefill_lengths, sizes.long_length):
        yield from _prefill(bench, device, sizes, length, deadline)
    for context, batches in sizes.decode:
        for batch in batches:
            yield from _decode(bench, device, sizes, context, batch, copied, deadline)


def _linear_rate(device: torch.device, sizes: Sizes, peak: float) -> Line:
    """The four products of one layer over one chunk."""
    shape, dtype, rows = sizes.config.shape, torch_dtype(sizes.dtype), sizes.chunk_tokens
    width = shape.num_heads * shape.head_dim
    dims = [
        (shape.hidden_size, width + shape.kv_elements),
        (width, shape.hidden_size),
        (shape.hidden_size, 2 * shape.intermediate_size),
        (shape.intermediate_size, shape.hidden_size),
    ]
    pairs = [(torch.randn(rows, i, device=device).to(dtype), torch.randn(o, i, device=device).to(dtype)) for i, o in dims]
    taken = median_seconds(lambda: [F.linear(x, weight) for x, weight in pairs], device, 10)
    rate = sum(2 * rows * i * o for i, o in dims) / taken
    return _share("linear layers of prefill", rate, peak, sizes, 0.6)


def _attention_rate(device: torch.device, sizes: Sizes, peak: float) -> Line:
    """Causal attention of one chunk on its own keys."""
    shape, dtype, rows = sizes.config.shape, torch_dtype(sizes.dtype), sizes.chunk_tokens
    q, k, v = (
        torch.randn(1, heads, rows, shape.head_dim, device=device).to(dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    taken = median_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), device, 10)
    return _share("attention of prefill (causal half)", 2 * shape.num_heads * shape.head_dim * rows * rows / taken, peak, sizes)


def _share(what: str, rate: float, peak: float, sizes: Sizes, aim: float | None = None) -> Line:
    is_met = rate / peak >= aim if aim is not None and sizes.is_real else None
    value = f"{rate / 1e12:.2f} TFLOP/s, {rate / peak:.0%} of the measured peak"
    return Line(what, value, f"≥ {aim:.0%}" if aim is not None and sizes.is_real else "", is_met)


def _prefill(bench: Bench, device: torch.device, sizes: Sizes, length: int, deadline: float) -> Iterator[Line]:
    repeats = 1 if length == sizes.long_length else 3
    taken: dict[str, float] = {}
    for policy in sizes.policies:
        if time.monotonic() > deadline:
            yield Line(f"first token, {length} tokens, {policy}", "left out: no time left")
            continue
        runs = [seconds(partial(bench.first_token, policy, length, sizes.chunk_tokens), device) for _ in range(repeats)]
        taken[policy] = statistics.median(runs)
        value, aim, is_met = f"{1e3 * taken[policy]:.0f} ms", "", None
        if policy != sizes.policies[0] and sizes.policies[0] in taken:
            ratio = taken[sizes.policies[0]] / taken[policy]
            value += f", full / this = {ratio:.3f}"
            if policy.startswith("speed") and sizes.is_real:
                aim, is_met = "1.30–1.34", ratio >= 1.30
        yield Line(f"first token, {length} tokens, {policy}", value, aim, is_met)


def _decode(
    bench: Bench, device: torch.device, sizes: Sizes, context: int, batch: int, copied: float, deadline: float
) -> Iterator[Line]:
    weights = _weight_bytes(sizes)
    taken: dict[str, float] = {}
    for policy in sizes.policies:
        what = f"decode step, {batch} × {context} tokens, {policy}"
        if time.monotonic() > deadline:
            yield Line(what, "left out: no time left")
            continue
        held = [bench.reserve(policy, context, _STEPS + 4) for _ in range(batch)]
        requests = [kv for _, kv in held]
        positions = iter(range(context, context + _STEPS + 4))
        for _ in range(3):  # records the step
            bench.step(requests, next(positions))
        taken[policy] = statistics.median(seconds(partial(bench.step, requests, next(positions)), device) for _ in range(_STEPS))
        for tables, _ in held:
            tables.release()
        num_bytes = weights + batch * _kv_bytes(sizes, policy, context)
        share = num_bytes / taken[policy] / copied
        value = f"{1e3 * taken[policy]:.2f} ms, {share:.0%} of the copies' bandwidth"
        aim, is_met = ("≥ 70 %", share >= 0.7) if sizes.is_real else ("", None)
        if policy != sizes.policies[0] and sizes.policies[0] in taken:
            allowed = (weights + batch * _kv_bytes(sizes, sizes.policies[0], context)) / num_bytes
            ratio = taken[sizes.policies[0]] / taken[policy]
            value += f", full / this = {ratio:.3f} of {allowed:.3f} by bytes"
            if context == sizes.long_length and sizes.is_real:
                aim, is_met = f"{aim}, ≥ {0.95 * allowed:.3f}", bool(is_met) and ratio >= 0.95 * allowed
        yield Line(what, value, aim, is_met)


def _weight_bytes(sizes: Sizes) -> int:
    """What a step must read of the weights: all layers and the head."""
    shape = sizes.config.shape
    width = shape.num_heads * shape.head_dim
    layer = shape.hidden_size * (2 * width + shape.kv_elements + 3 * shape.intermediate_size)
    return (shape.num_layers * layer + shape.vocab_size * shape.hidden_size) * sizes.dtype.num_bytes


def _kv_bytes(sizes: Sizes, policy: str, context: int) -> int:
    """K and V that a step of one request reads (design §2)."""
    shape = sizes.config.shape
    layout = KvLayout.of(shape.num_layers, Visibility.parse(policy).resolve(shape.num_layers), context)
    slots = len(layout.lower_layers) * context + len(layout.upper_layers) * layout.num_upper_slots(context)
    return slots * shape.kv_elements * sizes.dtype.num_bytes
