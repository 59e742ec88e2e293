"""The vision tower and what projects its output into the decoder, by transformers' own modules and image processors.

Knows pixels and weights; knows no prompts. Tensors are read from the model's own safetensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from shoal.engine.dtypes import torch_dtype
from shoal.engine.vision.pictures import read_picture
from shoal.engine.vision.prompt_images import ImageFeatures
from shoal.errors import Cancelled, InvalidConfig, Unsupported
from shoal.model_files import ModelFiles, VisionConfig
from shoal.model_files.vision_files import read_processor
from shoal.types import DType

_EXTRA = "install shoal[vision]"
_PREFIXES = ("model.", "vision_tower.", "visual.", "vision_model.")  # what the tower's names may begin with, in this order
_PROJECTOR = "multi_modal_projector."


def missing_library() -> str:
    """Why images cannot be served in this process; "" when they can."""
    try:
        import PIL
        import transformers
    except ImportError as error:
        return f"images need Pillow and transformers ({error}); {_EXTRA}"
    del PIL, transformers
    return ""


@dataclass(slots=True)
class _Interest:
    """Whether anybody still waits for the image at hand; asked before each block of the tower."""

    is_wanted: Callable[[], bool] = lambda: True

    def check(self, *_: object) -> None:
        """Raises Cancelled. A forward hook."""
        if not self.is_wanted():
            raise Cancelled("nobody waits for this image any more")


@dataclass(frozen=True, slots=True)
class VisionTower:
    """One model's tower. Not thread-safe; one image at a time."""

    config: VisionConfig
    tower: Any
    projector: Any | None  # Gemma 3's; Qwen's is part of the tower
    processor: Any
    dtype: torch.dtype
    device: torch.device
    interest: _Interest

    @classmethod
    def load(cls, model: ModelFiles, dtype: DType, device: torch.device | str = "cpu") -> Self:
        """Raises Unsupported where the model sees no images or libraries are missing, InvalidConfig for unusable files."""
        if model.vision is None:
            raise Unsupported(f"model {model.name} sees no images")
        if reason := missing_library():
            raise Unsupported(reason)
        from transformers import AutoConfig, AutoModel
        from transformers.initialization import no_init_weights

        try:
            config = AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
            with no_init_weights():
                tower = AutoModel.from_config(config.vision_config)
                projector = _projector(config) if model.vision.architecture == "gemma3" else None
            processor = _processor(model)
        except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
            raise InvalidConfig(f"the vision tower of {model.path} cannot be made: {error!s:.300}") from error
        _fill(model, tower, projector)
        own = torch_dtype(dtype)
        modules = [None if part is None else part.to(device, own).eval().requires_grad_(False) for part in (tower, projector)]
        interest = _Interest()
        for blocks in (module for module in tower.modules() if isinstance(module, torch.nn.ModuleList)):
            for block in blocks:
                block.register_forward_pre_hook(interest.check)
        return cls(model.vision, modules[0], modules[1], processor, own, torch.device(device), interest)

    @torch.inference_mode()
    def encode(self, data: bytes, is_wanted: Callable[[], bool] = lambda: True) -> ImageFeatures:
        """Decode and see one image file. Raises InvalidRequest for one that is damaged, Cancelled soon after nobody wants it."""
        self.interest.is_wanted = is_wanted
        self.interest.check()
        inputs = self.processor(images=[read_picture(data)], return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.device, self.dtype)
        if self.projector is not None:
            return ImageFeatures(self.projector(self.tower(pixel_values=pixels).last_hidden_state)[0])
        seen = self.tower(pixels, grid_thw=inputs["image_grid_thw"].to(self.device))
        return ImageFeatures(seen.pooler_output, tuple(seen.deepstack_features))


def _projector(config: Any) -> Any:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    return Gemma3MultiModalProjector(config)


def _processor(model: ModelFiles) -> Any:
    """The Pillow one, whose arithmetic does not depend on what else is installed."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    is_gemma = model.vision is not None and model.vision.architecture == "gemma3"
    return (Gemma3ImageProcessorPil if is_gemma else Qwen2VLImageProcessorPil).from_dict(dict(read_processor(model.path)))


def _fill(model: ModelFiles, tower: Any, projector: Any | None) -> None:
    """Read every weight. Raises InvalidConfig that names what is missing or has no place."""
    from safetensors import SafetensorError, safe_open

    state: dict[str, torch.Tensor] = {}
    for path in sorted({info.path for info in model.vision_tensors.values()}):
        try:
            with safe_open(path, "pt") as file:
                for name, info in model.vision_tensors.items():
                    if info.path == path:
                        state[_own_name(name)] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InvalidConfig(f"cannot read {path}: {error}") from error
    parts = {"": tower} if projector is None else {"": tower, _PROJECTOR: projector}
    for prefix, module in parts.items():
        own = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(_PROJECTOR) == (prefix == _PROJECTOR)
        }
        try:
            module.load_state_dict(own, strict=True)
        except RuntimeError as error:
            raise InvalidConfig(f"{model.path}: the vision tower's tensors do not fit: {error!s:.300}") from error


def _own_name(name: str) -> str:
    """A tensor's name within the tower, or below _PROJECTOR."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
