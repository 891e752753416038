"""Images in messages: paths, bytes and Pillow's images become parts with data URLs."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def data_url(source: Any) -> str:
    """An image as a data URL.

    Args:
        source: a path, an image file's bytes, or an image of Pillow.

    Raises:
        OSError: the path cannot be read.
        ValueError: it is no PNG, JPEG, GIF or WebP.
    """
    if hasattr(source, "save"):
        file = io.BytesIO()
        source.save(file, "PNG")
        data = file.getvalue()
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    else:
        data = Path(source).expanduser().read_bytes()
    kind = next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        named = f"{os.fspath(source)}: " if isinstance(source, str | os.PathLike) else ""
        raise ValueError(f"{named}an image must be a PNG, JPEG, GIF or WebP file")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def with_images(messages: Any, *, is_chat: bool) -> Any:
    """Messages whose contents may have images, and texts, as they are.

    Args:
        is_chat: in the form of chat completions, not of responses.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages
    return [_message(message, is_chat) for message in messages]


def _message(message: Any, is_chat: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or all(isinstance(each, Mapping) for each in content):
        return message
    return {**message, "content": [_part(each, is_chat) for each in content]}


def _part(part: Any, is_chat: bool) -> Any:
    if isinstance(part, Mapping):
        return part
    if isinstance(part, str):
        return {"type": "text" if is_chat else "input_text", "text": part}
    url = data_url(part)
    if is_chat:
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "input_image", "image_url": url}
