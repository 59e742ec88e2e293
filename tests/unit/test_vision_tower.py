"""Towers from folders as they are published and as transformers writes them; files that lack a part; what the encoder keeps."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from shoal.engine.vision import ImageFeatures, VisionEncoder
from shoal.engine.vision.tower import VisionTower, missing_library
from shoal.errors import Cancelled, InvalidConfig, InvalidRequest, Unsupported
from shoal.model_files import open_model, write_random_model
from shoal.types import DType, PromptImage
from tests import engine_support as support
from tests import image_support as images

GEMMA, QWEN = images.VARIANTS
PUBLISHED = {  # what the first files' names begin with
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def seen(folder: Path, data: bytes = images.PICTURES[0]) -> ImageFeatures:
    return VisionTower.load(open_model(str(folder)), DType.FLOAT32).encode(data)


def copy_of(variant: str, folder: Path) -> dict[str, torch.Tensor]:
    """The same model in a folder of its own; returns its tensors."""
    source = support.model_files(variant).path
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return load_file(folder / "model.safetensors")


def assert_same(own: ImageFeatures, other: ImageFeatures) -> None:
    assert torch.equal(own.embeddings, other.embeddings) and len(own.deep) == len(other.deep)
    assert all(torch.equal(a, b) for a, b in zip(own.deep, other.deep, strict=True))


def test_gemma_as_published(tmp_path: Path) -> None:
    tensors = copy_of(GEMMA, tmp_path)
    renamed = {}
    for name, value in tensors.items():
        prefix = next(prefix for prefix in PUBLISHED if name.startswith(prefix))
        renamed[PUBLISHED[prefix] + name.removeprefix(prefix)] = value
    save_file(renamed, tmp_path / "model.safetensors")
    assert_same(seen(tmp_path), seen(support.model_files(GEMMA).path))


def test_qwen_as_published(tmp_path: Path) -> None:
    """Its files name the processor that needs torchvision; Pillow's is taken, which does the same."""
    copy_of(QWEN, tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    own, other = seen(tmp_path), seen(support.model_files(QWEN).path)
    assert len(own.deep) == 2
    assert_same(own, other)


@pytest.mark.parametrize("variant", images.VARIANTS)
def test_as_transformers_writes_it(variant: str, tmp_path: Path) -> None:
    copy_of(variant, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert_same(seen(tmp_path), seen(support.model_files(variant).path))


@pytest.mark.parametrize(
    "variant, name", [(GEMMA, "model.multi_modal_projector.mm_soft_emb_norm.weight"), (QWEN, "model.visual.merger.norm.bias")]
)
def test_tensors_that_lack_or_have_no_place_are_named(variant: str, name: str, tmp_path: Path) -> None:
    tensors = copy_of(variant, tmp_path)
    value = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    own = name.rpartition("projector.")[2].removeprefix("model.visual.")
    with pytest.raises(InvalidConfig, match=f"(?s)do not fit.*{own}"):
        VisionTower.load(open_model(str(tmp_path)), DType.FLOAT32)
    save_file({**tensors, name: value, f"{name}s": value.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=f"(?s)do not fit.*{own}s"):
        VisionTower.load(open_model(str(tmp_path)), DType.FLOAT32)


def test_a_model_of_text_has_no_tower() -> None:
    assert missing_library() == ""
    with pytest.raises(Unsupported, match="sees no images"):
        VisionTower.load(support.model_files("llama"), DType.FLOAT32)


def placed(data: bytes) -> PromptImage:
    config = images.vision(QWEN)
    (image,) = config.place(config.expand_ids([config.placeholder_id], [data], lambda text: ()), [data])
    return image


async def test_what_was_seen_lately_is_kept_within_its_salt() -> None:
    times: list[float] = []
    tower = images.encoder(QWEN)._tower
    size = sum(tensor.nbytes for own in [tower.encode(images.PICTURES[0])] for tensor in (own.embeddings, *own.deep))
    encoder = VisionEncoder(tower, kept_bytes=2 * size, seen=times.append)
    image, same_size, other = placed(images.PICTURES[0]), placed(images.picture(50)), placed(images.picture(51))
    try:
        first = await encoder.encode_soon([image, image], "a")
        assert len(times) == 1 and first[0] is first[1]
        await encoder.encode_soon([image], "b")  # another's is not found
        assert len(times) == 2
        await encoder.encode_soon([same_size, other], "a")  # there is room for two
        await encoder.encode_soon([other], "a")
        assert len(times) == 4
        await encoder.encode_soon([image], "a")
        assert len(times) == 5
        with pytest.raises(InvalidRequest, match=r"^image 1: .*digest"):
            await encoder.encode_soon([image, PromptImage(images.PICTURES[1], image.span)], "a")
        with pytest.raises(InvalidRequest, match=r"^image 2: a PNG image cannot be decoded"):
            encoder.encode([image, image, placed(images.PICTURES[0][:-30])])
    finally:
        encoder.close()


async def test_an_image_that_nobody_waits_for_is_given_up() -> None:
    tower = VisionTower.load(support.model_files(QWEN), DType.FLOAT32)
    entered, go, times = threading.Event(), threading.Event(), list[float]()

    def wait(*_: object) -> None:
        entered.set()
        go.wait(20)

    hook = tower.tower.patch_embed.register_forward_hook(wait)
    encoder = VisionEncoder(tower, seen=times.append)
    try:
        leaving = asyncio.create_task(encoder.encode_soon([placed(images.PICTURES[0]), placed(images.PICTURES[1])]))
        await asyncio.to_thread(entered.wait, 20)
        leaving.cancel()
        await asyncio.wait([leaving])
        hook.remove()
        go.set()
        await encoder.encode_soon([placed(images.PICTURES[2])])  # the thread is free again
        assert leaving.cancelled() and len(times) == 1
        with pytest.raises(Cancelled):
            tower.encode(images.PICTURES[0], lambda: False)
    finally:
        go.set()
        encoder.close()


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_vl"])
def test_sharded_and_bfloat16_folders(architecture: str, tmp_path: Path) -> None:
    options = {"architecture": architecture, "num_layers": 2, "vocab_size": 300}
    one = write_random_model(tmp_path / "one", **options)
    many = write_random_model(tmp_path / "many", num_shards=3, **options)
    assert_same(seen(one), seen(many))
    assert open_model(str(one)).revision == open_model(str(many)).revision
    small = write_random_model(tmp_path / "small", dtype=DType.BFLOAT16, **options)
    assert (seen(small).embeddings - seen(one).embeddings).abs().max() < 0.2
