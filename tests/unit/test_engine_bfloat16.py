"""bfloat16 against float32 on the real model and natural text: agreement and KL are measured, printed and bounded (design §2)."""

import json
from pathlib import Path

import pytest
import torch

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import LogitRows, RequestKv, anchor_segment, decode_segment, prefill_segments
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support

PROMPT = json.loads((Path(__file__).parents[1] / "data/smollm2_visibility.json").read_text())["prompts"]["summary"][:160]
NUM_SCORED = 64


def boundary_scores(decoder: Decoder, dtype: DType, text: str) -> torch.Tensor:
    """Log-probabilities after each of the last 64 prompt tokens, run as decode tokens."""
    visibility = Visibility.parse(f"{text}:boundary={NUM_SCORED}")
    layout = KvLayout.of(decoder.config.shape.num_layers, visibility, len(PROMPT))
    pool = KvPool(decoder.config.shape, 400, 16, dtype)
    tables = RequestTables(BlockPool(400), 16, layout)
    tables.reserve(len(PROMPT), layout.num_upper_slots(len(PROMPT)))
    kv, split = RequestKv.of(tables), len(PROMPT) - NUM_SCORED
    forward = decoder.forward(prefill_segments(kv, PROMPT[:split], range(split)), pool).run()
    ahead = [anchor_segment(kv, states, range(len(states))) for states in forward.states.values()]
    scored = decode_segment(kv, PROMPT[split:], range(split, len(PROMPT)), LogitRows.ALL)
    return decoder.forward([*ahead, scored], pool).run().logits.log_softmax(-1)


@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("text", ["full", "speed:22", "pop:20"])
def test_agreement_with_float32(text: str, backend: str) -> None:
    exact = boundary_scores(support.smollm2(backend="torch"), DType.FLOAT32, text)
    rough = boundary_scores(support.smollm2(DType.BFLOAT16, backend), DType.BFLOAT16, text)
    agreement = (exact.argmax(-1) == rough.argmax(-1)).double().mean().item()
    kl = (exact.exp() * (exact - rough)).sum(-1)
    print(
        f"{text} {backend}: top-1 agreement {agreement:.3f} over {NUM_SCORED} tokens,"
        f" KL mean {kl.mean():.5f} max {kl.max():.5f} nats"
    )
    assert agreement > 0.9 and kl.mean() < 0.02


def test_a_whole_answer_in_bfloat16() -> None:
    """The continuous batch runs in bfloat16 from end to end, and answers the easy question."""
    case = json.loads((Path(__file__).parents[1] / "data/smollm2_visibility.json").read_text())
    question, answer = case["prompts"]["capital"], case["cases"][0]["output_ids"]
    decoder = support.smollm2(DType.BFLOAT16)
    engine = support.engine(decoder, num_blocks=1000, block_size=16, dtype=DType.BFLOAT16, token_budget=64)
    requests = [support.greedy(question, text, 8, ignore_eos=False) for text in ("full", "speed:24", "pop:25", "pop:25:late")]
    assert [list(result.token_ids) for result in engine.generate(requests)] == [answer] * 4
    assert engine.blocks.num_used == 0
