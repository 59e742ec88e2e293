"""docs/visibility.md: its drawing, tables, forms and thresholds are what the code computes."""

import re
from pathlib import Path

import pytest

from shoal.placement.arithmetic import (
    decode_kv_layer_tokens,
    full_depth_wire_bytes,
    kv_bytes,
    late_ships_less,
    saved_share,
    wire_bytes,
)
from shoal.placement.cost import request_cost
from shoal.placement.tables import KvLayout
from shoal.types import DType, ModelShape
from shoal.visibility import Visibility, VisibilityKind

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "visibility.md").read_text()
SMOLLM2 = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192)
LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072)
EXAMPLES = {
    "smollm2": (SMOLLM2, 513, 64, ("full", "speed:22", "speed:22:anchors=4:boundary=8", "pop:20", "pop:20:late")),
    "llama": (LLAMA_8B, 8193, 256, ("full", "speed:24", "speed:16", "pop:22", "pop:22:late")),
}


def table(shape: ModelShape, num_prompt: int, generated: int, texts: tuple[str, ...]) -> str:
    lines = [
        "| visibility | bytes on the wire | at full depth | saved | decode KV, layer-tokens | decode KV, bytes | "
        "prefill, token-layers | decode, token-layers |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for text in texts:
        visibility = Visibility.parse(text).resolve(shape.num_layers)
        transfer = (shape, DType.BFLOAT16, visibility, num_prompt)
        held = decode_kv_layer_tokens(shape, visibility, num_prompt, generated)
        held_bytes = kv_bytes(shape, DType.BFLOAT16, held)
        cost = request_cost(shape, visibility, num_prompt, generated)
        lines.append(
            f"| `{text}` | {wire_bytes(*transfer):,} | {full_depth_wire_bytes(*transfer):,} | {saved_share(*transfer):.1%} | "
            f"{held:,} | {held_bytes:,} | {cost.prefill.token_layers:,} | {cost.decode.token_layers:,} |"
        )
    return "\n".join(lines)


def drawing() -> str:
    lines = [" " * 22 + "prefill tokens    boundary  generated", " " * 20 + "x0 x1 x2 x3 x4 x5    x6 x7     g0 g1"]
    for text in ("full:boundary=2", "speed:4:boundary=2", "pop:4:boundary=2"):
        layout = KvLayout.of(6, Visibility.parse(text).resolve(6), 8)
        lines.append(text)
        for layer in reversed(range(6)):
            marks = [mark(layout, layer, position) for position in range(10)]
            lines.append(
                f"        layer {layer}      {'  '.join(marks[:6])}     {'  '.join(marks[6:8])}      {'  '.join(marks[8:])}"
            )
    return "\n".join(lines)


def mark(layout: KvLayout, layer: int, position: int) -> str:
    if layer in layout.lower_layers or not layout.split.num_anchor_tokens <= position < layout.split.num_prefill_tokens:
        return "■"
    return "▫" if layout.visibility.kind is VisibilityKind.POP else "·"


@pytest.mark.parametrize("name", EXAMPLES)
def test_tables_are_computed(name: str) -> None:
    expected = table(*EXAMPLES[name])
    assert f"<!-- table: {name} -->\n\n{expected}\n" in PAGE, f"the page's table must read:\n{expected}"


def test_the_drawing_is_the_layout() -> None:
    assert f"<!-- drawing -->\n```\n{drawing()}\n```" in PAGE, f"the drawing must read:\n{drawing()}"


@pytest.mark.parametrize(("name", "shape"), [("smollm2", SMOLLM2), ("llama", LLAMA_8B)])
def test_where_late_projection_pays(name: str, shape: ModelShape) -> None:
    from_layers = next(n for n in range(1, shape.num_layers) if late_ships_less(shape, DType.BFLOAT16, shape.num_layers - n))
    found = re.search(rf"(\d+)<!-- late: {name} -->", PAGE)
    assert found and int(found.group(1)) == from_layers


def test_every_text_form_on_the_page_parses() -> None:
    texts = re.findall(r"`((?:full|speed|pop)(?::[0-9a-z=]+)*)`", PAGE)
    texts = [text for text in texts if text not in ("speed", "pop")]
    assert len(set(texts)) >= 10
    for text in texts:
        assert str(Visibility.parse(text)) == text
