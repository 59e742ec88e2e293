from hypothesis import given
from hypothesis import strategies as st

from shoal.placement.plan import EntryKind, make_plan
from shoal.prefill_worker.export import ExportTracker
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility

SHAPE = ModelShape(4, 64, 4, 2, 16, 128, 256, 512)
WINDOWED = ModelShape(4, 64, 4, 2, 16, 128, 256, 512, windows=(None, 8, None, 8))


@given(
    text=st.sampled_from(["full", "speed:2", "speed:3:anchors=5", "pop:2", "pop:2:late", "speed:1:anchors=0"]),
    num_tokens=st.integers(2, 60),
    cuts=st.sets(st.integers(1, 59)),
    wire_tokens=st.integers(1, 20),
    num_cached=st.integers(0, 20),
    windowed=st.booleans(),
)
def test_every_entry_completes_once_and_never_early(
    text: str, num_tokens: int, cuts: set[int], wire_tokens: int, num_cached: int, windowed: bool
) -> None:
    visibility = Visibility.parse(text).resolve(4)
    num_prefill = visibility.split(num_tokens).num_prefill_tokens
    plan = make_plan(
        WINDOWED if windowed else SHAPE,
        DType.FLOAT32,
        visibility,
        num_tokens,
        min(num_cached, num_prefill - 1),
        max_entry_bytes=1 << 20,
        max_entry_tokens=wire_tokens,
    )
    tracker = ExportTracker(plan)
    seen: list[int] = []
    for stop in sorted({cut for cut in cuts if cut < num_prefill} | {num_prefill}):
        for layer in range(4):
            complete = tracker.layers_written(range(layer, layer + 1), stop)
            assert all(plan.entries[index].layer == layer and plan.entries[index].stop <= stop for index in complete)
            assert all(plan.entries[index].kind is EntryKind.KV for index in complete)
            seen += complete
        states = tracker.states_kept(stop)
        assert all(plan.entries[index].kind is EntryKind.DEEP_STATE and plan.entries[index].stop <= stop for index in states)
        seen += states
        due = [e.index for e in plan.entries if e.stop <= stop]
        assert sorted(seen) == due
    assert tracker.num_pending == 0 and sorted(seen) == list(range(len(plan.entries)))


def test_a_layer_that_is_heard_speaks_for_those_before_it() -> None:
    plan = make_plan(
        SHAPE, DType.FLOAT32, Visibility.parse("full").resolve(4, 1), 33, 0, max_entry_bytes=1 << 20, max_entry_tokens=16
    )
    tracker = ExportTracker(plan)
    sizes = [tracker.num_bytes_at(layer, 16) for layer in range(4)]
    assert sizes == [plan.entries[0].num_bytes] * 4 and tracker.num_bytes_at(0, 32) == 2 * sizes[0]
    assert [plan.entries[index].layer for index in tracker.layers_written(range(3), 16)] == [0, 1, 2]
    assert not tracker.layers_written(range(2), 16) and tracker.num_bytes_at(1, 16) == 0
    assert [plan.entries[index].layer for index in tracker.layers_written(range(3, 4), 16)] == [3]
    assert [plan.entries[index].layer for index in tracker.layers_written(range(4), 32)] == [0, 1, 2, 3]
    assert not tracker.num_pending
