"""Tiny models and engines for tests: the same random weights in Shoal's decoder and in transformers."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from shoal.engine.decoder import Decoder, HeldLayers
from shoal.engine.kernels import KernelsUnavailable, kernels
from shoal.engine.kv_pool import KvPool
from shoal.engine.local import LocalEngine, LocalRequest, LocalResult
from shoal.model_files import ModelFiles, open_model, write_random_model
from shoal.types import DType, SamplingParams
from shoal.visibility import Visibility
from tests.folders import temporary_folder

torch.set_num_threads(1)

WINDOW = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_layers": 4},
    "llama3-rope": {"llama3_rope": True, "rope_theta": 100.0},
    "mistral-window": {"architecture": "mistral", "sliding_window": WINDOW},
    "qwen2-bias-mixed-windows": {"architecture": "qwen2", "sliding_window": WINDOW, "num_global_layers": 2},
    "qwen3-qk-norm-tied": {"architecture": "qwen3", "tied_embeddings": True, "num_heads": 6, "head_dim": 8},
    "qwen3-vl": {"architecture": "qwen3_vl"},
    "gemma": {"architecture": "gemma"},
    "gemma2-caps-window": {"architecture": "gemma2", "sliding_window": WINDOW},
    "gemma3-window": {"architecture": "gemma3_text", "sliding_window": WINDOW, "num_layers": 7},
}
OTHERS: dict[str, dict[str, Any]] = {"long": {"num_layers": 2, "max_context": 2048}}  # not compared with transformers


def _missing() -> str:
    try:
        kernels()
    except KernelsUnavailable as error:
        return str(error)
    return ""


NATIVE_MISSING = _missing()  # why the compiled kernels cannot run here
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(bool(NATIVE_MISSING), reason=NATIVE_MISSING))]


@cache
def model_files(variant: str = "llama") -> ModelFiles:
    options = {"vocab_size": 300, **(VARIANTS | OTHERS)[variant]}
    return open_model(str(write_random_model(temporary_folder(), **options)))


@cache
def decoder(variant: str = "llama", dtype: DType = DType.FLOAT32, backend: str = "auto") -> Decoder:
    model = model_files(variant)
    return Decoder.load(model, dtype=dtype, held=HeldLayers.everything(model.config.shape.num_layers), backend=backend)[0]


@cache
def reference(variant: str = "llama") -> PreTrainedModel:
    """The same weights in transformers, eager attention."""
    folder = model_files(variant).path
    return transformers_model(folder if folder.is_dir() else folder.parent)


def transformers_model(folder: Path) -> PreTrainedModel:
    """A folder's weights in transformers, eager attention; of a model that sees images, its text half."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if open_model(str(folder)).vision is not None:
        return TextHalf(AutoModelForImageTextToText.from_pretrained(folder, **options).eval())  # type: ignore[return-value]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval()


class TextHalf:
    """A model that sees images, as far as text goes, with the names of one that does not."""

    def __init__(self, whole: PreTrainedModel) -> None:
        self.whole = whole
        self.model, self.lm_head, self.config = whole.model.language_model, whole.lm_head, whole.config.text_config

    def eval(self) -> "TextHalf":
        return self

    def __call__(self, token_ids: torch.Tensor) -> Any:
        return self.whole(token_ids)


@cache
def smollm2_files() -> ModelFiles:
    return open_model("smollm2-135m")


@cache
def smollm2(dtype: DType = DType.FLOAT32, backend: str = "auto") -> Decoder:
    model = smollm2_files()
    return Decoder.load(model, dtype=dtype, held=HeldLayers.everything(model.config.shape.num_layers), backend=backend)[0]


def engine(of: Decoder, num_blocks: int = 1500, block_size: int = 4, dtype: DType = DType.FLOAT32, **options: Any) -> LocalEngine:
    return LocalEngine(of, KvPool(of.config.shape, num_blocks, block_size, dtype), **options)


def prompt(length: int, seed: int = 0, vocab_size: int = 300) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())


def greedy(ids: Iterable[int], visibility: str, max_tokens: int = 4, replay: Sequence[int] = (), **sampling: Any) -> LocalRequest:
    params = SamplingParams(**({"max_tokens": max_tokens, "num_logprobs": 5, "ignore_eos": True} | sampling))
    return LocalRequest(tuple(ids), Visibility.parse(visibility), params, tuple(replay))


def assert_close(result: LocalResult, expected: LocalResult, tolerance: float = 1e-4) -> None:
    """Equal answers to within rounding: the same tokens and the same best five, scores within `tolerance`."""
    assert result.token_ids == expected.token_ids
    for own, other in zip(result.logprobs, expected.logprobs, strict=True):
        assert abs(own.logprob - other.logprob) < tolerance
        assert all(abs(a[1] - b[1]) < tolerance for a, b in zip(own.top, other.top, strict=True))
