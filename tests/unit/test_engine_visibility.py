"""What segments leave behind (design §2), with prefill and decode as two pools that share only what would cross the wire."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kernels import kernels_or_none
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import (
    LogitRows,
    RequestKv,
    Segment,
    anchor_segment,
    decode_segment,
    late_projection_segment,
    prefill_segments,
)
from shoal.errors import InternalError
from shoal.placement.blocks import BlockPool
from shoal.placement.plan import EntryKind, make_plan
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType
from shoal.visibility import Visibility, VisibilityKind
from tests import engine_support as support

L = 4


@dataclass
class Side:
    """One worker's pool with one request in it. Blocks are handed out in a scrambled order."""

    decoder: Decoder
    pool: KvPool
    kv: RequestKv

    @classmethod
    def of(cls, decoder: Decoder, visibility: Visibility, num_prompt: int, num_slots: int, block_size: int = 4) -> "Side":
        layout = KvLayout.of(L, visibility, num_prompt)
        blocks = BlockPool(400)
        taken = blocks.allocate(400)
        blocks.release(np.random.default_rng(num_prompt).permutation(taken).astype(np.int32))
        tables = RequestTables(blocks, block_size, layout)
        tables.reserve(num_slots, layout.num_upper_slots(num_slots))
        pool = KvPool(decoder.config.shape, 400, block_size, DType.FLOAT32)
        return cls(decoder, pool, RequestKv.of(tables))


def decode_all(side: Side, ids: list[int], num_tokens: int, first: list[Segment]) -> list[torch.Tensor]:
    """Logits of each greedy step, the first with `first` segments ahead of the boundary tokens."""
    tokens, start, steps, ahead = (
        ids[side.kv.layout.split.num_prefill_tokens :],
        side.kv.layout.split.num_prefill_tokens,
        [],
        first,
    )
    for _ in range(num_tokens):
        segment = decode_segment(side.kv, tokens, range(start, start + len(tokens)))
        steps.append(side.decoder.forward([*ahead, segment], side.pool).run().logits[0])
        start, tokens, ahead = start + len(tokens), [int(steps[-1].argmax())], []
    return steps


def prefill_chunks(side: Side, ids: list[int], chunk: int) -> list[tuple[range, torch.Tensor]]:
    """Run the prefill tokens in chunks; returns the deep states they hand back."""
    states, num_prefill = [], side.kv.layout.split.num_prefill_tokens
    for start in range(0, num_prefill, chunk):
        positions = range(start, min(start + chunk, num_prefill))
        segments = prefill_segments(side.kv, ids[positions.start : positions.stop], positions)
        forward = side.decoder.forward(segments, side.pool).run()
        assert len(forward.logits) == 0
        states += [(segments[index].positions, own) for index, own in forward.states.items()]
    return states


def single_process(
    visibility: Visibility, ids: list[int], num_tokens: int, variant: str = "llama", chunk: int = 1000
) -> list[torch.Tensor]:
    side = Side.of(support.decoder(variant), visibility, len(ids), len(ids) + num_tokens)
    enter = anchor_segment if visibility.kind is VisibilityKind.SPEED else late_projection_segment
    states = [enter(side.kv, own, positions) for positions, own in prefill_chunks(side, ids, chunk)]
    return decode_all(side, ids, num_tokens, states)


@pytest.mark.parametrize("boundary", [1, 3, 30])
@pytest.mark.parametrize("same", [f"speed:{L}", f"speed:{L}:anchors=3", f"pop:{L}", f"pop:{L}:late"])
def test_depth_l_is_full_bit_for_bit(same: str, boundary: int) -> None:
    """Both where the router has resolved K = L to `full`, and where the layout still says K = L."""
    ids = list(support.prompt(21))
    full = single_process(Visibility.parse(f"full:boundary={boundary}"), ids, 4)
    text = Visibility.parse(f"{same}:boundary={boundary}")
    for visibility in (text, text.resolve(L)):
        for own, expected in zip(single_process(visibility, ids, 4), full, strict=True):
            assert torch.equal(own, expected)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-qk-norm-tied"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_projection_equals_pop(variant: str, depth: int) -> None:
    ids = list(support.prompt(21))
    plain = single_process(Visibility.parse(f"pop:{depth}:boundary=2"), ids, 4, variant, chunk=5)
    late = single_process(Visibility.parse(f"pop:{depth}:late:boundary=2"), ids, 4, variant, chunk=5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, late, strict=True))


