"""Image files to pixels, by Pillow. Files come from strangers: whatever is wrong with one is its request's error alone."""

import io
from typing import TYPE_CHECKING, Final

from shoal.errors import InvalidRequest
from shoal.model_files import ImageHeader, read_image_header

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SCANS: Final = 100  # of a progressive JPEG, which may ask for any number over the whole image
_START_OF_SCAN: Final = b"\xff\xda"


def read_picture(data: bytes) -> "Image":
    """The upright image in RGB; the first frame where there are several, transparency left out, as transformers does it.

    Raises InvalidRequest for a file that is too large, damaged, cut short, or other than its header says.
    """
    header = read_image_header(data)
    if header.format == "JPEG" and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise InvalidRequest(f"a JPEG image has more than {_MAX_SCANS} scans; save it as a baseline JPEG")
    try:
        return _decode(data, header)
    except InvalidRequest:
        raise
    except Exception as error:  # Pillow's decoders raise many classes for damaged files; none says anything else
        words = "" if "BytesIO" in str(error) else f" ({error!s:.100})"  # Pillow names our own object where it finds no image
        raise InvalidRequest(f"a {header.format} image cannot be decoded{words}; send a file that is whole") from error


def _decode(data: bytes, header: ImageHeader) -> "Image":
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=[header.format]) as file:
        stored = (header.height, header.width) if header.orientation >= 5 else (header.width, header.height)
        if file.size != stored:
            raise InvalidRequest(f"a {header.format} image of {stored} pixels claims to have {file.size}")
        turns = {
            2: Image.Transpose.FLIP_LEFT_RIGHT,
            3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE,
            6: Image.Transpose.ROTATE_270,
            7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_90,
        }
        picture = file.convert("RGB")
        return picture if header.orientation == 1 else picture.transpose(turns[header.orientation])
