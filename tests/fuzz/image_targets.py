"""Pictures as strangers send them: `data:` URLs, headers that the router reads, files that a prefill worker decodes."""

import base64
import io
from functools import cache
from typing import Any

from PIL import Image

from shoal.engine.vision.pictures import read_picture
from shoal.model_files.image_header import MAX_IMAGE_PIXELS, read_image_header
from shoal.router.http.data_urls import read_image
from shoal.router.http.fields import Fields
from tests.fuzz.draw import Draw
from tests.fuzz.target import Target

_HEADS = (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a")
_FLOODS = (b"\xff", b"\xff\xd0", b"\xff\xe5\0\2", b"\xff\xe1\0\x10Exif\0\0II*\0\x08\0", b"\0", b"\xff\xda\0\2")
_SIZES = (0, 1, 255, 4096, 30_000, 65_535, 100_000, (1 << 31) - 1, (1 << 32) - 1)


@cache
def files() -> tuple[bytes, ...]:
    """Small ones of every kind, so that little is decoded."""
    image, made = Image.linear_gradient("L").resize((40, 24)).convert("RGB"), []
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("PNG", {}), ("PNG", {"optimize": True}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"exif": exif}),
        ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("GIF", {"save_all": True, "append_images": [image, image]}),
    )  # fmt: skip
    for form, options in kinds:
        file = io.BytesIO()
        image.save(file, form, **options)
        made.append(file.getvalue())
    return tuple(made)


def picture(draw: Draw) -> bytes:
    """A file, most often nearly one."""
    if draw.chance(8):
        return draw.pick(_HEADS) + draw.pick(_FLOODS) * draw.pick((3, 5000, 300_000)) + draw.raw()
    data = bytearray(draw.pick(files()))
    if draw.chance(40):
        size = draw.pick(_SIZES)
        at = draw.pick((16, 20, 6, 24, 26, draw.below(200)))
        for width in (2, 4):
            if draw.chance(50):
                data[at : at + width] = (size & (1 << 8 * width) - 1).to_bytes(width, draw.pick(("big", "little")))
    return draw.damaged(bytes(data), 60)


def call_header(data: bytes) -> None:
    header = read_image_header(data)
    if not 0 < header.width * header.height <= MAX_IMAGE_PIXELS:
        raise AssertionError(f"{header} is beyond the limits")


def call_picture(data: bytes) -> None:
    """What is decoded has the size that the router went by."""
    found, header = read_picture(data), read_image_header(data)
    if found.size != (header.width, header.height) or found.mode != "RGB":
        raise AssertionError(f"{found.size} in {found.mode} is decoded where {header} was read")


def url(draw: Draw) -> str:
    """A `data:` URL, nearly."""
    data = base64.b64encode(draw.pick(files())[:60]).decode()
    scheme = draw.pick(("data:", "data:", "data:", "DATA:", "http://", "https://", "file://", "", "data"))
    kind = draw.pick(("image/png", "image/jpeg", "image/svg+xml", "text/html", "", "image/", "/", draw.text()))
    more = draw.pick(("", ";charset=utf-8", ";a=b" * 3, ";a=" + "x" * 5000, ";=", draw.text()))
    coding = draw.pick((";base64", ";base64", ";BASE64", "", ";base64;base64"))
    body = draw.pick((data, data[:-1], data + "=", data + "\n", draw.text(), "\u0661" * 8, data * draw.count()))
    return f"{scheme}{kind}{more}{coding}{draw.pick((',', ',', ''))}{body}"


def part(draw: Draw) -> Any:
    """A content part with an image."""
    image: Any = {"url": url(draw)} | ({"detail": draw.pick(("auto", "high", "low", draw.text()))} if draw.chance(30) else {})
    image = image if draw.chance(93) else draw.json(3)
    return {"type": "image_url", "image_url": image} | ({draw.text(): draw.json(3)} if draw.chance(5) else {})


def call_url(given: Any) -> None:
    read_image(Fields(given, "part"))


TARGETS = (
    Target("image-header", 5, picture, call_header),
    Target("picture", 3, picture, call_picture),
    Target("data-url", 4, part, call_url),
)
