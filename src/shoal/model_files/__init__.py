"""Where a model lives on disk and what its files say: configuration, tokenizer, licence. No torch."""

from shoal.model_files.adapter import AdapterFiles, LowRank
from shoal.model_files.catalogue import DEFAULT_MODEL, KnownModel, known_models
from shoal.model_files.config import DecoderConfig
from shoal.model_files.families import ARCHITECTURES, FAMILIES, Activation, Family
from shoal.model_files.image_header import ImageHeader, read_image_header
from shoal.model_files.model import ModelFiles, open_model
from shoal.model_files.parts import NORMS, Part
from shoal.model_files.prompts import ChatTemplate, Prompt, PromptEncoder
from shoal.model_files.random_model import write_random_model
from shoal.model_files.rope import RopeConfig, RopeKind
from shoal.model_files.tensors import FileFormat, TensorInfo
from shoal.model_files.tokenizer import Tokenizer, load_tokenizer
from shoal.model_files.vision import VisionConfig, check_images

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_MODEL",
    "FAMILIES",
    "NORMS",
    "Activation",
    "AdapterFiles",
    "ChatTemplate",
    "DecoderConfig",
    "Family",
    "FileFormat",
    "ImageHeader",
    "KnownModel",
    "LowRank",
    "ModelFiles",
    "Part",
    "Prompt",
    "PromptEncoder",
    "RopeConfig",
    "RopeKind",
    "TensorInfo",
    "Tokenizer",
    "VisionConfig",
    "check_images",
    "known_models",
    "load_tokenizer",
    "open_model",
    "read_image_header",
    "write_random_model",
]