VISIBILITIES = [
    "full:boundary=2",
    "speed:2:boundary=3",
    "speed:3:anchors=6:boundary=1",
    "speed:1:anchors=0:boundary=1",
    "speed:2:anchors=2:sink:boundary=1",
]
VISIBILITIES += ["pop:2:boundary=2", "pop:3:late:boundary=1", "pop:1:late:boundary=4"]


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2-bias-mixed-windows"])
@pytest.mark.parametrize("text", VISIBILITIES)
def test_only_the_plan_crosses(variant: str, text: str) -> None:
    """Prefill holds only its layers; the plan's entries alone reach a decode pool otherwise full of garbage."""
    visibility, ids, num_tokens = Visibility.parse(text), list(support.prompt(23)), 4
    depth = visibility.depth(L)
    projects = visibility.kind is VisibilityKind.POP and not visibility.late
    held = HeldLayers(range(depth), range(depth, L if projects else depth), embedding=True, head=False)
    partial, _ = Decoder.load(support.model_files(variant), dtype=DType.FLOAT32, held=held)
    prefill = Side.of(partial, visibility, len(ids), len(ids))
    decode = Side.of(support.decoder(variant), visibility, len(ids), len(ids) + num_tokens, block_size=8)
    decode.pool.data.fill_(float("nan"))  # stale blocks, at their worst
    states = dict.fromkeys(range(0), torch.empty(0))
    for positions, own in prefill_chunks(prefill, ids, 6):
        states |= dict(zip(positions, own, strict=True))

    shape = partial.config.shape
    plan = make_plan(shape, DType.FLOAT32, visibility, len(ids), 0, max_entry_bytes=1 << 20, max_entry_tokens=5)
    entering = []
    for entry in plan.entries:
        if entry.kind is EntryKind.KV:
            wire = torch.empty(entry.num_bytes, dtype=torch.uint8)
            tables = [kv.lower if kv.is_lower(entry.layer) else kv.upper for kv in (prefill.kv, decode.kv)]
            prefill.pool.pack(tables[0], entry.layer, entry.start, entry.stop, wire)
            decode.pool.unpack(tables[1], entry.layer, entry.start, entry.stop, wire)
        else:
            enter = late_projection_segment if visibility.late else anchor_segment
            stacked = torch.stack([states[position] for position in range(entry.start, entry.stop)])
            entering.append(enter(decode.kv, stacked, range(entry.start, entry.stop)))
    got = decode_all(decode, ids, num_tokens, entering)
    for own, expected in zip(got, single_process(visibility, ids, num_tokens, variant), strict=True):
        assert torch.allclose(own, expected, atol=1e-4)


def test_layers_are_yielded_with_their_kv_written_and_later_ones_not() -> None:
    ids = list(support.prompt(12))
    side = Side.of(support.decoder(), Visibility.parse("pop:2:boundary=1"), 12, 12)
    forward = side.decoder.forward(prefill_segments(side.kv, ids[:11], range(11)), side.pool)
    assert not side.pool.data.any()  # nothing happens before the iteration
    seen = []
    for layer in forward:
        tables = [(side.kv.lower if side.kv.is_lower(other) else side.kv.upper).layer_ids(other) for other in range(L)]
        written = [bool(side.pool.data[torch.from_numpy(ids)].any()) for ids in tables]
        assert written == [other <= layer for other in range(L)]
        assert not torch.is_inference_mode_enabled()  # the consumer's own mode, not the step's
        seen.append(layer)
    assert seen == list(range(L))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("heard", [(), (1,), (0, 3), (2,), (3,)])
def test_layers_nobody_listens_to_are_run_and_not_yielded(heard: tuple[int, ...], backend: str) -> None:
    if backend == "native" and kernels_or_none() is None:
        pytest.skip("no compiler")
    ids, written = list(support.prompt(12)), []
    for layers in (range(L), heard):
        side = Side.of(support.decoder(backend=backend), Visibility.parse("pop:2:boundary=1"), 12, 12)
        asked: list[int] = []

        def is_heard(layer: int, asked: list[int] = asked, layers: Collection[int] = layers) -> bool:
            asked.append(layer)
            return layer in layers

        forward = side.decoder.forward(prefill_segments(side.kv, ids[:11], range(11)), side.pool).listen(is_heard)
        for layer in forward:
            assert layer in layers
            tables = [(side.kv.lower if side.kv.is_lower(other) else side.kv.upper).layer_ids(other) for other in range(L)]
            assert [bool(side.pool.data[torch.from_numpy(ids)].any()) for ids in tables] == [other <= layer for other in range(L)]
        assert asked == list(range(L))
        written.append(side.pool.data.clone())
    assert torch.equal(*written)


