"""The vision half of a random model: a tiny tower as transformers names its tensors, and an image processor's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_HIDDEN, _MLP, _NUM_LAYERS, _PATCH = 32, 48, 3, 4
_SIDE: Final = 32  # pixels; Gemma's tower sees squares
_GEMMA_TOKENS: Final = 16
_POSITIONS: Final = 64  # of Qwen's learned grid, 8 × 8
_DEEP: Final = (0, 1)  # Qwen's layers whose features go into the decoder

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RandomVision:
    """What makes a random model of text one that sees images."""

    outer: Mapping[str, object]  # fields of config.json beside text_config
    processor: Mapping[str, object]  # preprocessor_config.json
    tokens: tuple[str, str, str]  # what begins an image, ends it, and stands for a part of it
    shapes: Shapes

    def config(self, text: Mapping[str, object]) -> dict[str, object]:
        """config.json around the decoder's own."""
        text_type = {"gemma3": "gemma3_text", "qwen3_vl": "qwen3_vl_text"}[str(self.outer["model_type"])]
        same = {name: text[name] for name in ("bos_token_id", "eos_token_id", "dtype", "tie_word_embeddings")}
        return {**self.outer, **same, "text_config": {**text, "model_type": text_type}}


def random_vision(architecture: str, hidden_size: int) -> RandomVision:
    """For a decoder of this width. Its tokens have the ids 3, 4 and 5."""
    mean = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_rescale": True, "rescale_factor": 1 / 255}
    if architecture == "gemma3":
        vision: dict[str, object] = {"model_type": "siglip_vision_model", "image_size": _SIDE, "vision_use_head": False}
        vision |= {"num_hidden_layers": _NUM_LAYERS, "num_attention_heads": 2}
        outer: dict[str, object] = {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": _GEMMA_TOKENS}
        outer |= {"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5}
        processor: dict[str, object] = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": _SIDE, "width": _SIDE}}
        tokens, shapes = ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), _gemma3_shapes(hidden_size)
    else:
        vision = {"model_type": "qwen3_vl_vision", "depth": _NUM_LAYERS, "num_heads": 2, "out_hidden_size": hidden_size}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": _POSITIONS}
        vision |= {"deepstack_visual_indexes": list(_DEEP)}
        outer = {"architectures": ["Qwen3VLForConditionalGeneration"]}
        outer |= {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 299}
        processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": _PATCH, "merge_size": 2}
        processor |= {"temporal_patch_size": 2, "size": {"shortest_edge": 4 * 64, "longest_edge": 24 * 64}}
        tokens, shapes = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"), _qwen3_vl_shapes(hidden_size)
    vision |= {"hidden_size": _HIDDEN, "intermediate_size": _MLP, "patch_size": _PATCH, "hidden_act": "gelu_pytorch_tanh"}
    return RandomVision({"model_type": architecture, **outer, "vision_config": vision}, {**processor, **mean}, tokens, shapes)


def vision_values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Weights of one tensor, so scaled that every part of the tower matters."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name and name.endswith("weight") and len(shape) == 1:
        scaled = 0.1 * noise + (0 if "mm_soft_emb_norm" in name else 1)
    elif len(shape) == 1:
        scaled = 0.2 * noise
    elif "pos" in name:
        scaled = 0.5 * noise
    else:
        scaled = noise / np.sqrt(shape[0] if "mm_input_projection" in name else np.prod(shape[1:]))
    return scaled.astype(np.float32)


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int = _HIDDEN) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _gemma3_shapes(hidden_size: int) -> Shapes:
    tower, projector = "model.vision_tower.vision_model", "model.multi_modal_projector"
    shapes: Shapes = {
        f"{tower}.embeddings.patch_embedding.weight": (_HIDDEN, 3, _PATCH, _PATCH),
        f"{tower}.embeddings.patch_embedding.bias": (_HIDDEN,),
        f"{tower}.embeddings.position_embedding.weight": ((_SIDE // _PATCH) ** 2, _HIDDEN),
    }
    for layer in range(_NUM_LAYERS):
        own = f"{tower}.encoder.layers.{layer}"
        shapes |= _norm(f"{own}.layer_norm1") | _norm(f"{own}.layer_norm2")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{own}.self_attn.{part}", _HIDDEN, _HIDDEN)
        shapes |= _linear(f"{own}.mlp.fc1", _MLP, _HIDDEN) | _linear(f"{own}.mlp.fc2", _HIDDEN, _MLP)
    shapes |= _norm(f"{tower}.post_layernorm")
    shapes |= {f"{projector}.mm_input_projection_weight": (_HIDDEN, hidden_size)}
    return shapes | {f"{projector}.mm_soft_emb_norm.weight": (_HIDDEN,)}


def _qwen3_vl_shapes(hidden_size: int) -> Shapes:
    tower, merged = "model.visual", 4 * _HIDDEN
    shapes: Shapes = {
        f"{tower}.patch_embed.proj.weight": (_HIDDEN, 3, 2, _PATCH, _PATCH),
        f"{tower}.patch_embed.proj.bias": (_HIDDEN,),
        f"{tower}.pos_embed.weight": (_POSITIONS, _HIDDEN),
    }
    for layer in range(_NUM_LAYERS):
        own = f"{tower}.blocks.{layer}"
        shapes |= _norm(f"{own}.norm1") | _norm(f"{own}.norm2")
        shapes |= _linear(f"{own}.attn.qkv", 3 * _HIDDEN, _HIDDEN) | _linear(f"{own}.attn.proj", _HIDDEN, _HIDDEN)
        shapes |= _linear(f"{own}.mlp.linear_fc1", _MLP, _HIDDEN) | _linear(f"{own}.mlp.linear_fc2", _HIDDEN, _MLP)
    mergers = [(f"{tower}.merger", _HIDDEN), *((f"{tower}.deepstack_merger_list.{at}", merged) for at in range(len(_DEEP)))]
    for own, normed in mergers:
        shapes |= _norm(f"{own}.norm", normed)
        shapes |= _linear(f"{own}.linear_fc1", merged, merged) | _linear(f"{own}.linear_fc2", hidden_size, merged)
    return shapes
