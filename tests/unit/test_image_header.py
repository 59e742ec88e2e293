"""The size of an image without decoding it, against Pillow: every format, every orientation, and files that are damaged."""

import io
import random
import struct

import pytest
from PIL import Image, ImageOps

from shoal.errors import InvalidRequest
from shoal.model_files.image_header import MAX_IMAGE_BYTES, read_image_header

FORMATS = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {})]


def picture(width: int, height: int, form: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), 90).save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form, options", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (3, 700), (640, 17)])
def test_sizes(form: str, options: dict[str, object], size: tuple[int, int]) -> None:
    header = read_image_header(picture(*size, form, **options))
    assert (header.format, header.width, header.height, header.orientation) == (form, *size, 1)


def test_webp_with_an_alpha_channel_and_frames() -> None:
    file, frames = io.BytesIO(), [Image.new("RGBA", (31, 12), (index, 0, 0, index)) for index in range(3)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    header = read_image_header(file.getvalue())
    assert (header.format, header.width, header.height) == ("WEBP", 31, 12)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_jpeg_orientations(orientation: int, order: str) -> None:
    mark, magic = {"<": b"II", ">": b"MM"}[order], struct.pack(order + "HI", 42, 8)
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"Exif\0\0" + mark + magic + struct.pack(order + "H", 1) + entry + b"\0\0\0\0"
    data = picture(20, 30, "JPEG", exif=exif)
    header = read_image_header(data)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert header.orientation == orientation and (header.width, header.height) == upright.size


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG", b"GIF89a", b"\xff\xd8\xff", b"<svg/>", b"RIFF____WEBPVP8X", b"\xff\xd8\xff\xff\xff"]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="PNG, JPEG, WebP"):
        read_image_header(data)


def test_too_large() -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        read_image_header(bytes(MAX_IMAGE_BYTES + 1))
    bomb = bytearray(picture(1, 1))
    bomb[16:24] = struct.pack(">II", 30_000, 30_000)
    with pytest.raises(InvalidRequest, match="30000 × 30000 pixels is too large"):
        read_image_header(bytes(bomb))
    bomb[16:24] = struct.pack(">II", 0, 30_000)
    with pytest.raises(InvalidRequest, match="nothing to see"):
        read_image_header(bytes(bomb))


def test_any_damage_is_a_refusal_or_a_size() -> None:
    rng = random.Random(5)
    for form, options in FORMATS:
        whole = picture(40, 30, form, **options)
        for _ in range(300):
            data = bytearray(whole[: rng.randrange(len(whole) + 1)])
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(min(64, len(data)))] = rng.randrange(256)
            try:
                header = read_image_header(bytes(data))
            except InvalidRequest:
                continue
            assert header.width > 0 and header.height > 0
