"""The terminal chat's conversations on the server, which are those of the page: the one under way,
their list, what words find in them, and one that is opened again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .client import AsyncClient
from .errors import ConflictError
from .objects import Conversation, ConversationTree
from .objects import Turn as StoredTurn
from .transcript import Transcript, Turn

NUM_LISTED = 20
_MAX_TITLE_CHARS = 80
_ARRIVING_S = (0.0, 0.3, 0.7)  # waits for a request that the server has not begun yet
# Of the page's settings, what a request carries. They are texts.
_WHOLE = ("top_k", "seed", "max_output_tokens")
_NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed:
    """A conversation in a list; `excerpt`: where it has the words that were looked for."""

    conversation_id: str
    title: str
    used_at: int
    excerpt: str = ""

    def line(self, number: int) -> str:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.used_at))
        found = f"\n     {_on_one_line(self.excerpt)}" if self.excerpt else ""
        return f"{number:3}  {used}  {self.title}{found}"


@dataclass(frozen=True, slots=True)
class Running:
    """A turn that is being answered."""

    question: str
    parent: Turn | None
    response_id: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation as the server has it.

    Attributes:
        parameters: what the page was told to ask for: model, system prompt, sampling.
    """

    title: str
    transcript: Transcript
    running: Running | None
    parameters: Mapping[str, Any]


class StoredConversation:
    """The conversation under way, on the server.

    Attributes:
        conversation_id: None before its first question.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.conversation_id: str | None = None

    async def go_to(self, turn: Turn | None, *, question: str) -> bool:
        """Have the next turn continue `turn`, or begin the conversation, titled by its question.

        Returns:
            Whether someone else has continued it meanwhile; the next turn is then a branch.

        Raises:
            NotFoundError: it was deleted.
        """
        conversations, wanted = self._client.conversations, turn.response_id if turn else None
        if self.conversation_id is None:
            title = _on_one_line(question)[:_MAX_TITLE_CHARS]
            made = await conversations.create(metadata={"title": title})
            self.conversation_id = made["id"]
            return False
        try:
            await conversations.set_head(self.conversation_id, wanted, expected=wanted)
        except ConflictError:
            tree = await conversations.tree(self.conversation_id)
            await conversations.set_head(self.conversation_id, wanted, expected=tree["head"])
            children = {each["turn"]: each["parent"] for each in tree["data"]}
            return children.get(tree["head"] or "") == wanted
        return False

    async def response_after(self, turn: Turn | None, known: Collection[str]) -> str | None:
        """The response that continues `turn` and is not known: the one that was requested when the
        connection broke; None: the request did not arrive."""
        assert self.conversation_id is not None
        wanted = turn.response_id if turn else None
        for wait_s in _ARRIVING_S:
            await asyncio.sleep(wait_s)
            unknown = [
                each["response_id"]
                for each in (await self._tree())["data"]
                if each["parent"] == wanted and each["turn"] not in known
            ]
            if unknown:
                return unknown[-1]
        return None

    async def forget_if_empty(self) -> None:
        """Delete it if it has no turn: its first question was refused."""
        if self.conversation_id is not None and not (await self._tree())["data"]:
            await self._client.conversations.delete(self.conversation_id)
            self.conversation_id = None

    async def open(self, conversation_id: str) -> Opened:
        """Go on with another one."""
        conversations = self._client.conversations
        conversation = await conversations.retrieve(conversation_id)
        tree = await conversations.tree(conversation_id, items="all")
        self.conversation_id = conversation_id
        transcript, running = read_tree(tree)
        settings = _settings_in(conversation["metadata"])
        return Opened(title_of(conversation), transcript, running, settings)

    async def _tree(self) -> ConversationTree:
        assert self.conversation_id is not None
        return await self._client.conversations.tree(self.conversation_id)


async def recent(client: AsyncClient) -> tuple[list[Listed], bool]:
    """The conversations that were used last, and whether there are more."""
    page = await client.conversations.list(limit=NUM_LISTED)
    found = [Listed(one["id"], title_of(one), one["used_at"]) for one in page["data"]]
    return found, page["has_more"]


async def search(client: AsyncClient, words: str) -> list[Listed]:
    """Conversations that have these words, each once, the newest first."""
    found: dict[str, Listed] = {}
    for hit in (await client.conversations.search(words, limit=NUM_LISTED))["data"]:
        one = hit["conversation"]
        excerpt = hit["excerpt"] if hit["turn"] else ""
        found.setdefault(one["id"], Listed(one["id"], title_of(one), one["used_at"], excerpt))
    return list(found.values())


def title_of(conversation: Conversation) -> str:
    """Its title, or when it began."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(conversation["created_at"]))
    title = _on_one_line(conversation["metadata"].get("title", ""))
    return title or f"Conversation of {began}"


def read_tree(tree: ConversationTree) -> tuple[Transcript, Running | None]:
    """A conversation's turns (read with all their items), and the one that runs. A turn that gives
    tools' outputs is a part of the answer before it; failed turns are left out."""
    transcript, turns, running = Transcript(), dict[str, Turn](), None
    for each in tree["data"]:
        parent, items = turns.get(each["parent"] or ""), each.get("items", [])
        said = [item for item in items if item.get("role") == "assistant"]  # of one that was added
        question = _text_of([item for item in items if item not in said])
        answer = _text_of([*said, *_output_of(each)])
        if each["status"] == "in_progress":
            if each["response_id"]:
                running = Running(question, parent, each["response_id"])
        elif each["status"] != "failed":
            is_outputs = bool(items) and all(i["type"] == "function_call_output" for i in items)
            if parent is not None and is_outputs:
                whole = "\n\n".join(filter(None, (parent.answer, answer)))
                turn = dataclasses.replace(parent, answer=whole, response_id=each["turn"])
                transcript.replace(turn)
                turns |= {key: turn for key, old in turns.items() if old.number == turn.number}
            else:
                turn = transcript.add(question, answer, response_id=each["turn"], parent=parent)
            turns[each["turn"]] = turn
    transcript.head = turns.get(tree["head"] or "")
    return transcript, running


def _output_of(turn: StoredTurn) -> Sequence[Any]:
    output = turn.get("output") or []
    return output if isinstance(output, list) else [output]


def _text_of(items: Sequence[Any]) -> str:
    """What the messages among items say; `[image]` for each picture."""
    parts = [
        part.get("text") or ("[image]" if part["type"] == "input_image" else "")
        for item in items
        if item["type"] == "message"
        for part in item["content"]
    ]
    return "\n".join(filter(None, parts))


def _settings_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The page's settings of a conversation, as parameters: JSON in pieces, in its metadata."""
    pieces: list[str] = []
    while (piece := metadata.get(f"settings_{len(pieces)}")) is not None:
        pieces.append(piece)
    try:
        settings = json.loads("".join(pieces) or "{}")
        found = {name: float(settings[name]) for name in _NUMBERS if settings.get(name)}
        found |= {name: int(settings[name]) for name in _WHOLE if settings.get(name)}
        found |= json.loads(settings.get("further") or "{}")
        texts = {name: settings[name] for name in ("model", "instructions") if settings.get(name)}
    except (ValueError, TypeError, AttributeError):  # others may write metadata
        return {}
    return found | {name: text for name, text in texts.items() if isinstance(text, str)}


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
