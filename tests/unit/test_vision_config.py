"""How prompts are expanded for images: against transformers' processors, and what is refused."""

import io
import json
import random
from pathlib import Path

import pytest
from PIL import Image
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from shoal.errors import InvalidRequest, Unsupported
from shoal.model_files import ModelFiles, VisionConfig, check_images, load_tokenizer, open_model, write_random_model
from shoal.model_files.vision import ResizeRule
from shoal.model_files.vision_files import read_vision
from shoal.types import ImageSpan
from tests import engine_support as support
from tests import image_support as images

GEMMA, QWEN = images.VARIANTS


def test_resizing_is_qwens() -> None:
    rng = random.Random(3)
    for factor, least, most in ((8, 256, 1536), (32, 65_536, 16_777_216), (28, 3136, 1_003_520)):
        rule = ResizeRule(factor, least, most)
        for _ in range(400):
            width, height = (rng.choice([rng.randrange(1, 60), rng.randrange(60, 6000)]) for _ in range(2))
            if max(width, height) > 200 * min(width, height):
                with pytest.raises(InvalidRequest, match="too long"):
                    rule.grid(width, height)
                continue
            tall, wide = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
            assert rule.grid(width, height) == (1, tall // factor, wide // factor)


def test_the_grid_is_what_the_processor_makes() -> None:
    model, config = support.model_files(QWEN), images.vision(QWEN)
    processor = Qwen2VLImageProcessorPil.from_pretrained(model.path)
    for size in ((40, 24), (17, 60), (90, 30), (3, 3), (200, 9)):
        grid = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert config.grid(*size) == (grid[0], grid[1] // 2, grid[2] // 2)
        assert config.num_tokens(*size) * 4 == processor.get_number_of_image_patches(size[1], size[0])


def gemma_processor(model: ModelFiles) -> Gemma3Processor:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model.path / "tokenizer.json"), extra_special_tokens=named)
    return Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(model.path), tokenizer, image_seq_length=16)


@pytest.mark.parametrize(
    "text", ["<start_of_image>", "see\n<start_of_image>\nand <start_of_image>!", "no images", "\n\n<start_of_image> "]
)
def test_gemmas_prompts_are_its_processors(text: str) -> None:
    """Line breaks around an image join those of the text, as its tokenizer has it."""
    model, config = support.model_files(GEMMA), images.vision(GEMMA)
    pictures = list(images.PICTURES[: text.count("<start_of_image>")])
    files = [Image.open(io.BytesIO(data)) for data in pictures]
    expected = gemma_processor(model)(text=text, images=files or None)
    ids = load_tokenizer(model).encode(config.expand_text(text, pictures), add_special_tokens=False)
    assert ids == list(expected["input_ids"][0])
    kinds = [0] * len(ids)
    for placed in config.place(ids, pictures):
        kinds[placed.span.start : placed.span.stop] = [1] * placed.span.num_tokens
    assert kinds == list(expected["token_type_ids"][0]) if "token_type_ids" in expected else not pictures


def test_qwens_prompts() -> None:
    model, config = support.model_files(QWEN), images.vision(QWEN)
    tokenizer, pad = load_tokenizer(model), "<|image_pad|>"
    text = f"one <|vision_start|>{pad}<|vision_end|> two <|vision_start|>{pad}<|vision_end|>."
    pictures, counts = images.PICTURES[:2], (15, 16)
    expanded = config.expand_text(text, pictures)
    assert expanded == text.replace(pad, "#", 1).replace(pad, pad * counts[1]).replace("#", pad * counts[0])
    ids = tokenizer.encode(expanded, add_special_tokens=False)
    own = config.expand_ids(tokenizer.encode(text, add_special_tokens=False), pictures, lambda text: ())
    assert list(own) == ids
    spans = [placed.span for placed in config.place(ids, pictures)]
    assert [(span.num_tokens, span.grid) for span in spans] == [(15, (1, 3, 5)), (16, (1, 8, 2))]
    assert all(ids[at] == config.image_token_id for span in spans for at in span.positions)


