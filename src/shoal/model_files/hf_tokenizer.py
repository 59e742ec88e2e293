"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, and beside it the chat template and the named tokens."""

from collections.abc import Mapping
from pathlib import Path

import tokenizers

from shoal.errors import InvalidConfig
from shoal.model_files.safetensors_files import read_json


def read_hf_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """Backend, chat template, BOS and EOS token. Raises InvalidConfig when tokenizer.json is missing or unreadable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidConfig(f"{folder} has no tokenizer.json; export one with transformers' fast tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this very class
        raise InvalidConfig(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    return backend, _chat_template(folder, config), _token(config, "bos_token"), _token(config, "eos_token")


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """A file of its own (transformers 5), or a field: one template or several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token(config: Mapping[str, object], name: str) -> str | None:
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
