"""The Triton kernels. Know strides and masks; who calls them with what is `operations.py`.

Rows of the KV pool are those of KvPool.rows: ((block · 2 + K or V) · kv_heads + head) · block_size + offset, each head_dim long.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, out, width, eps, WIDTH: tl.constexpr):
    """out = x / rms(x) · weight, one program a row; the mean in float32, rounded to the weight's type before the product."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    wide = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, (wide * scale).to(gain.dtype) * gain, mask=inside)


@triton.jit
def silu_multiply(gate_up, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) · up, where a row holds gate and then up; programs (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(up.dtype)
    tl.store(out + row * width + columns, activated * up, mask=inside)


@triton.jit
def rotate_and_store(
    heads,
    cos,
    sin,
    pool,
    blocks,
    offsets,
    stride,
    num_turning: tl.constexpr,
    first_key: tl.constexpr,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    half: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turn q and k of `heads` [n, heads, 2·half] in place, and copy k and v to the pool; programs (rows, heads).

    Heads below `num_turning` are turned; from `first_key` on they are kv_heads keys, then as many values. A row whose block is
    negative is padding and is stored nowhere. `stride` is a row's length in elements.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, HALF)
    inside = columns < half
    at = heads + row * stride + head * 2 * half + columns
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0)
    if head < num_turning:
        c = tl.load(cos + row * half + columns, mask=inside, other=0.0)
        s = tl.load(sin + row * half + columns, mask=inside, other=0.0)
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        first = (wide_first * c - wide_second * s).to(first.dtype)
        second = (wide_second * c + wide_first * s).to(second.dtype)
        tl.store(at, first, mask=inside)
        tl.store(at + half, second, mask=inside)
    block = tl.load(blocks + row).to(tl.int64)
    if (head >= first_key) & (block >= 0):
        target = (block * 2 * kv_heads + (head - first_key)) * block_size + tl.load(offsets + row)
        tl.store(pool + target * 2 * half + columns, first, mask=inside)
        tl.store(pool + target * 2 * half + half + columns, second, mask=inside)


@triton.jit
def attend_part(
    q,
    pool,
    table,
    slots,
    starts,
    partial,
    table_stride,
    q_stride,
    scale,
    block_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    d: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One part of one row's keys, for the `group` heads that share them: an online softmax; programs (rows, kv heads, parts).

    A row sees slots starts … slots; a negative slot is padding. `partial` [rows, kv_heads, parts, group, d + 2] float32 takes the
    sum of the weighted values, the largest score (base 2) and the sum of the weights.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    last, start = tl.load(slots + row), tl.load(starts + row)
    members, columns = tl.arange(0, GROUP), tl.arange(0, D)
    is_member, inside = members < group, columns < d
    length = tl.maximum(last + 1 - start, 0)
    share = ((length + NUM_PARTS - 1) // NUM_PARTS + KEYS - 1) // KEYS * KEYS
    begin = start + part * share
    end = tl.minimum(begin + share, last + 1)
    at = q + row * q_stride + (head * group + members[:, None]) * d + columns[None, :]
    queries = tl.load(at, mask=is_member[:, None] & inside[None, :], other=0.0)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    result = tl.zeros([GROUP, D], tl.float32)
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        seen = keys < end
        block = tl.load(table + row * table_stride + keys // block_size, mask=seen, other=0).to(tl.int64)
        place = (block * 2 * kv_heads + head) * block_size + keys % block_size
        mask = seen[:, None] & inside[None, :]
        k = tl.load(pool + place[:, None] * d + columns[None, :], mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(largest - peak)
        v = tl.load(pool + (place + kv_heads * block_size)[:, None] * d + columns[None, :], mask=mask, other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, axis=1)
        largest = peak
    base = partial + (((row * kv_heads + head) * NUM_PARTS + part) * group + members) * (d + 2)
    tl.store(base[:, None] + columns[None, :], result, mask=is_member[:, None] & inside[None, :])
    tl.store(base + d, largest, mask=is_member)
    tl.store(base + d + 1, total, mask=is_member)


@triton.jit
def attend_join(
    partial,
    slots,
    out,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    d: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
):
    """Join the parts: out [rows, heads, d]; programs (rows, heads). Padding becomes zeros."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts, columns = tl.arange(0, PARTS), tl.arange(0, D)
    is_part, inside = parts < NUM_PARTS, columns < d
    base = partial + (((row * kv_heads + head // group) * NUM_PARTS + parts) * group + head % group) * (d + 2)
    largest = tl.load(base + d, mask=is_part, other=float("-inf"))
    total = tl.load(base + d + 1, mask=is_part, other=0.0)
    values = tl.load(base[:, None] + columns[None, :], mask=is_part[:, None] & inside[None, :], other=0.0)
    is_row = tl.load(slots + row) >= 0
    peak = tl.where(is_row, tl.max(largest, axis=0), 0.0)
    weights = tl.exp2(largest - peak)
    weight = tl.where(is_row, tl.sum(total * weights, axis=0), 1.0)
    result = tl.sum(values * weights[:, None], axis=0) / weight
    at = out + (row * kv_heads * group + head) * d + columns
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)
