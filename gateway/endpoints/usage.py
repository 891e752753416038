"""Token usage as chat completions and completions report it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.gateway.delta_source import DeltaSource, Usage
from penstock.gateway.schemas import StreamOptions


def usage_object(usages: Iterable[Usage]) -> dict[str, Any]:
    """Several choices' usage as one."""
    usages = list(usages)
    num_prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    num_output_tokens = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


class StreamUsage:
    """What each chunk of a stream says of usage: `stream_options` decides."""

    def __init__(self, options: StreamOptions) -> None:
        self.is_shown = options.include_usage
        self._is_continuous = options.include_usage and options.continuous_usage_stats

    def of_chunk(self, generations: Sequence[DeltaSource]) -> dict[str, Any] | None:
        """A chunk before the last says null, unless a running count was asked for."""
        if not self._is_continuous:
            return None
        return usage_object(generation.usage for generation in generations)
