"""Images as chat bodies hold them: `data:` URLs in base64. Knows their form; knows no image, and fetches nothing."""

import base64
import binascii
import re
from typing import Final

from shoal.router.http.errors import UnsupportedField
from shoal.router.http.fields import Fields

_HEAD: Final = re.compile(
    r"data:(?P<type>[\w.+-]{1,32}/[\w.+-]{1,64})?(?:;[\w.+-]{1,32}=[\w.+-]{1,64}){0,4}(?P<base64>;base64)?,", re.ASCII
)
_MOST: Final = 1024  # characters before the comma
_DETAILS: Final = ("auto", "high")
_SHOWN: Final = 32  # characters of what is refused


def read_image(part: Fields) -> bytes:
    """The file in a content part of type image_url. Raises BadField (400) and UnsupportedField (501) that name the field.

    The type that the URL names is not believed: what the bytes are is seen from themselves.
    """
    part.check_known(("type", "image_url"))
    image = part.need(part.nested("image_url"), "image_url")
    image.check_known(("url", "detail"))
    detail = image.text("detail")
    if detail is not None and detail not in _DETAILS:
        if detail == "low":
            raise UnsupportedField(
                "messages", f"{image.path('detail')} 'low' is not offered: images are seen as the model sees them"
            )
        image.choice("detail", _DETAILS)
    url = image.need(image.text("url"), "url")
    if not url.startswith("data:"):
        if re.match(r"https?://", url[:8], re.IGNORECASE):
            raise UnsupportedField(
                "messages", f"{image.path('url')} is a web address; the server fetches nothing: send the file in a data: URL"
            )
        image.refuse("url", "must be a data: URL, as in data:image/png;base64,…")
    head = _HEAD.match(url, 0, _MOST)
    if head is None or head["base64"] is None:
        image.refuse("url", "must be a data: URL in base64, as in data:image/png;base64,…")
    if not (head["type"] or "").lower().startswith("image/"):
        image.refuse("url", f"is of type {(head['type'] or 'text/plain')[:_SHOWN]!r}; send an image")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        image.refuse("url", "is not base64: it holds other characters, or is cut short")
