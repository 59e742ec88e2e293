"""A LoRA adapter on disk, in PEFT's format: what it changes, for which model, under which visibility. Reads no weights.

A folder: `adapter_config.json` and `adapter_model.safetensors` as PEFT writes them, and `shoal.json`, which says what PEFT
has no words for: the base model's revision, the visibility it was tuned under, and how (docs/tuning.md).
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal.errors import InvalidConfig, InvalidRequest, Mismatch
from shoal.model_files.config import DecoderConfig
from shoal.model_files.parts import Part
from shoal.model_files.safetensors_files import read_header, read_json
from shoal.model_files.tensors import FileFormat, TensorInfo, part_shape, tensor_name
from shoal.visibility import Visibility

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_NOTES = "adapter_config.json", "adapter_model.safetensors", "shoal.json"
ADAPTED_PARTS: Final = (Part.Q, Part.K, Part.V, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN)
_MAX_ALPHA: Final = 1e6
_KEY = re.compile(r"base_model\.model\.(model\.layers\.(0|[1-9][0-9]{0,5})\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")
_PLAIN: Final[dict[str, Any]] = {  # what PEFT can ask for besides and this decoder does not do → the value that means "not"
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "alpha_pattern": {},
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one weight W [out, in]: scale · B · A."""

    a: TensorInfo  # [r, in]
    b: TensorInfo  # [out, r]
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose files are complete and fit the model it was opened for."""

    path: Path
    digest: str  # 16 hex digits of the weights and what scales them; equal adapters, wherever they lie, are equal
    revision: str  # of the base model; "" when the files do not say
    visibility: Visibility | None  # without a boundary; None when the files do not say
    low_rank: Mapping[tuple[Part, int], LowRank] = field(repr=False, hash=False)

    def check_visibilities(self, allowed: Iterable[Visibility], num_layers: int) -> None:
        """Refuse to serve the adapter under a visibility that it was not tuned for: Mismatch. Boundaries do not count."""
        if self.visibility is None:
            raise Mismatch(
                f"adapter {self.path} does not say which visibility it was tuned under; add --adapter-any-visibility to "
                "serve it all the same"
            )
        others = [visibility for visibility in allowed if visibility.resolve(num_layers).policy != self.visibility]
        if others:
            raise Mismatch(
                f"adapter {self.path} was tuned under {self.visibility}, and {', '.join(map(str, others))} would be served with "
                f"it; serve --visibilities {self.visibility} alone, or add --adapter-any-visibility"
            )


def open_adapter(path: str, config: DecoderConfig, revision: str) -> AdapterFiles:
    """Open an adapter for the model of this configuration and revision; reads its files' headers and hashes their bytes.

    Raises InvalidConfig when it is missing, damaged or asks for what is not plain LoRA, Mismatch when it is for another model.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InvalidConfig(f"adapter {path!r} is not a folder; `shoal tune` writes one with {ADAPTER_CONFIG} in it")
    told, notes_path = read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_NOTES
    notes = read_json(notes_path) if notes_path.is_file() else {}
    base = str(notes.get("base_revision", ""))
    if base and base != revision:
        raise Mismatch(
            f"adapter {folder} was tuned for model revision {base} ({notes.get('base_model', 'unnamed')}), and this model is "
            f"{revision}; use the model it was made for, or tune one for this model"
        )
    _refuse_what_is_not_plain(folder, told)
    weights = folder / ADAPTER_WEIGHTS
    low_rank = _pair(folder, told, read_header(weights), config)
    return AdapterFiles(folder, _digest(weights, low_rank), base, _visibility(folder, notes, config), low_rank)


def adapter_tensor_name(part: Part, layer: int, matrix: str) -> str:
    """What PEFT calls matrix "A" or "B" of a weight of a causal language model."""
    return f"base_model.model.{tensor_name(FileFormat.HF, part, layer).removesuffix('.weight')}.lora_{matrix}.weight"


def _refuse_what_is_not_plain(folder: Path, told: Mapping[str, object]) -> None:
    if told.get("peft_type") != "LORA":
        raise InvalidConfig(f"adapter {folder} is of type {told.get('peft_type')!r}; supported: LORA")
    for name, plain in _PLAIN.items():
        if (value := told.get(name)) not in (plain, None, [], {}):
            raise InvalidConfig(f"adapter {folder}: {name} is {value!r}; only plain LoRA is supported ({name}: {plain!r})")


def _pair(folder: Path, told: Mapping[str, object], tensors: Mapping[str, TensorInfo], config: DecoderConfig) -> dict[
    tuple[Part, int], LowRank
]:  # fmt: skip
    """A and B of every changed weight. Raises InvalidConfig for a tensor it has no place for."""
    alpha, has_root = told.get("lora_alpha"), told.get("use_rslora", False)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
        raise InvalidConfig(f"adapter {folder}: lora_alpha is {str(alpha)[:40]!r}; it must be a number of at most {_MAX_ALPHA:g}")
    if not isinstance(has_root, bool):
        raise InvalidConfig(f"adapter {folder}: use_rslora is {has_root!r}; it must be true or false")
    names = {tensor_name(FileFormat.HF, part, 0).split(".")[-2]: part for part in ADAPTED_PARTS}
    found: dict[tuple[Part, int], dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or match[3] not in names or len(info.shape) != 2:
            raise InvalidConfig(f"adapter {folder} holds {name}, for which a {config.architecture} decoder has no place")
        found.setdefault((names[match[3]], int(match[2])), {})[match[4]] = info
    if not found:
        raise InvalidConfig(f"adapter {folder} changes no weight: {ADAPTER_WEIGHTS} is empty")
    pairs: dict[tuple[Part, int], LowRank] = {}
    for (part, layer), pair in found.items():
        what = f"adapter {folder}: {part} of layer {layer}"
        if pair.keys() != {"A", "B"}:
            raise InvalidConfig(f"{what} has lora_{next(iter(pair))} alone; fetch the file again")
        a, b = pair["A"], pair["B"]
        if layer >= config.shape.num_layers:
            raise Mismatch(f"{what} is beyond the model's {config.shape.num_layers} layers: it is for another model")
        wanted = part_shape(config, part)
        if (b.shape[0], a.shape[1]) != wanted or a.shape[0] != b.shape[1]:
            raise Mismatch(f"{what}: {list(b.shape)} by {list(a.shape)} do not make {list(wanted)}: it is for another model")
        rank = max(1, a.shape[0])
        pairs[part, layer] = LowRank(a, b, float(alpha) / (math.sqrt(rank) if has_root else rank))
    return pairs


def _visibility(folder: Path, notes: Mapping[str, object], config: DecoderConfig) -> Visibility | None:
    text = notes.get("visibility")
    if text is None:
        return None
    try:
        return Visibility.parse(str(text)).resolve(config.shape.num_layers).policy
    except InvalidRequest as error:
        raise InvalidConfig(f"adapter {folder}: {ADAPTER_NOTES}: {error}") from None


def _digest(weights: Path, low_rank: Mapping[tuple[Part, int], LowRank]) -> str:
    digest = hashlib.sha256()
    with weights.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    for (part, layer), pair in sorted(low_rank.items()):
        digest.update(f"\n{part} {layer} {pair.scale!r}".encode())
    return digest.hexdigest()[:16]
