"""The size of an image from its file's first bytes: PNG, JPEG, WebP, GIF. Decodes no pixels and needs no library.

Prompts are expanded by these sizes before anybody decodes an image, so what is read here is what counts: whoever decodes must
find the same size, turned as `orientation` says.
"""

import struct
from dataclasses import dataclass
from typing import Final

from shoal.errors import InvalidRequest

MAX_IMAGE_BYTES: Final = 20 << 20
MAX_IMAGE_PIXELS: Final = 40_000_000
_MAX_SIDE: Final = 32_768
_MAX_STEPS: Final = 16_384  # through a JPEG's segments: files have some hundreds at most
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # JPEG's start-of-frame markers
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # JPEG markers without a length
_ORIENTATION_TAG: Final = 0x0112


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image's file says of itself. Width and height are those of the upright image."""

    format: str  # "PNG", "JPEG", "WEBP" or "GIF", as Pillow names them
    width: int
    height: int
    orientation: int = 1  # EXIF's, 1 … 8, of JPEG files alone; 1: as it is stored


def read_image_header(data: bytes) -> ImageHeader:
    """Raises InvalidRequest for other formats, damaged headers, and images that are too large in bytes, pixels or a side."""
    if not data:
        raise InvalidRequest("an image is empty; send the bytes of a PNG, JPEG, WebP or GIF file")
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"an image has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken, make it smaller")
    try:
        header = _read(data)
    except (struct.error, IndexError):
        header = None
    if header is None:
        raise InvalidRequest(
            "an image is no PNG, JPEG, WebP or GIF file, or its header is damaged; send it in one of these formats"
        )
    if header.width < 1 or header.height < 1:
        raise InvalidRequest(f"a {header.format} image of {header.width} × {header.height} pixels has nothing to see")
    if max(header.width, header.height) > _MAX_SIDE or header.width * header.height > MAX_IMAGE_PIXELS:
        raise InvalidRequest(
            f"a {header.format} image of {header.width} × {header.height} pixels is too large; at most {MAX_IMAGE_PIXELS} pixels"
            f" and {_MAX_SIDE} a side are taken, make it smaller"
        )
    return header


def _read(data: bytes) -> ImageHeader | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return ImageHeader("PNG", *struct.unpack_from(">II", data, 16))
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return ImageHeader("GIF", *struct.unpack_from("<HH", data, 6))
    return None


def _jpeg(data: bytes) -> ImageHeader | None:
    """Walk the segments up to the frame's; EXIF comes before it, and only the first of it counts. Gives up after many steps."""
    at, orientation = 2, 0
    for _ in range(_MAX_STEPS):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _ALONE:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2 or marker in (0xD9, 0xDA):
            return None
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            if orientation >= 5:
                width, height = height, width
            return ImageHeader("JPEG", width, height, orientation or 1)
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0" and not orientation:
            orientation = _orientation(data[at + 10 : at + 2 + length])
        at += 2 + length
    return None


def _orientation(exif: bytes) -> int:
    """Of a TIFF structure's first directory; 1 where it has none or is damaged."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (first,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, first)
        for index in range(count):
            tag, kind, num_values, value = struct.unpack_from(order + "HHIH", exif, first + 2 + 12 * index)
            if tag == _ORIENTATION_TAG:
                return value if kind == 3 and num_values == 1 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _webp(data: bytes) -> ImageHeader | None:
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return ImageHeader("WEBP", width, height) if len(data) >= 30 else None
    return None
