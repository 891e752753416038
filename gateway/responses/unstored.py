"""What a WebSocket remembers of responses that are not stored: they can be continued on it.

As in OpenAI's WebSocket mode: the latest one of every lane, in memory, gone with the connection.
Such a turn stands alone: its items are all that was said before. Not known here: how it is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.gateway.conversations.records import Item, StoredTurn


class LaneMemory:
    """The memory of a connection, as one of its lanes sees it.

    Args:
        turns: by lane; of the whole connection.
        lane: the one that the next turn is of.
    """

    def __init__(self, turns: dict[str | None, StoredTurn], lane: str | None) -> None:
        self._turns = turns
        self._lane = lane

    def turn(self, response_id: str | None) -> StoredTurn | None:
        """The response, if it is any lane's latest that is not stored."""
        return next((turn for turn in self._turns.values() if turn.turn_id == response_id), None)

    def keep(self, turn: StoredTurn) -> None:
        """Remember a turn that has ended, in place of the lane's one before."""
        self._turns[self._lane] = dataclasses.replace(turn, response=b"")


def items_said(path: Sequence[StoredTurn]) -> list[Item]:
    """All items of turns; an answer in two halves is one."""
    items: list[Item] = []
    for turn in path:
        items += turn.items
        if turn.output is None:
            continue
        if turn.continues and items and items[-1]["role"] == turn.output["role"]:
            items[-1] = _joined(items[-1], turn.output)
        else:
            items.append(turn.output)
    return items


def _joined(first: Item, second: Item) -> Item:
    [begun], [rest] = first["content"], second["content"]
    logprobs = [*begun["logprobs"], *rest["logprobs"]]
    return {
        **second,
        "content": [{**rest, "text": begun["text"] + rest["text"], "logprobs": logprobs}],
    }
