"""Conversations with images become the ids that transformers' own processors make of them, for Gemma 3 and Qwen3-VL."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.utils.chat_template_utils import render_jinja_template

from shoal.model_files import Tokenizer, load_tokenizer, open_model, write_random_model
from shoal.model_files.vision_files import read_processor
from shoal.pb.v1 import shoal_pb2
from shoal.router.text import ChatTemplate, PromptEncoder
from shoal.router.tools import read_messages
from tests.fakes.images import picture

# In the ways of both families: short, and with what their templates ask of messages and of a renderer.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('turns must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('neither text nor parts') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
QWEN = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {"gemma3": GEMMA, "qwen3_vl": QWEN}
A, B = picture(40, 24, seed=1), picture(30, 60, seed=2, form="JPEG")
TALKS: list[list[tuple[str, list[str | bytes]]]] = [
    [("user", ["What is this?", A])],
    [("user", [A, "\n\n", B, "\nCompare.\n"])],
    [("system", ["Be brief."]), ("user", [B, " and"]), ("assistant", ["A fish."]), ("user", ["And", A, "this?"])],
    [("user", ["No picture."])],
]


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp(request.param), architecture=request.param)


def chat(talk: list[tuple[str, list[str | bytes]]]) -> shoal_pb2.ChatInput:
    messages = []
    for role, content in talk:
        parts = [
            shoal_pb2.ContentPart(text=each) if isinstance(each, str) else shoal_pb2.ContentPart(image=shoal_pb2.Image(data=each))
            for each in content
        ]
        messages.append(shoal_pb2.ChatMessage(role=role, content_parts=parts))
    return shoal_pb2.ChatInput(messages=messages)


def ids_of_transformers(model: Path, text: str, images: list[Image.Image]) -> list[int]:
    """By its own processors, over the same files. Qwen's wants a library for videos, so its parts are asked one by one."""
    files, settings = open_model(str(model)), dict(read_processor(model))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    assert files.vision is not None
    if files.vision.architecture == "qwen3_vl":
        parts = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        parts.image_processor, parts.image_token = Qwen2VLImageProcessorPil.from_dict(settings), "<|image_pad|>"
        seen = parts.image_processor(images=images, return_tensors="np") if images else {}
        pieces = text.split("<|image_pad|>")
        whole = [*(piece + parts.replace_image_token(seen, at) for at, piece in enumerate(pieces[:-1])), pieces[-1]]
        return list(tokenizer("".join(whole), add_special_tokens=False)["input_ids"])
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    num_tokens = files.vision.num_fixed_tokens
    processor = Gemma3Processor(Gemma3ImageProcessorPil.from_dict(settings), tokenizer, image_seq_length=num_tokens)
    return list(processor(text=[text], images=images or None, add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
def test_messages_with_images_are_rendered_and_expanded_as_transformers_does(model: Path, talk: Any) -> None:
    files = open_model(str(model))
    assert files.vision is not None
    template, tokenizer = TEMPLATES[files.vision.architecture], load_tokenizer(files)
    encoder = PromptEncoder(Tokenizer(tokenizer.backend, template, "<|im_start|>", "<|im_end|>"), files.vision)
    messages = read_messages(chat(talk))
    images = [each for _, content in talk for each in content if isinstance(each, bytes)]
    prompt = encoder.encode_chat(messages, images=images)

    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    [[text], _] = render_jinja_template(
        [plain], chat_template=template, add_generation_prompt=True, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    assert ChatTemplate(template, bos_token="<|im_start|>", eos_token="<|im_end|>").render(messages) == text
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    assert list(prompt.token_ids) == ids_of_transformers(model, text, opened)
    assert len(prompt.images) == len(images) and prompt.boundary_tokens > 1
