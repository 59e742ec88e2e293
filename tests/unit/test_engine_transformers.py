"""At full depth the engine is transformers' model: its own masks, its own rotary embedding, every position's scores."""

import pytest
import torch
from transformers import PreTrainedModel

from shoal.engine.decoder import Decoder
from shoal.engine.kv_pool import KvPool
from shoal.engine.segment import LogitRows, RequestKv, decode_segment
from shoal.model_files import open_model
from shoal.placement.blocks import BlockPool
from shoal.placement.tables import KvLayout, RequestTables
from shoal.types import DType
from shoal.visibility import Visibility
from tests import engine_support as support
from tests.oracle.gguf_llama import load_gguf_llama


def full_depth_logits(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    """Scores of every prompt token: `full` with b = N."""
    shape, length = decoder.config.shape, len(token_ids)
    layout = KvLayout.of(shape.num_layers, Visibility.parse(f"full:boundary={length}"), length)
    pool = KvPool(shape, 200, 64, DType.FLOAT32)
    tables = RequestTables(BlockPool(200), 64, layout)
    tables.reserve(length, 0)
    segment = decode_segment(RequestKv.of(tables), token_ids, range(length), LogitRows.ALL)
    return decoder.forward([segment], pool).run().logits


def assert_equals(decoder: Decoder, model: PreTrainedModel, token_ids: list[int], tolerance: float) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    own = full_depth_logits(decoder, token_ids).log_softmax(-1)
    assert own.dtype == torch.float32 and own.shape == expected.shape
    assert (own - expected).abs().max() < tolerance


@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("variant", support.VARIANTS)
def test_random_models(variant: str, backend: str) -> None:
    assert_equals(support.decoder(variant, backend=backend), support.reference(variant), list(support.prompt(40)), 2e-4)


@pytest.mark.parametrize("backend", support.BACKENDS)
def test_embedded_default_model(backend: str) -> None:
    model = load_gguf_llama(open_model("smollm2-135m").path)
    assert_equals(support.smollm2(backend=backend), model, list(support.prompt(24, vocab_size=40_000)), 1e-3)
