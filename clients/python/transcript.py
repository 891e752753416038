"""The turns of a conversation as a tree, and one path through it as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, perhaps incomplete.

    Attributes:
        number: from 1, in the order of the questions.
        parent: the turn that it continues; None: the beginning of the conversation.
    """

    number: int
    parent: Turn | None
    question: str
    answer: str
    response_id: str


class Transcript:
    """All turns, and the one to continue from.

    Attributes:
        head: the turn to continue from; None at the beginning.
        response_ids: of all turns, with those that a turn has had before.
    """

    def __init__(self) -> None:
        self.head: Turn | None = None
        self.response_ids: set[str] = set()
        self._turns: list[Turn] = []

    def add(self, question: str, answer: str, *, response_id: str, parent: Turn | None) -> Turn:
        """Add a turn, which becomes the head."""
        self.head = Turn(len(self._turns) + 1, parent, question, answer, response_id)
        self._turns.append(self.head)
        self.response_ids.add(response_id)
        return self.head

    def replace(self, turn: Turn) -> None:
        """Change the turn of the same number."""
        self._turns[turn.number - 1] = turn
        self.response_ids.add(turn.response_id)

    def go_to(self, number: int) -> None:
        """Make a turn the head; 0 is the beginning.

        Raises:
            ValueError: there is no such turn.
        """
        if not 0 <= number <= len(self._turns):
            raise ValueError(f"there is no turn {number}; there are {len(self._turns)}")
        self.head = self._turns[number - 1] if number else None

    def path(self) -> list[Turn]:
        """The turns from the beginning to the head."""
        turns: list[Turn] = []
        turn = self.head
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def outline(self) -> Iterator[str]:
        """A line for each turn, naming its parent if that is not the line above."""
        for turn in self._turns:
            mark = "*" if turn is self.head else " "
            after = turn.parent.number if turn.parent else 0
            branch = f" (after {after})" if after != turn.number - 1 else ""
            first_line = turn.question.splitlines()[0] if turn.question else ""
            yield f"{mark}{turn.number:3}  {first_line[:60]}{branch}"

    def save(self, path: Path, *, model: str) -> None:
        """Write the path to the head as Markdown.

        Raises:
            OSError: the file cannot be written, or exists already.
        """
        parts = [f"# A conversation with {model}\n"]
        for turn in self.path():
            quoted = "\n".join(f"> {line}".rstrip() for line in turn.question.splitlines())
            parts.append(f"{quoted}\n\n{turn.answer.rstrip()}\n")
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(parts))
