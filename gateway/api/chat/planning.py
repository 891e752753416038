"""From a conversation to a generation, for all APIs that send it whole every turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

from penstock.engine.chat_formats import OfferedTools
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.generation.cache_history import NO_PREDECESSOR, Predecessor
from penstock.gateway.generation.context_limits import GenerationOptions
from penstock.gateway.generation.generation import Generation
from penstock.gateway.generation.request_planner import ChatPrompt, RequestPlanner


class Asked(Protocol):
    """A request with tools, whatever API it came by."""

    @property
    def offered(self) -> OfferedTools: ...

    @property
    def session(self) -> str:
        """What the caller names the conversation, or itself; empty: nothing."""
        ...

    def options(self, model_defaults: Mapping[str, Any]) -> GenerationOptions: ...


class RenderedChat(NamedTuple):
    text: str
    token_ids: Sequence[int]


async def rendered(
    planner: RequestPlanner, prompt: ChatPrompt, *, must_fit: bool, scope: Scope
) -> RenderedChat:
    """The text and the token ids of a conversation. Raises as `RequestPlanner.render_chat` and
    `tokenise`."""
    text = await planner.render_chat(prompt)
    token_ids = await planner.tokenise_chat(
        text,
        add_special_tokens=prompt.add_special_tokens,
        must_fit=must_fit,
        tenant=caller_of(scope).tenant,
    )
    return RenderedChat(text, token_ids)


async def planned(
    planner: RequestPlanner,
    request_id: str,
    prompt: ChatPrompt,
    asked: Asked,
    *,
    scope: Scope,
    cut: Callable[[Sequence[int]], Sequence[int]] | None = None,
    predecessor: Predecessor = NO_PREDECESSOR,
) -> Generation:
    """The generation that answers a conversation.

    Args:
        cut: what is kept of the prompt; None: it must fit.
        predecessor: see `RequestPlanner.plan`.

    Raises as `RequestPlanner.plan`.
    """
    chat = await rendered(planner, prompt, must_fit=cut is None, scope=scope)
    model = planner.model
    template = await planner.template_facts(prompt.template)
    output_format = asked.offered.output_format(model.formats, chat.text, template=template)
    options = asked.options(model.sampling_defaults())
    return await planner.plan(
        request_id,
        chat.token_ids if cut is None else cut(chat.token_ids),
        await planner.constrained(options, asked.offered, output_format),
        param="messages",
        caller=caller_of(scope),
        deadline_s=deadline_of(scope),
        images=planner.images.located(chat.token_ids, prompt.images, param="messages")
        if prompt.images
        else (),
        shape=planner.shape_of(prompt, chat.text),
        predecessor=predecessor,
        # A tool call is soon followed by its result, whatever the session is called.
        session=asked.session or (request_id if asked.offered.tools else ""),
        is_agent=_has_called(prompt.messages),
    )


def _has_called(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last answer in a conversation has tool calls."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return bool(message.get("tool_calls"))
    return False
