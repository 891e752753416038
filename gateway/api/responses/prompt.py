"""Finds a turn's position in its conversation tree and builds its prompt.

A turn with `conversation` continues the tree's head; one with `previous_response_id` becomes a
sibling of any other turn that continues the same response; any other starts a new tree. Stored
token ids are reused as far as the rendered prompt begins with the same text, so that the prefix
cache finds their KV.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.engine.chat_formats import OutputFormat, tool_format_of
from penstock.engine.errors import InvalidRequestError, PromptTooLongError
from penstock.engine.request import ImageInput
from penstock.engine.vision.image_file import LoadedImage
from penstock.gateway.api.responses.schema import MAX_SUMMARY_TOKENS, ResponsesRequest
from penstock.gateway.api.responses.steering import items_of_inputs, pending_of
from penstock.gateway.api.responses.truncation import droppable, room_for_output, without
from penstock.gateway.api.schema.messages import InputItem, ItemReference, Message
from penstock.gateway.api.shared.items import (
    compaction_item,
    item_object,
    messages_of,
    shown_items,
    since_compaction,
    stored_images,
)
from penstock.gateway.auth.callers import Caller
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.cache_history import PromptShape
from penstock.gateway.generation.images.loader import ImageSource
from penstock.gateway.generation.prompt_ids import (
    Reused,
    origin_of,
    rendering_of,
    reuse,
    unknown_text,
)
from penstock.gateway.generation.request_planner import LONG_TEXT_CHARS, ChatPrompt, RequestPlanner
from penstock.gateway.generation.served_model import ServedModel
from penstock.gateway.storage.conversations.ids import (
    conversation_of,
    new_conversation_id,
    successor_id,
    turn_of_item,
)
from penstock.gateway.storage.conversations.records import Item, Rendering, StoredTurn
from penstock.gateway.storage.conversations.store import ConversationStore, NotFoundError

_CONTINUABLE = ("incomplete", "cancelled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPosition:
    """A turn's position in a tree.

    Attributes:
        is_new: the turn starts a new tree, which is not a listed conversation.
        takes_head: the request named a `conversation`, so the turn becomes its head.
        path: the turns before it, root first. In a new tree they are neither part of it nor stored.
    """

    conversation_id: str
    is_new: bool = False
    takes_head: bool = False
    path: Sequence[StoredTurn] = ()

    @property
    def previous(self) -> StoredTurn | None:
        """The turn that it continues."""
        return self.path[-1] if self.path else None

    @property
    def parent(self) -> StoredTurn | None:
        """The turn that it continues, if that turn is in the same tree."""
        return None if self.is_new else self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPrompt:
    """The prompt of the summary that comes before an answer.

    Attributes:
        request: for it.
        around: see `Compaction`.
    """

    request: ResponsesRequest
    token_ids: Sequence[int]
    output_format: OutputFormat | None
    images: tuple[ImageInput, ...]
    around: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A turn's prompt.

    Attributes:
        items: the request's items; where the turn must stand alone, preceded by all earlier ones.
        text: the text of the ids; None if they do not come from one rendering.
        origin: by what the ids were made (`Rendering`).
        output_format: how thoughts and tool calls are found in the output.
        images: in the ids.
        files: the images of all items, by digest.
        summary: what is to be written first; then a mark stands for it in this prompt.
        shape: of its messages, for comparisons.
        takes_steers: its first items are those that the turn before was steered with, which none
            but the turn of the id `successor_id` may have.
    """

    position: TurnPosition
    items: tuple[Item, ...]
    token_ids: Sequence[int]
    text: str | None
    origin: bytes
    output_format: OutputFormat | None = None
    images: tuple[ImageInput, ...] = ()
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    summary: SummaryPrompt | None = None
    takes_steers: bool = False
    shape: PromptShape | None = None

    @property
    def all_items(self) -> Sequence[Item]:
        """Also those of earlier turns."""
        position = self.position
        return self.items if position.is_new else (*all_items(position.path), *self.items)

    @property
    def rendering(self) -> Rendering:
        if self.text is None:
            return unknown_text(self.origin)
        return rendering_of(self.text, self.origin)


