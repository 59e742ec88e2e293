"""Grouped heads of every ratio, tied and untied, small and large heads: against the mask-level program, on each back end."""

from typing import Any

import pytest

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.model_files import open_model, write_random_model
from shoal.types import DType
from tests import engine_support as support
from tests.folders import temporary_folder
from tests.oracle.mask_oracle import Case, MaskOracle
from tests.unit.test_engine_oracle import assert_equals_oracle

SHAPES: dict[str, dict[str, Any]] = {
    "1 of 1": {"num_heads": 1, "num_kv_heads": 1, "tied_embeddings": True},
    "4 of 4": {"architecture": "qwen2", "num_heads": 4, "num_kv_heads": 4},
    "6 of 3": {"architecture": "qwen3", "num_heads": 6, "num_kv_heads": 3, "tied_embeddings": True},
    "6 of 2": {"num_heads": 6, "num_kv_heads": 2, "hidden_size": 96},
    "5 of 1": {"architecture": "mistral", "num_heads": 5, "num_kv_heads": 1, "tied_embeddings": True},
    "16 of 1": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 8},
    "4 of 1, heads of 256": {"architecture": "gemma3_text", "num_heads": 4, "num_kv_heads": 1, "head_dim": 256},
    "2 of 1, heads of 160, untied": {"architecture": "gemma2", "num_kv_heads": 1, "head_dim": 160, "tied_embeddings": False},
}
CASES = [Case("full"), Case("speed", 1, anchors=2, boundary=2), Case("pop", 1, boundary=3), Case("pop", 2, late=True)]


@pytest.mark.parametrize("backend", support.BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_ratio(name: str, backend: str) -> None:
    options = {"vocab_size": 300, "num_layers": 3, "num_heads": 2, "sliding_window": None} | SHAPES[name]
    if options.get("architecture", "").startswith("gemma"):
        options["sliding_window"] = support.WINDOW
    model = open_model(str(write_random_model(temporary_folder(), **options)))
    decoder, _ = Decoder.load(model, dtype=DType.FLOAT32, held=HeldLayers.everything(3), backend=backend)
    assert decoder.backend.name == backend
    oracle = MaskOracle(support.transformers_model(model.path))
    requests = [support.greedy(support.prompt(11, seed), case.text, 2) for seed, case in enumerate(CASES)]
    for case, request, result in zip(CASES, requests, support.engine(decoder).generate(requests), strict=True):
        assert_equals_oracle(result, oracle.greedy(list(request.prompt_ids), case, 2))
