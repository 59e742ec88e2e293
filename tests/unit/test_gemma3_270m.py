"""Gemma 3 270M from its package, where that is installed: the tokenizer and every visibility against transformers' own model.

Not part of the default install nor of CI: the weights are under the Gemma terms, not under a permissive licence.
"""

from pathlib import Path

import pytest

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.model_files import ModelFiles, known_models, load_tokenizer, open_model
from shoal.types import DType
from tests import engine_support as support
from tests.oracle.mask_oracle import Case, MaskOracle
from tests.unit.test_engine_oracle import assert_equals_oracle

KNOWN = next(known for known in known_models() if known.name == "gemma3-270m")
pytestmark = pytest.mark.skipif(not KNOWN.installed, reason=f"not installed ({KNOWN.license}): {KNOWN.install_command}")
ROOT = Path(__file__).parents[2]
TEXTS = ["The capital of France is", "Füße  漢字 🐟\n\n  x\u0006", "<start_of_turn>user\nhi<end_of_turn>\n", "a" * 50, " ", ""]
CASES = [Case("full", boundary=4), Case("speed", 12, anchors=1, boundary=2), Case("pop", 12), Case("pop", 15, late=True)]


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    return open_model("gemma3-270m")


def test_the_file_says_what_it_is(model: ModelFiles) -> None:
    config = model.config
    assert (config.architecture, model.license, config.num_parameters) == ("gemma3_text", KNOWN.license, KNOWN.num_parameters)
    assert config.shape.windows == ((512,) * 5 + (None,)) * 3 and (config.shape.num_kv_heads, config.shape.head_dim) == (1, 256)
    assert config.eos_token_ids == (1, 106) and config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)


def test_the_tokenizer_is_transformers(model: ModelFiles) -> None:
    from transformers import AutoTokenizer

    own, other = load_tokenizer(model), AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
    for text in [*TEXTS, (ROOT / "docs" / "visibility.md").read_text()]:
        ids = own.encode(text)
        assert ids == other.encode(text)
        assert own.decode(ids) == text or "<start_of_turn>" in text
        assert b"".join(own.token_bytes(token_id) for token_id in ids[1:]) == text.encode()


def test_every_visibility_equals_transformers(model: ModelFiles) -> None:
    from tests.oracle.gguf_gemma3 import load_gguf_gemma3

    prompt = load_tokenizer(model).encode(
        "Paris is the capital of France. Madrid is the capital of Spain. The capital of Japan is"
    )
    decoder, _ = Decoder.load(model, dtype=DType.FLOAT32, held=HeldLayers.everything(18))
    engine, oracle = support.engine(decoder, block_size=16), MaskOracle(load_gguf_gemma3(model.path))
    requests = [support.greedy(prompt, case.text, 4) for case in CASES]
    for case, result in zip(CASES, engine.generate(requests), strict=True):
        assert_equals_oracle(result, oracle.greedy(prompt, case, 4), tolerance=1e-3)
