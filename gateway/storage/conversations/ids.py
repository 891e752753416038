"""Unguessable ids that contain their conversation.

    conv_<tree>            a conversation
    resp_<tree><turn>      a response; every response is in the tree of a conversation, which may be
                           unlisted. The answer to a request with an `Idempotency-Key` has an id
                           derived from that key, a successor's from that of the response before.
    turn_<tree><turn>      items that were added without a response

    msg_<tree><turn>_<n>   item n of a response's output (the first one's id has no number); other
                           kinds of items have other prefixes

`<tree>` and `<turn>` are 24 hexadecimal digits each (96 random bits). In Redis all keys of a tree
contain `{<tree>}`, so that they are in one slot of a cluster.
"""

from __future__ import annotations

import hashlib
import re
import secrets

_NUM_BYTES = 12
_CONVERSATION = re.compile(r"conv_([0-9a-f]{24})")
_TURN = re.compile(r"(?:resp|turn)_([0-9a-f]{24})[0-9a-f]{24}")
_OUTPUT_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})(?:_\d+)?")


def new_conversation_id() -> str:
    return f"conv_{secrets.token_hex(_NUM_BYTES)}"


def new_response_id(conversation_id: str) -> str:
    return f"resp_{conversation_id.removeprefix('conv_')}{secrets.token_hex(_NUM_BYTES)}"


def derived_response_id(*parts: str) -> str:
    """An id that depends on the parts alone, and differs for any others."""
    joined = b"".join(len(part.encode()).to_bytes(8) + part.encode() for part in parts)
    return f"resp_{hashlib.sha256(joined).hexdigest()[: 4 * _NUM_BYTES]}"


def successor_id(response_id: str) -> str:
    """The id of the response that answers what a response was steered with. It depends on that
    response alone, so that there is one, however many gateways begin it."""
    digest = hashlib.sha256(f"successor of {response_id}".encode()).hexdigest()
    return f"resp_{tree_of(response_id)}{digest[: 2 * _NUM_BYTES]}"


def new_turn_id(conversation_id: str) -> str:
    return f"turn_{conversation_id.removeprefix('conv_')}{secrets.token_hex(_NUM_BYTES)}"


def is_added(turn_id: str) -> bool:
    """Whether these are items without a response."""
    return turn_id.startswith("turn_")


def conversation_of(turn_id: str) -> str | None:
    """The conversation of a response or turn; None if the id is malformed."""
    match = _TURN.fullmatch(turn_id)
    return None if match is None else f"conv_{match[1]}"


def turn_of_item(item_id: str) -> str | None:
    """The response whose output has an item; None if the id tells of none."""
    match = _OUTPUT_ITEM.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def tree_of(id_: str) -> str | None:
    """The 24 digits that all keys of a conversation contain; None if the id is malformed."""
    match = _CONVERSATION.fullmatch(id_) or _TURN.fullmatch(id_)
    return None if match is None else match[1]
