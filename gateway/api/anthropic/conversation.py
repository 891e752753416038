"""From messages of Anthropic's API to the items that all APIs share, and from there to the chat
template's messages.

    user       text, images           a message
               tool_result            the output of a call; its images are the user's, after it
    assistant  thinking               a thought
               text, tool_use         a message, a call
    system     text                   a message, at its place

Several messages of one role in a row are one, as in Anthropic's API.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.api.anthropic.blocks import (
    AnyMessage,
    AssistantMessage,
    ImageBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResult,
    ToolUse,
    UserMessage,
)
from penstock.gateway.api.anthropic.schema import Conversation
from penstock.gateway.api.shared.items import messages_of
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images.loader import ImageSource
from penstock.gateway.storage.conversations.records import Item
from penstock.gateway.storage.sealed_text import unsealed

# Claude Code's first system block: which version it is, and a digest that changes with each
# request, so that no prompt would begin as the one before.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:(?: [a-z_]+=[^;\n]*;)+ *(?:\n|\Z)")
_SIGNATURE = "penstock.0."
_IMAGE: Item = {"type": "input_image"}


@dataclass(slots=True)
class _Items:
    """Attributes:
    sources: of the images, in the order of the items.
    dropped: see `ChatPrompt`.
    """

    found: list[Item] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def say(self, role: str, part: Item) -> None:
        """A part of a message, which is the last item if that has the role."""
        last = self.found[-1] if self.found else None
        if last is None or last.get("role") != role:
            self.found.append({"type": "message", "role": role, "content": [part]})
        else:
            last["content"].append(part)  # made here

    def show(self, image: ImageBlock, place: str) -> None:
        self.sources.append(ImageSource(url=image.source.as_url, param=f"{place}.source"))
        self.say("user", _IMAGE)


def chat_messages(
    asked: Conversation, *, drops_billing_line: bool
) -> tuple[list[dict[str, Any]], list[ImageSource], Mapping[str, int]]:
    """The messages of a request as chat templates expect them, the images in them, in order, and
    what was dropped (`ChatPrompt`).

    Args:
        drops_billing_line: leave out the line that Claude Code begins its system prompt with.
    """
    items = _Items()
    system = list(asked.system)
    if system and drops_billing_line:
        rest = without_billing_line(system[0].text)
        items.dropped["billing_line"] += rest != system[0].text
        system = [TextBlock(text=rest), *system[1:]] if rest else system[1:]
    for block in system:
        items.say("system", _text(block.text))
    last_user = max(
        (at for at, each in enumerate(asked.messages) if isinstance(each, UserMessage)), default=-1
    )
    first_thought = _first_thought(asked.messages, asked.context_management.num_thinking_turns)
    for number, message in enumerate(asked.messages):
        place = f"messages[{number}].content"
        if isinstance(message, UserMessage):
            _add_user(items, message, place)
        elif isinstance(message, AssistantMessage):
            _add_assistant(items, message, place, thinks=number >= first_thought)
        else:
            assert isinstance(message, SystemMessage)
            if message.clear_at == "next_user_message" and number < last_user:
                items.dropped["clear_at"] += 1
                continue
            for part in message.content:
                if isinstance(part, TextBlock):
                    items.say("system", _text(part.text))
    return messages_of(items.found), items.sources, +items.dropped


def without_billing_line(text: str) -> str:
    """A system prompt's first text without the line, if it begins with it; nothing else changes."""
    begun = _BILLING_LINE.match(text)
    return text if begun is None else text[begun.end() :]


def _add_user(items: _Items, message: UserMessage, place: str) -> None:
    images: list[tuple[ImageBlock, str]] = []  # of results: they come after all of these
    for at, block in enumerate(message.content):
        here = f"{place}[{at}]"
        if isinstance(block, ToolResult):
            items.found.append(
                {
                    "type": "function_call_output",
                    "call_id": block.tool_use_id,
                    "output": _output_of(block),
                }
            )
            images += [
                (part, f"{here}.content[{index}]")
                for index, part in enumerate(block.content)
                if isinstance(part, ImageBlock)
            ]
            continue
        while images:
            items.show(*images.pop(0))
        if isinstance(block, ImageBlock):
            items.show(block, here)
        else:
            items.say("user", _text(block.text))
    for image in images:
        items.show(*image)


def _output_of(result: ToolResult) -> str:
    """The text of a tool's result. That it is an error has no place in chat templates, so its text
    says it."""
    texts = [text for part in result.content if (text := _text_of(part)) is not None]
    output = "\n".join(texts)
    is_said = output[:5].lower() == "error"
    return f"Error: {output}" if result.is_error and not is_said else output


def _text_of(part: TextBlock | ImageBlock | ToolReference) -> str | None:
    if isinstance(part, ImageBlock):
        return None
    return part.text if isinstance(part, TextBlock) else part.tool_name


def _first_thought(messages: Sequence[AnyMessage], num_turns: int | None) -> int:
    """The first message whose thoughts are left, if they are in this many turns of the assistant,
    the last ones. What it does with tools until it is asked again is one turn."""
    if num_turns is None:
        return 0
    num_seen, has_answer = 0, False
    for number in reversed(range(len(messages))):
        message = messages[number]
        has_answer = has_answer or isinstance(message, AssistantMessage)
        asks = isinstance(message, UserMessage) and not all(
            isinstance(block, ToolResult) for block in message.content
        )
        if asks and has_answer:
            num_seen, has_answer = num_seen + 1, False
            if num_seen == num_turns:
                return number
    return 0


def _add_assistant(items: _Items, message: AssistantMessage, place: str, *, thinks: bool) -> None:
    for at, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            items.say("assistant", {"type": "output_text", "text": block.text})
        elif isinstance(block, ThinkingBlock):
            thought = block.thinking or unsealed(block.signature)
            if thought and not thinks:
                items.dropped["clear_thinking"] += 1
            elif thought:
                content = [{"type": "reasoning_text", "text": thought}]
                items.found.append({"type": "reasoning", "content": content, "summary": []})
        elif isinstance(block, ToolUse):
            items.found.append(
                {
                    "type": "function_call",
                    "call_id": block.id,
                    "name": block.name,
                    "arguments": _arguments(block, f"{place}[{at}].input"),
                }
            )


def _arguments(call: ToolUse, param: str) -> str:
    try:
        return json.dumps(call.input, ensure_ascii=False)  # with spaces, as models write it
    except RecursionError:
        raise RequestRefusedError(
            f"{param} is nested too deeply", code="invalid_value", param=param
        ) from None


def _text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def signature_of(thought: str) -> str:
    """The signature of a thought that is shown. It is not checked when it comes back: a client may
    have the thoughts of another server in its conversation."""
    return _SIGNATURE + hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def marks_cache(body: dict[str, Any]) -> bool:
    """Whether a request says what to cache. Everything is cached anyway; only then does its usage
    say how much of the prompt is new in the cache."""
    return "cache_control" in body or any("cache_control" in each for each in _blocks(body))


def _blocks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    messages: Sequence[Any] = body.get("messages") or ()
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    for blocks in (body.get("system"), body.get("tools"), *contents):
        if isinstance(blocks, list):
            yield from (block for block in blocks if isinstance(block, dict))
