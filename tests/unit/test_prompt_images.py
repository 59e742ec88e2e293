"""Positions, chunks and runs of prompts with images, and files that are damaged."""

import io
import logging
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from shoal.config.logs import configure_logging
from shoal.engine.vision import PromptImages
from shoal.engine.vision.pictures import read_picture
from shoal.errors import InternalError, InvalidRequest
from shoal.placement.batching import Batcher, TokenCursor
from shoal.types import ImageSpan
from tests import image_support as images

GEMMA, QWEN = images.VARIANTS


def spans_of(parts: list[tuple[int, int, int]], with_grid: bool = True) -> tuple[list[ImageSpan], int]:
    """Of (tokens of text before, rows, columns); and where text goes on."""
    spans, at = [], 0
    for num_text, rows, columns in parts:
        at += num_text
        spans.append(ImageSpan(at, rows * columns, bytes(32), (1, rows, columns) if with_grid else None))
        at = spans[-1].stop
    return spans, at


@pytest.mark.parametrize("parts", [[(1, 2, 3)], [(4, 1, 9), (2, 9, 1), (1, 3, 3)], [(0, 5, 2), (3, 1, 1)]])
def test_rotary_positions_are_transformers(parts: list[tuple[int, int, int]]) -> None:
    spans, stop = spans_of(parts)
    total = stop + 7
    kinds = torch.zeros(1, total, dtype=torch.int32)
    for span in spans:
        kinds[0, span.start : span.stop] = 1
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for _, rows, columns in parts])
    model = images.text_half(QWEN).whole.model
    expected, delta = model.get_rope_index(torch.zeros_like(kinds, dtype=torch.int64), kinds, image_grid_thw=grid)
    own = PromptImages.of(images.vision(QWEN), spans)
    assert own is not None
    for start in range(total):
        for end in (start + 1, min(total, start + 5), total):
            assert np.array_equal(own.rotary_positions(range(start, end)), expected[:, 0, start:end].numpy())
    assert own.rotary_positions(range(total + 50, total + 51)).tolist() == [[total + 50 + int(delta)]] * 3


def test_pieces() -> None:
    spans, stop = spans_of([(3, 2, 2), (2, 1, 4)], with_grid=False)
    own = PromptImages.of(images.vision(GEMMA), spans)
    assert own is not None
    assert list(own.pieces(range(stop + 2))) == [
        (range(0, 3), True),
        (range(3, 7), False),
        (range(7, 9), True),
        (range(9, 13), False),
        (range(13, 15), True),
    ]
    assert list(own.pieces(range(5, 8))) == [(range(5, 7), False), (range(7, 8), True)]
    with pytest.raises(InternalError, match="cut at 6"):
        list(own.pieces(range(2, 6)))
    with pytest.raises(InternalError, match="without its features"):
        list(own.rows(range(4)))
    causal = PromptImages.of(images.vision(QWEN), spans)
    assert causal is not None and list(causal.pieces(range(2, 6))) == [(range(2, 6), True)]


prompts = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=4)


@given(st.lists(prompts, min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_chunks_never_cut_an_image_and_always_go_on(
    given_prompts: list[list[tuple[int, int]]], budget: int, max_requests: int, is_background: bool
) -> None:
    batcher, wholes, lengths = Batcher(), {}, {}
    for index, parts in enumerate(given_prompts):
        at, own = 0, []
        for num_text, num_image in parts:
            at += num_text
            own.append(range(at, at + num_image))
            at += num_image
        key, lengths[str(index)], wholes[str(index)] = str(index), at + 2, own
        batcher.add(TokenCursor(key, at + 2, at + 2, 0, 0, is_background and index == 0, tuple(own)))
    done = dict.fromkeys(lengths, 0)
    for _ in range(sum(lengths.values()) + 1):
        chunks = batcher.next_step(budget, max_requests)
        if not chunks:
            break
        largest = max((len(span) for own in wholes.values() for span in own), default=0)
        assert sum(chunk.num_tokens for chunk in chunks) <= max(budget, budget - 1 + largest)
        for chunk in chunks:
            assert chunk.num_tokens > 0 and chunk.start == done[chunk.key]
            assert not any(span.start < chunk.stop < span.stop for span in wholes[chunk.key])
            batcher.complete(chunk)
            done[chunk.key] = chunk.stop
    assert done == lengths


def test_pictures_are_what_transformers_opens(tmp_path) -> None:
    for form, options in (("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("GIF", {})):
        data = images.picture(7, 31, 18, form, **options)
        (tmp_path / "file").write_bytes(data)
        assert np.array_equal(np.asarray(read_picture(data)), np.asarray(load_image(str(tmp_path / "file"))))
    pixels = Image.fromarray(np.arange(20 * 12, dtype=np.uint8).reshape(20, 12))
    for picture in (*map(pixels.convert, ("L", "LA", "P", "RGBA", "1")), Image.fromarray(np.full((9, 5), 40_000, np.uint16))):
        file = io.BytesIO()
        picture.save(file, "PNG")
        assert read_picture(file.getvalue()).mode == "RGB"
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = images.picture(8, 20, 11, "JPEG", exif=exif.tobytes())
        (tmp_path / "file").write_bytes(data)
        assert np.array_equal(np.asarray(read_picture(data)), np.asarray(load_image(str(tmp_path / "file"))))


def test_a_file_that_breaks_off_at_once_is_refused_without_addresses_of_memory() -> None:
    for form in ("PNG", "WEBP"):
        with pytest.raises(InvalidRequest, match="image cannot be decoded") as refused:
            read_picture(images.picture(9, 33, 21, form)[:40])
        assert "0x" not in str(refused.value) and "send a file that is whole" in str(refused.value)


def test_no_log_tells_what_files_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Pillow, at debug level, writes a file's EXIF and chunks out."""
    levels = {logger: logger.level for logger in map(logging.getLogger, (None, "PIL", "asyncio", "grpc", "ray"))}
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    try:
        configure_logging("debug", "prefill-0")
        exif = Image.Exif()
        exif[0x013B] = "Jane Doe"
        data = images.picture(8, 20, 11, "JPEG", exif=exif.tobytes())
        capsys.readouterr()  # what writing it told
        read_picture(data)
        read_picture(images.picture(8, 20, 11, "PNG"))
        logging.getLogger("shoal").debug("seen")
        told = capsys.readouterr().err
        assert "seen" in told and "Jane" not in told and "IHDR" not in told
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def test_any_damage_is_a_refusal_or_a_picture() -> None:
    rng = random.Random(11)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = images.picture(9, 33, 21, form)
        with pytest.raises(InvalidRequest, match="cannot be decoded"):
            read_picture(whole[: len(whole) // 2])
        for _ in range(60):
            data = bytearray(whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.5 else whole)
            for _ in range(rng.randrange(6)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                assert read_picture(bytes(data)).mode == "RGB"
            except InvalidRequest:
                continue


def test_what_asks_for_endless_work_is_refused() -> None:
    jpeg = images.picture(9, 33, 21, "JPEG", progressive=True)
    with pytest.raises(InvalidRequest, match="more than 100 scans"):
        read_picture(jpeg[:-2] + b"\xff\xda\x00\x02" * 200 + b"\xff\xd9")
    png = bytearray(images.picture(9, 33, 21, "PNG"))
    png[16:24] = (30_000).to_bytes(4, "big") * 2
    with pytest.raises(InvalidRequest, match="too large"):
        read_picture(bytes(png))
    png[16:24] = (3_000).to_bytes(4, "big") * 2  # within the limits, and not what the data holds
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        read_picture(bytes(png))
