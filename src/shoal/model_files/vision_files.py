"""Reads how a Hugging Face folder's model sees images: config.json, the image processor's file, the tokenizer's. No weights."""

from pathlib import Path
from typing import Final

from shoal.errors import InvalidConfig
from shoal.model_files.json_fields import Json, flag, integer, object_of
from shoal.model_files.safetensors_files import read_json
from shoal.model_files.vision import ResizeRule, VisionConfig

VISION_MODELS: Final = ("gemma3", "qwen3_vl")  # config.json's model_type
_MAX_TOKENS: Final = 1 << 20  # of one image
_PROCESSORS: Final = {"gemma3": "Gemma3", "qwen3_vl": "Qwen2VL"}


def read_vision(folder: Path) -> VisionConfig | None:
    """None for a model of text alone. Raises InvalidConfig that says why images cannot be served, though its text may be."""
    config = read_json(folder / "config.json")
    architecture = config.get("model_type")
    if architecture not in VISION_MODELS:
        return None
    processor = read_processor(folder)
    kind = processor.get("image_processor_type", "")
    if not isinstance(kind, str) or not kind.startswith(_PROCESSORS[str(architecture)]):
        raise InvalidConfig(f"image processor {kind!r} is not supported for {architecture}")
    return _gemma3(folder, config, processor) if architecture == "gemma3" else _qwen3_vl(config, processor)


def read_processor(folder: Path) -> Json:
    """The image processor's settings: a file of its own, or part of processor_config.json. Raises InvalidConfig."""
    if (folder / "processor_config.json").is_file():
        inner = object_of(read_json(folder / "processor_config.json"), "image_processor")
        if inner:
            return inner
    if (folder / "preprocessor_config.json").is_file():
        return read_json(folder / "preprocessor_config.json")
    raise InvalidConfig(f"{folder} has neither preprocessor_config.json nor image_processor in processor_config.json")


def _gemma3(folder: Path, config: Json, processor: Json) -> VisionConfig:
    if flag(processor, "do_pan_and_scan"):
        raise InvalidConfig("pan and scan (do_pan_and_scan) is not supported")
    size, side = object_of(processor, "size"), integer(object_of(config, "vision_config"), "image_size", 224)
    if (integer(size, "height", side), integer(size, "width", side)) != (side, side):
        raise InvalidConfig(f"the image processor's size {dict(size)} is not the vision tower's, {side} × {side}")
    tokens = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    begin, end = _text(tokens, "boi_token", "<start_of_image>"), _text(tokens, "eoi_token", "<end_of_image>")
    num_tokens = integer(config, "mm_tokens_per_image", 256)
    if not 0 < num_tokens <= _MAX_TOKENS:
        raise InvalidConfig(f"mm_tokens_per_image {num_tokens} cannot be")
    return VisionConfig(
        architecture="gemma3",
        image_token_id=integer(config, "image_token_index" if "image_token_index" in config else "image_token_id", 262_144),
        image_token=_text(tokens, "image_token", "<image_soft_token>"),
        placeholder_id=integer(config, "boi_token_index", 255_999),
        placeholder=begin,
        before=f"\n\n{begin}",
        after=f"{end}\n\n",
        num_fixed_tokens=num_tokens,
        is_bidirectional=True,
    )


def _qwen3_vl(config: Json, processor: Json) -> VisionConfig:
    vision = object_of(config, "vision_config")
    patch, merge = integer(vision, "patch_size", 16), integer(vision, "spatial_merge_size", 2)
    for name, own in (("patch_size", patch), ("merge_size", merge)):
        if integer(processor, name, own) != own:
            raise InvalidConfig(f"the image processor's {name} {processor.get(name)} is not the vision tower's, {own}")
    size = object_of(processor, "size")
    least = integer(processor, "min_pixels", integer(size, "shortest_edge", 56 * 56))
    most = integer(processor, "max_pixels", integer(size, "longest_edge", 28 * 28 * 1280))
    if min(patch, merge) < 1 or not 0 < least <= most or most > _MAX_TOKENS * (patch * merge) ** 2:
        raise InvalidConfig(f"images of {least} to {most} pixels in patches of {patch} × {merge} cannot be")
    layers = vision.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(layers, list | tuple):
        raise InvalidConfig(f"deepstack_visual_indexes {layers!r} should be a list")
    token_id = integer(config, "image_token_id", 151_655)
    return VisionConfig(
        architecture="qwen3_vl",
        image_token_id=token_id,
        image_token="<|image_pad|>",
        placeholder_id=token_id,
        placeholder="<|image_pad|>",
        before="",
        after="",
        resize=ResizeRule(patch * merge, least, most),
        num_deep_layers=len(layers),
    )


def _text(tokens: Json, name: str, default: str) -> str:
    value = tokens.get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else default
