"""`truncation: "auto"`: which of a conversation's items are dropped, and in which order, until the
prompt fits the context.

First whole turns, oldest first, each from a user's message to the next one, since templates want a
conversation to begin with a user. Then, of the last turn, what the assistant did before its last
step, so that a long run of tool calls fits too. System messages, compactions and the last user's
message stay, and no call goes without its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.api.shared.items import CALLS, OUTPUTS
from penstock.gateway.storage.conversations.records import Item

_ROOM = 8  # an eighth of the context is left for the output, or less if it may have less


def room_for_output(max_output_tokens: int | None, max_model_len: int) -> int:
    """Tokens to leave free where items are dropped anyway: with a room of one token, the answer
    would end at once, and each turn would drop items again."""
    share = max(max_model_len // _ROOM, 1)
    return share if max_output_tokens is None else max(min(share, max_output_tokens), 1)


def droppable(items: Sequence[Item]) -> list[list[int]]:
    """The indices of what can be dropped, in groups that go together, the first one first."""
    turns: list[list[int]] = [[]]
    for index, item in enumerate(items):
        role = item.get("role")
        if role in ("system", "developer") or items[index]["type"].startswith("compaction"):
            continue
        if role == "user":
            turns.append([])
        turns[-1].append(index)
    *earlier, last = turns
    steps: list[list[int]] = []
    has_outputs = True  # of the newest step
    for index in last:
        if items[index].get("role") == "user":
            continue
        is_output = items[index]["type"] in OUTPUTS
        if (has_outputs and not is_output) or not steps:
            steps.append([])
        has_outputs = is_output
        steps[-1].append(index)
    return [group for group in (*earlier, *steps[:-1]) if group]


def without(items: Sequence[Item], groups: Sequence[Sequence[int]]) -> list[Item]:
    """The items without these groups, and without the outputs of calls in them."""
    dropped = {index for group in groups for index in group}
    kept = [item for index, item in enumerate(items) if index not in dropped]
    called = {item["call_id"] for item in kept if item["type"] in CALLS}
    return [item for item in kept if item["type"] not in OUTPUTS or item["call_id"] in called]
