"""What a Response object repeats of the request that made it."""

from __future__ import annotations

from typing import Any

from penstock.engine.request import SamplingParams
from penstock.gateway.schemas import ResponsesRequest


def echo_of(request: ResponsesRequest, *, model: str, params: SamplingParams) -> dict[str, Any]:
    """The fields that never change.

    Args:
        model: the name to answer under.
        params: the sampling parameters in force.
    """
    conversation = request.conversation
    return {
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
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": request.background,
        "service_tier": "default",
    }
