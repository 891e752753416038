"""Texts that a client keeps for its next request without reading them: thoughts that are not shown,
summaries of what was compacted. They are no secret: whoever may read the answer may read them."""

from __future__ import annotations

import base64
import binascii

_SEAL = "penstock.1."


def sealed(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def is_sealed(value: str) -> bool:
    """Whether this server made it."""
    return value.startswith(_SEAL)


def unsealed(value: str) -> str:
    """The text; empty if the value is not sealed, or not by this server."""
    if not is_sealed(value):
        return ""
    try:
        text = base64.b64decode(value.removeprefix(_SEAL), validate=True)
        return text.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""