class _Rendered(NamedTuple):
    """A prompt's text and ids, and the images in it."""

    text: str
    token_ids: Sequence[int]
    images: Sequence[LoadedImage]
    shape: PromptShape | None


class PromptBuilder:
    """Finds a turn's position and renders its prompt."""

    def __init__(self, planner: RequestPlanner, conversations: ConversationStore) -> None:
        self._planner = planner
        self._conversations = conversations

    async def build(
        self,
        request: ResponsesRequest,
        caller: Caller,
        memory: LaneMemory | None,
        *,
        must_fit: bool = True,
        position: TurnPosition | None = None,
    ) -> Prompt:
        """The prompt of a request.

        Args:
            memory: the connection's turns that are not stored.
            must_fit: it must fit the context.
            position: where the turn is; None: where the request says.

        Raises:
            InvalidRequestError: the template refuses the messages, or the turn to continue does not
                exist.
        """
        remembered = None if memory is None else memory.turn(request.previous_response_id)
        steers: list[InputItem] = []
        if position is None:
            position = await self._position(request, caller.tenant, remembered)
            steers = await self._pending_steers(request, position.previous)
            request = request.after(steers) if steers else request
        loaded = await self._planner.images.load(image_sources(request.items, param="input"))
        new = items = await self._items(request, caller, iter(loaded))
        _check_outputs(position.path, new)
        origin = self._origin(request)
        if position.is_new or (memory is not None and not request.store):
            items = (*all_items(position.path), *new)
        if request.penstock.continues:
            model = self._planner.model
            token_ids = _token_ids_to_continue(position, model, origin)
            images = stored_images([*all_items(position.path), *new], _files(position, loaded))
            self._planner.images.check_number(len(images), param="input")
            return Prompt(
                images=self._planner.images.located(token_ids, images, param="input"),
                position=position,
                items=items,
                token_ids=token_ids,
                text=None,
                origin=origin,
                output_format=request.offered.format_within_message(model.formats),
            )
        shown = [*all_items(position.path), *new]
        files = _files(position, loaded)
        summary = None
        rendered = await self._within_threshold(request, position, shown, files, must_fit=must_fit)
        if rendered is None:
            summary, rendered = await self._compacting(request, position, shown, files)
        located = self._planner.images.located(rendered.token_ids, rendered.images, param="input")
        return Prompt(
            position=position,
            items=items,
            token_ids=rendered.token_ids,
            text=rendered.text if summary is None else None,
            origin=origin,
            output_format=await self._output_format(request, rendered.text),
            images=located,
            files=files,
            summary=summary,
            takes_steers=bool(steers),
            shape=rendered.shape,
        )

    async def _pending_steers(
        self, request: ResponsesRequest, previous: StoredTurn | None
    ) -> list[InputItem]:
        """What the turn before was steered with and has not been answered."""
        inputs = pending_of(previous)
        if previous is None or not inputs or request.penstock.continues:
            return []
        with contextlib.suppress(NotFoundError):
            await self._conversations.turn(previous.tenant, successor_id(previous.turn_id))
            return []  # another request has it
        return items_of_inputs(inputs)

    async def _output_format(self, request: ResponsesRequest, text: str) -> OutputFormat | None:
        if not request.generates:
            return None
        return request.offered.output_format(
            self._planner.model.formats,
            text,
            template=await self._planner.template_facts(request.chat_template),
        )

    async def _within_threshold(
        self,
        request: ResponsesRequest,
        position: TurnPosition,
        items: Sequence[Item],
        files: Mapping[str, bytes],
        *,
        must_fit: bool,
    ) -> _Rendered | None:
        """The rendering of a conversation; None: it is to be compacted first. Raises as `build`."""
        most = None
        if must_fit and request.context_management:
            most = request.compacts_above(await self._planner.max_model_len())
        if most is None:
            return await self._fitting(request, position, items, files, must_fit=must_fit)
        try:
            rendered = await self._rendered(request, position, items, files, must_fit=True)
        except PromptTooLongError:
            return None
        return rendered if len(rendered.token_ids) <= most else None

    async def _compacting(
        self,
        request: ResponsesRequest,
        position: TurnPosition,
        items: Sequence[Item],
        files: Mapping[str, bytes],
    ) -> tuple[SummaryPrompt, _Rendered]:
        """The prompts of a conversation's summary, and of the answer after it. Raises as `build`.

        Raises:
            InvalidRequestError: the template does not show a summary.
        """
        max_model_len = await self._planner.max_model_len()
        num_tokens = room_for_output(MAX_SUMMARY_TOKENS, max_model_len)
        asked = request.for_summary(num_tokens)
        trigger = item_object(asked.items[-1], len(items), iter(()))
        written = await self._fitting(asked, position, [*items, trigger], files, must_fit=True)
        mark = secrets.token_hex(16)
        rendered = await self._fitting(
            request,
            position,
            [*items, compaction_item(mark)],
            files,
            must_fit=True,
            num_more_tokens=num_tokens,
        )
        before, is_shown, after = rendered.text.partition(mark)
        if not is_shown or mark in after:
            raise InvalidRequestError(
                "the chat template does not show a summary as it is", param="context_management"
            )
        summary = SummaryPrompt(
            request=asked,
            token_ids=written.token_ids,
            output_format=await self._output_format(asked, written.text),
            images=self._planner.images.located(written.token_ids, written.images, param="input"),
            around=(before, after),
        )
        return summary, rendered

    async def _fitting(
        self,
        request: ResponsesRequest,
        position: TurnPosition,
        items: Sequence[Item],
        files: Mapping[str, bytes],
        *,
        must_fit: bool,
        num_more_tokens: int = 0,
    ) -> _Rendered:
        """The rendering of a conversation: with `truncation: "auto"`, of the most of it that fits.

        Args:
            num_more_tokens: which the prompt will have; then too.

        Raises as `build`.
        """
        if not (request.drops_items or num_more_tokens):
            return await self._rendered(request, position, items, files, must_fit=must_fit)
        max_model_len = await self._planner.max_model_len()
        groups = droppable(items)

        async def attempt(num_dropped: int, room: int) -> _Rendered | None:
            kept = without(items, groups[:num_dropped])
            try:
                rendered = await self._rendered(
                    request,
                    position,
                    kept,
                    files,
                    must_fit=True,
                    num_truncated=len(items) - len(kept),
                )
            except PromptTooLongError:
                if num_dropped == len(groups):
                    raise
                return None
            fits = len(rendered.token_ids) + num_more_tokens + room <= max_model_len
            return rendered if fits or num_dropped == len(groups) else None

        room = room_for_output(request.output_limit, max_model_len)
        least_room = room if request.compacts or num_more_tokens else int(request.generates)
        whole = await attempt(0, least_room)
        if whole is not None:
            return whole
        found: _Rendered | None = None
        least, most = 1, len(groups)
        while found is None or least < most:
            middle = (least + most) // 2
            rendered = await attempt(middle, room)
            if rendered is None:
                least = middle + 1
            else:
                most, found = middle, rendered
        return found

    async def _rendered(
        self,
        request: ResponsesRequest,
        position: TurnPosition,
        items: Sequence[Item],
        files: Mapping[str, bytes],
        *,
        must_fit: bool,
        num_truncated: int = 0,
    ) -> _Rendered:
        """The prompt of these items. Raises as `build`.

        Args:
            num_truncated: items of the conversation that are not among them.
        """
        images = stored_images(items, files)
        self._planner.images.check_number(len(images), param="input")
        # Instructions apply to this request only: they are not inherited.
        instructions = (
            [{"role": "system", "content": request.instructions}] if request.instructions else []
        )
        prompt = ChatPrompt(
            messages=[*instructions, *messages_of(items)],
            # A prepared prompt may be extended, so it must not end with the answer's header.
            add_generation_prompt=request.generates,
            template=request.chat_template,
            kwargs=request.template_kwargs,
            tools=request.offered.for_template,
            images=images,
            dropped=_dropped(items, num_truncated),
        )
        text = await self._planner.render_chat(prompt)
        reused: Reused = await self._planner.long_work.run(
            partial(
                reuse,
                text,
                position.path,
                self._planner.model.tokenizer,
                origin=self._origin(request),
            ),
            is_long=len(text) >= LONG_TEXT_CHARS,
        )
        rest = await self._planner.tokenise(
            reused.rest,
            add_special_tokens=False,
            param="input",
            must_fit=must_fit,
            num_known_tokens=len(reused.token_ids),
        )
        shape = self._planner.shape_of(prompt, text)
        return _Rendered(text, [*reused.token_ids, *rest], images, shape)

    def _origin(self, request: ResponsesRequest) -> bytes:
        adapter = self._planner.adapters.known(request.model)
        return self._planner.model.origin(None if adapter is None else adapter.digest)

    async def _items(
        self, request: ResponsesRequest, caller: Caller, images: Iterator[LoadedImage]
    ) -> tuple[Item, ...]:
        """The request's items as they are stored, references replaced by what they refer to.

        Args:
            images: those of the items, in order.

        Raises:
            NotFoundError: there is no such item.
        """
        return tuple(
            [
                await self._referred(item.id, index, caller)
                if isinstance(item, ItemReference)
                else item_object(item, index, images)
                for index, item in enumerate(request.items)
            ]
        )

    async def _referred(self, item_id: str, index: int, caller: Caller) -> Item:
        """An item of a response's output, whose id has that of the response in it."""
        turn_id = turn_of_item(item_id)
        if turn_id is not None:
            with contextlib.suppress(NotFoundError):
                turn = await self._conversations.turn(caller.tenant, turn_id)
                for item in turn.output:
                    if item["id"] == item_id:
                        return item
        raise NotFoundError(
            f"there is no item {item_id!r}",
            code="item_not_found",
            param=f"input[{index}].id",
            status=404,
        )

    async def _position(
        self, request: ResponsesRequest, tenant: str, remembered: StoredTurn | None
    ) -> TurnPosition:
        if request.conversation is not None:
            conversation = await self._conversations.get(tenant, request.conversation)
            head = conversation.head
            path = await self._conversations.path(tenant, head) if head is not None else []
            return TurnPosition(
                conversation_id=conversation.conversation_id, takes_head=True, path=path
            )
        previous = request.previous_response_id
        if previous is None:
            return TurnPosition(conversation_id=new_conversation_id(), is_new=True)
        if remembered is not None:
            return TurnPosition(
                conversation_id=new_conversation_id(), is_new=True, path=[remembered]
            )
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
        return TurnPosition(conversation_id=conversation_id, path=path)


