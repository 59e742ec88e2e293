"""Tiny models that see images, pictures, prompts with them, and transformers' own image processors."""

import io
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from shoal.engine.local import LocalEngine, LocalRequest
from shoal.engine.vision import VisionEncoder
from shoal.engine.vision.tower import VisionTower
from shoal.model_files import ModelFiles, VisionConfig
from shoal.types import DType, PromptImage
from tests import engine_support as support
from tests.oracle.image_oracle import ImageOracle

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3-images": {"architecture": "gemma3", "num_layers": 7, "sliding_window": support.WINDOW},
    "qwen3-vl-images": {"architecture": "qwen3_vl", "num_layers": 5},
}
support.OTHERS |= VARIANTS


@cache
def picture(seed: int, width: int = 40, height: int = 24, form: str = "PNG", **options: Any) -> bytes:
    """Noise, so that every pixel matters."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


PICTURES = (picture(1), picture(2, 17, 60), picture(3, 90, 30))


def vision(variant: str) -> VisionConfig:
    config = support.model_files(variant).vision
    assert config is not None
    return config


@cache
def encoder(variant: str) -> VisionEncoder:
    return VisionEncoder(VisionTower.load(support.model_files(variant), DType.FLOAT32))


def engine(variant: str, backend: str = "auto", **options: Any) -> LocalEngine:
    return support.engine(support.decoder(variant, backend=backend), vision=encoder(variant), **options)


def prompt(variant: str, pattern: str, seed: int = 0) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Ids and images of a pattern: a digit is so many tokens of text, a letter the picture of that place in the alphabet."""
    config, ids = vision(variant), list[int]()
    for at, mark in enumerate(pattern):
        ids += support.prompt(int(mark) + 6, 10 * seed + at)[6:] if mark.isdigit() else [config.placeholder_id]
    ids = [token if token in (config.placeholder_id,) or token > 5 else token + 6 for token in ids]
    pictures = [PICTURES[ord(mark) - ord("a")] for mark in pattern if mark.isalpha()]
    expanded = config.expand_ids(ids, pictures, lambda text: [7, 8, 9][: len(text)])
    return expanded, config.place(expanded, pictures)


def greedy(variant: str, pattern: str, visibility: str, max_tokens: int = 4, seed: int = 0, **sampling: Any) -> LocalRequest:
    ids, images = prompt(variant, pattern, seed)
    return replace(support.greedy(ids, visibility, max_tokens, **sampling), images=images)


def oracle(variant: str, pattern: str) -> ImageOracle:
    """For prompts with these pictures, seen by the image processor that transformers takes for the folder."""
    pictures = [PICTURES[ord(mark) - ord("a")] for mark in pattern if mark.isalpha()]
    return ImageOracle(text_half(variant), vision(variant).image_token_id, inputs(support.model_files(variant), pictures))


def text_half(variant: str) -> support.TextHalf:
    half = support.reference(variant)
    assert isinstance(half, support.TextHalf)
    return half


def inputs(model: ModelFiles, pictures: list[bytes]) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of the files, which it opens itself."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model.path, backend="pil")
    found = processor(images=[Image.open(io.BytesIO(data)).convert("RGB") for data in pictures], return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_grid_thw") if name in found}
