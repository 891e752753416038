"""Plans responses: what was asked for, and its prompt, become generations that are admitted, and
the header of the log (`record.LogHeader`), from which any gateway could run the response.

Nothing is stored here: a response that is only planned leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.request import Retention, SamplingParams
from penstock.gateway.admission.admission import PartReservation, Reservation
from penstock.gateway.api.responses.prompt import LaneMemory, Prompt, SummaryPrompt
from penstock.gateway.api.responses.schema import ResponsesRequest
from penstock.gateway.api.schema.tools import echo_of
from penstock.gateway.api.shared.items import CALLS, OUTPUTS
from penstock.gateway.auth.callers import Caller
from penstock.gateway.generation.cache_history import NO_PREDECESSOR
from penstock.gateway.generation.generation import Generation
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.storage.conversations.records import Item
from penstock.gateway.storage.response_log.record import Compaction, LogHeader

_ASKING = ("system", "developer", "user")  # roles


@dataclass(frozen=True, slots=True)
class Asked:
    """What a response is for.

    Attributes:
        model: its name in the answer.
        memory: see `ResponseService.create`.
        settings: see `LogHeader`.
    """

    request: ResponsesRequest
    caller: Caller
    model: str
    deadline_s: float | None
    memory: LaneMemory | None
    settings: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PlannedResponse:
    """A response that is admitted and not stored."""

    asked: Asked
    prompt: Prompt
    header: LogHeader
    generation: Generation
    summary: Generation | None


class ResponsePlanner:
    """
    Args:
        retention_s: how long the engine should keep the KV of a stored turn; 0 gives no hint.
    """

    def __init__(self, planner: RequestPlanner, *, retention_s: float) -> None:
        self._planner = planner
        self._retention = Retention(duration_s=retention_s) if retention_s > 0 else None

    async def plan(self, asked: Asked, prompt: Prompt, response_id: str) -> PlannedResponse:
        """Plan a response. Raises as `ResponseService.create`."""
        request, caller = asked.request, asked.caller
        retention = self._retention if request.store else None
        generation = await self.generation(
            response_id, request, prompt, caller, deadline_s=asked.deadline_s, retention=retention
        )
        try:
            summary = None
            if prompt.summary is not None:
                summary = await self.generation(
                    f"{response_id}_summary",
                    prompt.summary.request,
                    prompt.summary,
                    caller,
                    reservation=PartReservation(generation.reservation),
                )
            header = _header(asked, prompt, generation, summary)
        except BaseException:
            generation.discard()
            raise
        return PlannedResponse(asked, prompt, header, generation, summary)

    async def generation(
        self,
        response_id: str,
        request: ResponsesRequest,
        prompt: Prompt | SummaryPrompt,
        caller: Caller,
        *,
        deadline_s: float | None = None,
        retention: Retention | None = None,
        reservation: Reservation | None = None,
    ) -> Generation:
        """Plan the generation of a prompt. Raises as `ResponseService.create`.

        Args:
            reservation: see `RequestPlanner.plan`.
        """
        options = request.options(self._planner.model.sampling_defaults())
        return await self._planner.plan(
            response_id,
            prompt.token_ids,
            await self._planner.constrained(options, request.offered, prompt.output_format),
            param="input",
            caller=caller,
            deadline_s=deadline_s,
            retention=retention,
            images=prompt.images,
            reservation=reservation,
            shape=prompt.shape if isinstance(prompt, Prompt) else None,
            predecessor=request.predecessor if isinstance(prompt, Prompt) else NO_PREDECESSOR,
            session=prompt.position.conversation_id if isinstance(prompt, Prompt) else "",
            is_agent=isinstance(prompt, Prompt) and _has_called(prompt.items),
        )


def _has_called(items: Sequence[Item]) -> bool:
    """Whether the last answer before a turn's own messages ended in a tool call."""
    given = (item for item in reversed(items) if item.get("role") not in _ASKING)
    return next(given, {}).get("type") in (*CALLS, *OUTPUTS)


def _header(
    asked: Asked, prompt: Prompt, generation: Generation, summary: Generation | None
) -> LogHeader:
    request, position, rendering = asked.request, prompt.position, prompt.rendering
    compaction = None
    if summary is not None and prompt.summary is not None:
        compaction = Compaction(
            request=summary.request,
            output_format=summary.output_format,
            around=prompt.summary.around,
        )
    return LogHeader(
        response_id=generation.request.request_id,
        conversation_id=position.conversation_id,
        tenant=asked.caller.tenant,
        key_id=asked.caller.key_id,
        nonce=generation.request.request_id.removeprefix("resp_"),
        created_at=int(time.time()),
        echo=_echo_of(request, model=asked.model, params=generation.request.sampling_params),
        request=generation.request,
        parent_id=None if position.parent is None else position.parent.turn_id,
        takes_head=position.takes_head,
        generates=request.generates,
        is_background=request.background,
        continues=request.penstock.continues,
        input_items=prompt.items,
        rendering=(rendering.num_chars, rendering.digest, rendering.origin),
        output_format=generation.output_format,
        compaction=compaction,
        settings=asked.settings,
    )


def _echo_of(request: ResponsesRequest, *, model: str, params: SamplingParams) -> dict[str, Any]:
    """The fields of a Response object that repeat the request.

    Args:
        model: the model name in the answer.
        params: the effective sampling parameters.
    """
    conversation = request.conversation
    asked = request.prompt_cache_options
    caching: dict[str, Any] = {}
    if asked.comparison_response_id is not None:
        caching["prompt_cache_options"] = {
            "mode": asked.mode or "implicit",
            "ttl": asked.ttl or "30m",
            "comparison_response_id": asked.comparison_response_id,
        }
    return {
        **caching,
        "model": model,
        "instructions": request.instructions,
        "metadata": dict(request.metadata),
        "previous_response_id": request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "max_output_tokens": request.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": params.logprobs or 0,
        "store": request.store,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "parallel_tool_calls": request.parallel_tool_calls,
        "tool_choice": echo_of(request.tool_choice) or "auto",
        "tools": [echo_of(tool) for tool in request.tools],
        "max_tool_calls": request.max_tool_calls,
        "reasoning": request.reasoning.echo(),
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "text": request.text.echo(),
        "truncation": request.truncation,
        "background": request.background,
        "service_tier": "default",
    }
