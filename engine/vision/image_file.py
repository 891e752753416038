"""Opens image files that nobody has checked.

Only the header is read to learn the size, so what is too large is refused before any pixel is
decoded. Pixels are then decoded whole, turned as EXIF says, and made RGB; what else a file carries
(colour profiles, metadata, further frames) is never looked at.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from penstock.engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # OpenAI's; each decoded by its own library
MAX_PIXELS = 1 << 24  # 4096 × 4096; 120 MB while it is decoded
_MAX_SIDE = 16_384
_MAX_ASPECT = 200  # Qwen2-VL's processor refuses more
_MAX_SCANS = 64  # of a JPEG file; each goes over the whole picture, and usual files have 10
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """A file that can be decoded.

    Attributes:
        digest: its name in block keys and caches: SHA-256 of the file, in hexadecimal digits.
        width, height: in pixels, upright.
    """

    digest: str
    data: bytes
    width: int
    height: int


def load_image(data: bytes) -> LoadedImage:
    """
    Raises:
        InvalidRequestError: as for `open_image`.
    """
    width, height = open_image(data).size
    digest = hashlib.sha256(data).hexdigest()
    return LoadedImage(digest=digest, data=data, width=width, height=height)


def data_of_url(url: str, *, max_bytes: int) -> bytes:
    """The file in a data URL.

    Args:
        max_bytes: twice as many characters are not decoded.

    Raises:
        InvalidRequestError: it is no data URL in base64, or is longer.
    """
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequestError("the data URL has no comma")
    if len(body) > 2 * max_bytes:
        raise InvalidRequestError(f"the image has more than {max_bytes} bytes")
    if not head.lower().endswith(";base64"):
        raise InvalidRequestError("the data URL must be in base64")
    try:
        return base64.b64decode(unquote_to_bytes(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError("the data URL is not valid base64") from error


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The first frame of an image file, in RGB, upright.

    Raises:
        InvalidRequestError: it is no image that we support, is damaged, or has too many pixels.
    """
    # Pillow takes a tenth of a second to import, and most servers never see an image.
    from PIL import Image, ImageFile

    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "damaged files must be refused"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ours are the limits
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise InvalidRequestError(f"the image has more than {max_pixels} pixels") from error
        except Exception as error:  # whatever damaged headers lead to
            raise InvalidRequestError(
                f"the data is not an image in one of the formats {', '.join(FORMATS)}"
            ) from error
        _check_size(*image.size, max_pixels=max_pixels)
        is_jpeg = data.startswith(b"\xff\xd8")
        if is_jpeg and data.count(b"\xff\xda") > _MAX_SCANS:
            raise InvalidRequestError(f"the image has more than {_MAX_SCANS} scans")
        if getattr(image, "is_animated", False) and not is_jpeg:  # phones append a depth map
            raise InvalidRequestError("the image is animated; send one frame")
        try:
            orientation = image.getexif().get(_ORIENTATION)
        except Exception:  # damaged metadata of a sound image
            orientation = None
        try:
            image.load()
            return _upright(_rgb(image), orientation)
        except Exception as error:
            raise InvalidRequestError("the image is damaged") from error


def _check_size(width: int, height: int, *, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"the image has {width} × {height} pixels, but this server accepts {max_pixels}"
        )
    short, long = sorted((width, height))
    if short < 1 or long > _MAX_SIDE or long > _MAX_ASPECT * short:
        raise InvalidRequestError(
            f"the image has {width} × {height} pixels; a side may have {_MAX_SIDE}, and be "
            f"{_MAX_ASPECT} times as long as the other"
        )


def _rgb(image: Image) -> Image:
    """What is transparent lies on white, as on a page."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGB", above.size, "white")
        below.paste(above, mask=above.getchannel("A"))
        return below
    return image.convert("RGB")


def _upright(image: Image, orientation: object) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }  # fmt: skip
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)
