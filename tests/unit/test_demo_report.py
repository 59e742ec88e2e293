import io

from rich.console import Console

from shoal.cli.demo_report import Answer, print_blocks, print_bytes, print_times
from shoal.model_files import open_model
from shoal.pb.v1 import shoal_pb2
from shoal.types import DType

SHAPE = open_model().config.shape


def answer(visibility: str, **changes: int) -> Answer:
    """A long request whose counts are right unless changed; numbers as wide as they may get."""
    complete = shoal_pb2.GenerateComplete(prompt_tokens=8000, completion_tokens=100, visibility=visibility)
    made = Answer(complete, SHAPE, DType.FLOAT32)
    sent = complete.transfer
    sent.payload_bytes = sent.plan_bytes = made.formula_bytes
    sent.full_depth_bytes = made.full_bytes
    complete.decode_kv.layer_tokens = made.formula_layer_tokens
    complete.decode_kv.bytes = made.formula_layer_tokens * SHAPE.kv_elements * 4
    for name in ("ttft_ms", "tokenize_ms", "reserve_ms", "prefill_ms", "transfer_ms", "first_step_ms", "tpot_ms"):
        setattr(complete.timings, name, 9999.9 if name in ("ttft_ms", "prefill_ms") else 999.9)
    sent.payload_bytes += changes.get("extra_bytes", 0)
    complete.decode_kv.layer_tokens += changes.get("extra_tokens", 0)
    return made


def shown(*answers: Answer) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_times(console, answers)
    print_bytes(console, answers)
    print_blocks(console, [shoal_pb2.WorkerLoad(worker_id="prefill-0", num_total_blocks=21845, resident_bytes=1 << 34)])
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_right_counts_have_no_differences_and_figures_fit_80_columns() -> None:
    answers = [answer(text) for text in ("full:boundary=1", "speed:22:boundary=4", "pop:20:late:boundary=1")]
    assert not any(one.differences() for one in answers)
    text = shown(*answers)
    assert "…" not in text and "≠" not in text and "\x1b" not in text
    for one in answers:
        for number in (one.formula_bytes, one.full_bytes, one.formula_layer_tokens, one.complete.decode_kv.bytes):
            assert f"{number:,}" in text
    assert "pop:20:late" in text and "10,000" in text


def test_wrong_counts_are_named() -> None:
    wrong = answer("speed:22:boundary=4", extra_bytes=1, extra_tokens=2)
    assert [words.split(":")[-2].strip() for words in wrong.differences()] == ["bytes on the wire", "KV layer-tokens held"]
    assert "≠" in shown(wrong)
