"""What a response's events tell: its id, the position in its events, and whether it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ProtocolError

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def successor_of(event: Mapping[str, Any]) -> str | None:
    """The response that goes on after the one that this event ends, if that was steered."""
    if event["type"] not in TERMINAL:
        return None
    steers = steers_of(event["response"])
    return next((each["successor_id"] for each in steers if "successor_id" in each), None)


def steers_of(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What became of what an ended response was steered with."""
    steers: Sequence[Mapping[str, Any]] = (response.get("penstock") or {}).get("steers", ())
    return steers


class Track:
    """The position in one response's events.

    Attributes:
        response_id: None before its first event.
        last_number: of the newest event; -1 before the first.
        is_ended: the terminal event has arrived.
        is_resumable: False once an event has said that the server could not store the response.
    """

    def __init__(self, response_id: str | None = None, *, starting_after: int = -1) -> None:
        self.response_id = response_id
        self.last_number = starting_after
        self.is_ended = False
        self.is_resumable = True

    def take(self, event: Mapping[str, Any]) -> bool:
        """Record an event; whether it is new. Events without a number (`penstock.*`) always are.

        Raises:
            ProtocolError: events before it are missing, or it comes after the end.
        """
        number = event.get("sequence_number")
        if number is None:
            return True
        if number <= self.last_number:
            return False
        if number != self.last_number + 1:
            raise ProtocolError(f"event {number} came after event {self.last_number}")
        if self.is_ended:
            raise ProtocolError(f"event {number} came after the terminal event")
        self.last_number = number
        extra = event.get("penstock")
        if isinstance(extra, Mapping) and extra.get("resumable") is False:
            self.is_resumable = False
        self.is_ended = event["type"] in TERMINAL
        if self.response_id is None and "response" in event:
            self.response_id = event["response"]["id"]
        return True
