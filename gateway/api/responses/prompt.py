"""What a turn is answered from: its place in a tree of turns, and the prompt that comes of it.

A turn by `conversation` takes its head; one by `previous_response_id` makes a sibling of whatever
else continues that response, in the same tree; any other begins a tree of its own. Token ids that
are stored are used again where the rendered prompt begins as it did then, so that the prefix cache
finds their KV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.gateway.api.items import for_template, item_objects
from penstock.gateway.api.responses.schema import ResponsesRequest
from penstock.gateway.auth.callers import Caller
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.generator import LONG_TEXT_CHARS, ChatPrompt, Generator
from penstock.gateway.storage.conversations.ids import conversation_of, new_conversation_id
from penstock.gateway.storage.conversations.prompt_ids import Reused, rendering_of, reuse
from penstock.gateway.storage.conversations.records import Item, Rendering, StoredTurn
from penstock.gateway.storage.conversations.store import ConversationStore, NotFoundError

_BROKEN_OFF = ("incomplete", "cancelled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in which tree a turn stands.

    Attributes:
        is_new: the tree begins with it, and is no listed conversation.
        takes_head: it was asked for by `conversation`.
        path: the turns before it, root first. Of a new tree they are not in it, nor stored.
    """

    conversation_id: str
    is_new: bool = False
    takes_head: bool = False
    path: Sequence[StoredTurn] = ()

    @property
    def previous(self) -> StoredTurn | None:
        """What it continues."""
        return self.path[-1] if self.path else None

    @property
    def parent(self) -> StoredTurn | None:
        """The same, if that is in its tree."""
        return None if self.is_new else self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A turn's prompt.

    Attributes:
        items: what came in; all that was said before too, where the turn is to stand alone.
        text: what the ids stand for; None where they are not of one rendering.
    """

    place: Place
    items: tuple[Item, ...]
    token_ids: Sequence[int]
    text: str | None

    @property
    def rendering(self) -> Rendering | None:
        return None if self.text is None else rendering_of(self.text)


class PromptBuilder:
    """Finds a turn's place and renders its prompt."""

    def __init__(self, generator: Generator, conversations: ConversationStore) -> None:
        self._generator = generator
        self._conversations = conversations

    async def build(
        self, request: ResponsesRequest, caller: Caller, memory: LaneMemory | None
    ) -> Prompt:
        """The prompt of a request.

        Args:
            memory: where turns that are not stored are remembered.

        Raises:
            InvalidRequestError: the template refuses it, or what it continues is not there.
        """
        remembered = None if memory is None else memory.turn(request.previous_response_id)
        place = await self._place(request, caller.tenant, remembered)
        new = items = item_objects(request.items)
        if place.is_new or (memory is not None and not request.store):
            items = (*items_said(place.path), *new)
        if request.penstock.continues:
            return Prompt(place=place, items=items, token_ids=_broken_off(place), text=None)
        # Instructions are those of this request alone: they are not inherited.
        instructions = (
            [{"role": "system", "content": request.instructions}] if request.instructions else []
        )
        text = await self._generator.render_chat(
            ChatPrompt(
                messages=[*instructions, *history(place.path), *map(for_template, new)],
                # What follows a prepared prompt may be more of it.
                add_generation_prompt=request.generates,
                template=request.chat_template,
                kwargs=request.chat_template_kwargs,
            )
        )
        reused: Reused = await self._generator.long_work.run(
            partial(reuse, text, place.path, self._generator.model.tokenizer),
            is_long=len(text) >= LONG_TEXT_CHARS,
        )
        rest = await self._generator.tokenise(
            reused.rest,
            add_special_tokens=False,
            param="input",
            must_fit=True,
            num_known_tokens=len(reused.token_ids),
        )
        return Prompt(place=place, items=items, token_ids=[*reused.token_ids, *rest], text=text)

    async def _place(
        self, request: ResponsesRequest, tenant: str, remembered: StoredTurn | None
    ) -> Place:
        if request.conversation is not None:
            conversation = await self._conversations.get(tenant, request.conversation)
            head = conversation.head
            path = await self._conversations.path(tenant, head) if head is not None else []
            return Place(conversation_id=conversation.conversation_id, takes_head=True, path=path)
        previous = request.previous_response_id
        if previous is None:
            return Place(conversation_id=new_conversation_id(), is_new=True)
        if remembered is not None:
            return Place(conversation_id=new_conversation_id(), is_new=True, path=[remembered])
        conversation_id = conversation_of(previous)
        try:
            path = await self._conversations.path(tenant, previous)
        except NotFoundError as error:
            raise _no_previous(previous) from error
        assert conversation_id is not None
        if path[-1].status == "in_progress":
            raise RequestRefusedError(
                f"the response {previous!r} is still running",
                code="previous_response_in_progress",
                param="previous_response_id",
                status=409,
            )
        return Place(conversation_id=conversation_id, path=path)


def history(path: Sequence[StoredTurn]) -> list[dict[str, str]]:
    """The messages of turns, as chat templates know them."""
    messages: list[dict[str, str]] = []
    for turn in path:
        messages += [for_template(item) for item in turn.items]
        if turn.output is None:
            continue
        said = for_template(turn.output)
        if turn.continues and messages and messages[-1]["role"] == said["role"]:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + said["content"]}
        else:
            messages.append(said)
    return messages


def items_of(path: Sequence[StoredTurn]) -> list[Item]:
    """All that the last of these turns was made from: what was said before, then what came in."""
    items: list[Item] = []
    for turn in path[:-1]:
        items += turn.items
        if turn.output is not None:
            items.append(turn.output)
    return [*items, *path[-1].items]


def _broken_off(place: Place) -> list[int]:
    """The ids of a turn that is to go on as if it had never ended."""
    previous = place.previous
    if previous is None or previous.status not in _BROKEN_OFF or previous.output is None:
        raise RequestRefusedError(
            "penstock.continue needs a previous response that is incomplete",
            code="invalid_value",
            param="penstock.continue",
        )
    return [*previous.prompt_token_ids, *previous.output_token_ids]


def _no_previous(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"no response {response_id!r} is stored here",
        code="previous_response_not_found",
        param="previous_response_id",
    )


class LaneMemory:
    """What a WebSocket remembers of responses that are not stored, as one of its lanes sees it.

    As in OpenAI's WebSocket mode: the latest one of every lane, in memory, gone with the
    connection. Such a turn stands alone: its items are all that was said before.

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
