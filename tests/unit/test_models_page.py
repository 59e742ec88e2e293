"""docs/models.md names every family that the code knows, the error for one that it does not, and Gemma's terms."""

import re
from pathlib import Path

import pytest

from shoal.errors import InvalidConfig
from shoal.model_files import ARCHITECTURES, FAMILIES, known_models, open_model
from shoal.model_files.hf_config import TEXT_PARTS
from tests import engine_support as support

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


def test_the_table_has_every_family() -> None:
    table = PAGE.partition("<!-- families -->")[2].partition("\nOf Gemma 3")[0]
    _, *rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", table, re.MULTILINE)
    assert rows == [(name, own.title, f"`{own.gguf}`" if own.gguf else "–") for name, own in FAMILIES.items()]


def test_every_family_is_held_to_transformers() -> None:
    names = {options.get("architecture", "llama") for options in support.VARIANTS.values()}
    tried = {TEXT_PARTS.get(name, name) for name in names}
    assert tried == set(ARCHITECTURES)
    assert all(f"| {variant} | torch |" in PAGE for variant in support.VARIANTS)


def test_an_unknown_family_is_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    with pytest.raises(InvalidConfig) as refused:
        open_model(str(tmp_path))
    assert str(refused.value).partition("config.json: ")[2] in PAGE


def test_terms_that_are_not_permissive_are_named() -> None:
    for known in known_models():
        assert known.license == "Apache-2.0" or (known.license.partition(",")[0] in PAGE and known.install_command in PAGE)
