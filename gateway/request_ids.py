"""The id that a request has in answers and logs: the client's own where it is a plain one.

Anything else would let a caller write into logs, and into the headers of answers.
"""

from __future__ import annotations

import re
import secrets

REQUEST_ID_HEADER = "x-request-id"
_PLAIN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(sent: bytes | None) -> str:
    """The id of a request whose `x-request-id` is `sent`; None if it has no such header."""
    if sent is not None and _PLAIN.fullmatch(sent):
        return sent.decode("ascii")
    return f"req_{secrets.token_hex(16)}"