def test_numbers_that_differ_are_refused() -> None:
    config, picture = images.vision(GEMMA), images.PICTURES[0]
    with pytest.raises(InvalidRequest, match=r"1 image placeholders \(<start_of_image>\) and 2 images"):
        config.expand_text("<start_of_image>", [picture, picture])
    with pytest.raises(InvalidRequest, match="0 image placeholders"):
        config.expand_ids([9, 9], [picture], lambda text: ())
    with pytest.raises(InvalidRequest, match="stands for parts of an image"):
        config.expand_text("<image_soft_token>", [])
    with pytest.raises(InvalidRequest, match="no place for an image of 16 tokens"):
        config.place([5] * 15, [picture])
    with pytest.raises(InvalidRequest, match="17 image tokens, its 1 images take 16"):
        config.place([5] * 17, [picture])
    with pytest.raises(InvalidRequest, match="no place"):
        config.place([5] * 8 + [9] + [5] * 8, [picture])


def test_what_images_ask_of_their_prompt() -> None:
    config, digest = images.vision(QWEN), bytes(32)
    ids = [9, 9, *[5] * 6, 9, 9]
    span = ImageSpan(2, 6, digest, (1, 2, 3))
    run = {"num_prefill_tokens": 9, "num_anchor_tokens": 1, "prefill_layers": 2}
    check_images(config, ids, [span], **run)
    check_images(config, ids[:9], [span], **run)
    check_images(None, ids, [], **run)
    with pytest.raises(Unsupported, match="sees no images"):
        check_images(None, ids, [span], **run)
    for wrong, words in (([], "no image"), ([span, span], "one after the other"), ([ImageSpan(2, 6, digest)], "need a grid")):
        with pytest.raises(InvalidRequest, match=words):
            check_images(config, ids, wrong, **run)
    for name, value, words in (
        ("num_prefill_tokens", 7, "boundary"), ("num_anchor_tokens", 3, "anchors"), ("prefill_layers", 1, "depth")
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=words):
            check_images(config, ids, [span], **{**run, name: value})
    with pytest.raises(InvalidRequest, match="grid of"):
        ImageSpan(2, 6, digest, (1, 2, 2))
    with pytest.raises(InvalidRequest, match="32 bytes"):
        ImageSpan(2, 6, b"")


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_vl"])
def test_without_an_image_processor_the_text_is_served(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_random_model(tmp_path, architecture=architecture, num_layers=2)
    whole = open_model(str(folder))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    alone = open_model(str(folder))
    assert whole.vision is not None and alone.vision is None and alone.tensors == whole.tensors
    assert "images are not served" in caplog.text and "preprocessor_config.json" in caplog.text
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))  # as transformers 5 writes it
    assert open_model(str(folder)).vision == whole.vision
    for change in ({"do_pan_and_scan": True, "merge_size": 3}, {"image_processor_type": "Other"}, {"size": {"height": 1}}):
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, **change}}))
        caplog.clear()
        if architecture == "gemma3" or "size" not in change:
            assert open_model(str(folder)).vision is None and "images are not served" in caplog.text


def test_the_revision_covers_the_tower(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, architecture="gemma3", num_layers=2)
    model = open_model(str(folder))
    info = model.vision_tensors["model.multi_modal_projector.mm_soft_emb_norm.weight"]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\1\2\3\4")
    assert open_model(str(folder)).revision != model.revision


def test_published_settings(tmp_path: Path) -> None:
    """Gemma 3 4B's and Qwen3-VL 4B's, as far as they matter here."""

    def read(config: dict[str, object], processor: dict[str, object]) -> VisionConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
        found = read_vision(tmp_path)
        assert found is not None
        return found

    ids = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144, "mm_tokens_per_image": 256}
    tower = {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"}
    gemma = read(
        {"model_type": "gemma3", **ids, "vision_config": tower},
        {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None, "size": {"height": 896, "width": 896}},
    )
    assert (gemma.num_tokens(3000, 20), gemma.grid(3000, 20)) == (256, None)
    assert gemma.expand_text("a<start_of_image>b", [images.PICTURES[0]]).count("<image_soft_token>") == 256
    patches = {"patch_size": 16, "temporal_patch_size": 2}
    tower = {"model_type": "qwen3_vl", "depth": 24, "deepstack_visual_indexes": [5, 11, 17], "spatial_merge_size": 2, **patches}
    qwen = read(
        {"model_type": "qwen3_vl", "image_token_id": 151_655, "vision_config": tower},
        {"image_processor_type": "Qwen2VLImageProcessorFast", "merge_size": 2, **patches}
        | {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}},
    )
    assert (qwen.grid(1920, 1080), qwen.num_tokens(1920, 1080), qwen.num_deep_layers) == ((1, 34, 60), 2040, 3)
    assert qwen.num_tokens(10, 10) == 64 and qwen.num_tokens(6000, 6000) <= 16_384