def _files(position: TurnPosition, loaded: Sequence[LoadedImage]) -> dict[str, bytes]:
    """The images of a conversation and of the request, by digest."""
    files = {image.digest: image.data for image in loaded}
    for turn in position.path:
        files |= turn.images
    return files


def _dropped(items: Sequence[Item], num_truncated: int) -> Mapping[str, int]:
    """Of a conversation, by the rule that left them out: items."""
    counts = {"truncation": num_truncated, "compaction": len(items) - len(since_compaction(items))}
    return {rule: num for rule, num in counts.items() if num}


def items_of(path: Sequence[StoredTurn]) -> list[Item]:
    """The input of the last of these turns: all items of earlier turns, then its own input."""
    earlier = (item for turn in path[:-1] for item in (*shown_items(turn), *turn.output))
    return [*earlier, *shown_items(path[-1])]


def image_sources(items: Sequence[InputItem], *, param: str) -> list[ImageSource]:
    """The images of a request's items, in order.

    Args:
        param: the request's field that has the items.
    """
    return [
        ImageSource(url=image.url, param=f"{param}[{number}].content[{at}].image_url")
        for number, item in enumerate(items)
        if isinstance(item, Message)
        for at, image in item.images
    ]


def _check_outputs(path: Sequence[StoredTurn], new: Sequence[Item]) -> None:
    """Refuse the output of a call that nobody made.

    Raises:
        RequestRefusedError: there is such an output.
    """
    if not any("output" in item for item in new):
        return
    called = {item.get("call_id") for item in all_items(path)}
    for index, item in enumerate(new):
        if "output" not in item:
            called.add(item.get("call_id"))
        elif item["call_id"] not in called:
            raise RequestRefusedError(
                f"there is no tool call with the call_id {item['call_id']!r}",
                code="invalid_value",
                param=f"input[{index}].call_id",
            )


