"""Pictures as files, made from a seed, and a text model that believes it sees them: SmolLM2's spare tokens stand for images."""

import io
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from shoal.model_files import VisionConfig, load_tokenizer, open_model
from shoal.model_files.vision import ResizeRule

PLACEHOLDER: Final = "<file_sep>"
FIXED: Final = VisionConfig(  # as Gemma 3 writes images
    architecture="gemma3", image_token_id=6, image_token="<filename>", placeholder_id=5, placeholder=PLACEHOLDER,
    before="\n\n<file_sep>", after="<gh_stars>\n\n", num_fixed_tokens=9, is_bidirectional=True,
)  # fmt: skip
SCALED: Final = VisionConfig(  # as Qwen3-VL does
    architecture="qwen3_vl", image_token_id=5, image_token=PLACEHOLDER, placeholder_id=5, placeholder=PLACEHOLDER,
    before="", after="", resize=ResizeRule(32, 32 * 32, 32 * 32 * 64), num_deep_layers=2,
)  # fmt: skip
TEMPLATE: Final = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for item in message.content %}
{%- if item.type == 'image' %}{{ '<file_sep>' }}{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif -%}
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def picture(width: int = 64, height: int = 48, seed: int = 0, form: str = "PNG", **options: Any) -> bytes:
    """A file of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, form, **options)
    return file.getvalue()


def promised(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises so many pixels."""
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\2\0\0\0" + bytes(32)


def give_eyes(monkeypatch: pytest.MonkeyPatch, vision: VisionConfig = FIXED) -> None:
    """Routers that are made from now on take SmolLM2 for a model with vision."""
    model = replace(open_model("smollm2-135m"), vision=vision)
    tokenizer = replace(load_tokenizer(model), chat_template=TEMPLATE)
    monkeypatch.setattr("shoal.router.app.open_model", lambda name: model)
    monkeypatch.setattr("shoal.router.app.load_tokenizer", lambda model: tokenizer)