def test_layers_nobody_touches_are_not_yielded() -> None:
    ids = list(support.prompt(12))
    side = Side.of(support.decoder(), Visibility.parse("speed:2:anchors=2:boundary=1"), 12, 12)
    forward = side.decoder.forward(prefill_segments(side.kv, ids[:11], range(11)), side.pool)
    assert list(forward) == [0, 1]
    [states] = forward.states.values()
    assert states.shape == (2, 64)
    assert list(side.decoder.forward([anchor_segment(side.kv, states, range(2))], side.pool)) == [2, 3]


def test_rows_run_no_further_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """`speed`, K = 2, two anchors of eleven prefill tokens: layer 1 runs in full for the anchors alone."""
    rows: list[tuple[int, ...]] = []
    plain = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        rows.append((len(x), len(weight)))
        return plain(x, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    side = Side.of(support.decoder(backend="torch"), Visibility.parse("speed:2:anchors=2:boundary=1"), 12, 12)
    side.decoder.forward(prefill_segments(side.kv, support.prompt(11), range(11)), side.pool).run()
    qkv, kv, output, gate_up, down = 128, 64, 64, 256, 64
    layer_0 = [(11, qkv), (11, output), (11, gate_up), (11, down)]
    layer_1 = [(9, kv), (2, qkv), (2, output), (2, gate_up), (2, down)]
    assert rows == layer_0 + layer_1


def test_a_step_may_run_in_another_thread_and_repeats_bit_for_bit() -> None:
    """A step loop's thread makes the same numbers, and a pass begun in one thread may end in another."""
    ids, visibility = list(support.prompt(21)), Visibility.parse("speed:2:anchors=2:boundary=3")
    here = single_process(visibility, ids, 3)
    with ThreadPoolExecutor(2) as threads:
        there = threads.submit(single_process, visibility, ids, 3).result()
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
        side = Side.of(support.decoder(), visibility, 21, 21)
        forward = side.decoder.forward(prefill_segments(side.kv, ids[:18], range(18)), side.pool)
        assert next(iter(forward)) == 0
        assert threads.submit(lambda: list(forward)).result() == [1]
        assert len(forward.states) == 1 and not torch.is_inference_mode_enabled()


def test_segments_that_contradict_the_layout_are_refused() -> None:
    side = Side.of(support.decoder(), Visibility.parse("speed:2:anchors=2:boundary=1"), 12, 12)
    states = torch.zeros(3, 64)
    for make, words in [
        (lambda: prefill_segments(side.kv, [5] * 12, range(12)), "not prefill tokens"),
        (lambda: decode_segment(side.kv, [5], range(10, 11)), "not a decode token"),
        (lambda: anchor_segment(side.kv, states, range(3)), "not anchors"),
        (lambda: late_projection_segment(side.kv, states, range(3)), "not projected late"),
        (lambda: decode_segment(side.kv, [5, 6], range(11, 12)), "another number of inputs"),
        (lambda: Segment(side.kv, range(0), range(4), range(0), token_ids=()), "at least one position"),
        (lambda: Segment(side.kv, range(1), range(1, 4), range(0), token_ids=(5,)), "token ids enter at layer 0"),
        (lambda: Segment(side.kv, range(1), range(1), range(2, 3), token_ids=(5,)), "follow the full layers directly"),
        (lambda: Segment(side.kv, range(1), range(3), range(0), token_ids=(5,), logits=LogitRows.ALL), "every layer"),
    ]:
        with pytest.raises(InternalError, match=words):
            make()
    with pytest.raises(InternalError, match="at least one segment"):
        side.decoder.forward([], side.pool)
    forward = side.decoder.forward([decode_segment(side.kv, [5] * 9, range(11, 20))], side.pool)
    with pytest.raises(InternalError, match="only after the whole step"):
        _ = forward.logits
    with pytest.raises(InternalError, match="slot 19 is not reserved"):
        forward.run()


def test_what_is_not_held_is_named() -> None:
    held = HeldLayers(range(2), range(2, 2), embedding=True, head=False)
    partial, report = Decoder.load(support.model_files(), dtype=DType.FLOAT32, held=held)
    assert set(report.layers_opened) == {0, 1}
    side = Side.of(partial, Visibility.parse("pop:2:boundary=1"), 12, 12)
    with pytest.raises(InternalError, match="K/V projection of layer 2 is not held"):
        partial.forward(prefill_segments(side.kv, [5] * 11, range(11)), side.pool).run()
    with pytest.raises(InternalError, match="layer 2 is not held in full"):
        partial.forward([decode_segment(side.kv, [5], range(11, 12))], side.pool).run()