def _token_ids_to_continue(position: TurnPosition, model: ServedModel, origin: bytes) -> list[int]:
    """The ids of a turn that continues as if it had never ended.

    Raises:
        RequestRefusedError: it cannot, or its ids were made by something else than `origin`.
    """
    previous = position.previous
    if (
        previous is None
        or previous.status not in _CONTINUABLE
        or not previous.output
        or not previous.prompt_token_ids  # an item before it was deleted
        or previous.output[-1]["type"] != "message"
        or _has_begun_call(previous, model)
    ):
        raise RequestRefusedError(
            "penstock.continue needs a previous response that is incomplete, cancelled or failed, "
            "and ends within a message",
            code="invalid_value",
            param="penstock.continue",
        )
    if origin_of(previous) not in (b"", origin):
        raise RequestRefusedError(
            "the previous response is of another model, adapter or chat template, and only the one "
            "that began a message can continue it: send a message instead",
            code="response_of_another_model",
            param="penstock.continue",
            status=409,
        )
    return [*previous.prompt_token_ids, *previous.output_token_ids]


def _has_begun_call(turn: StoredTurn, model: ServedModel) -> bool:
    """Whether an output that ends with a message was cut off in a call behind it."""
    if not model.formats.tools:
        return False
    written = model.tokenizer.decode(turn.output_token_ids, skip_special_tokens=False)
    _, _, rest = written.rpartition(turn.output[-1]["content"][0]["text"])
    return any(opening in rest for opening in tool_format_of(model.formats.tools).openings)


def _no_previous(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"there is no response {response_id!r}",
        code="previous_response_not_found",
        param="previous_response_id",
    )


class LaneMemory:
    """The responses with `store: false` that a WebSocket remembers, for one of its lanes.

    As in OpenAI's WebSocket mode, the connection keeps each lane's latest one in memory. Such a
    turn stands alone: its items include all earlier ones. One that a failed turn was to continue
    is forgotten, as Open Responses wants it: client and server might not agree on what was said.

    Args:
        turns: the connection's turns by lane.
        lane: the lane of the next turn.
        continued: the id of the response that it continues, as the client says.
    """

    def __init__(
        self, turns: dict[str | None, StoredTurn], lane: str | None, continued: object = None
    ) -> None:
        self._turns = turns
        self._lane = lane
        self._continued = continued

    def turn(self, response_id: str | None) -> StoredTurn | None:
        """The remembered response of this id, on any lane."""
        return next((turn for turn in self._turns.values() if turn.turn_id == response_id), None)

    def keep(self, turn: StoredTurn) -> None:
        """Remember a turn that has ended, replacing the lane's previous one."""
        if turn.status == "failed":
            self.forget_continued()
        kept = turn.response if pending_of(turn) else b""
        self._turns[self._lane] = dataclasses.replace(turn, response=kept)

    def take_steers(self, response_id: str) -> bool:
        """A response gets what this one was steered with; False: another has it."""
        for lane, turn in self._turns.items():
            if turn.turn_id == response_id and pending_of(turn):
                self._turns[lane] = dataclasses.replace(turn, response=b"")
                return True
        return False

    def forget_continued(self) -> None:
        """The next turn has failed."""
        for lane, turn in list(self._turns.items()):
            if turn.turn_id == self._continued:
                del self._turns[lane]


def all_items(path: Sequence[StoredTurn]) -> list[Item]:
    """All items of turns. A message and its continuation are joined to one item."""
    items: list[Item] = []
    for turn in path:
        items += turn.items
        output = turn.output
        if turn.continues and _is_answer(items[-1:]) and _is_answer(output[:1]):
            items[-1], output = _joined(items[-1], output[0]), output[1:]
        items += output
    return items


def _is_answer(items: Sequence[Item]) -> bool:
    return any(item["type"] == "message" and item["role"] == "assistant" for item in items)


def _joined(first: Item, second: Item) -> Item:
    """A message whose last part goes on in the first part of the second one."""
    *parts, begun = first["content"]
    rest, *others = second["content"]
    logprobs = [*begun["logprobs"], *rest["logprobs"]]
    whole = {**rest, "text": begun["text"] + rest["text"], "logprobs": logprobs}
    return {**second, "content": [*parts, whole, *others]}
