"""A conversation becomes its users' messages and one item, which stands for all the rest: by `POST
/v1/responses/compact`, by a trigger as the last item, or, with `context_management`, before an
answer whose prompt is too long.

The model writes a summary under a fixed instruction (`items.INSTRUCTION`), at the end of the same
prompt as before, so that nearly all of it is in the cache. The item has the summary sealed, and is
an input item of later requests, where templates show it as a user's message. What is stored stays
as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.api.responses.events import usage_object
from penstock.gateway.api.shared.items import compaction_item, shown_item
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.generation.generation import (
    NO_USAGE,
    DeltaSource,
    Generation,
    Usage,
    collected,
    penstock_object,
)
from penstock.gateway.storage.conversations.records import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary that comes before an answer.

    Attributes:
        generation: writes it; None: it is written.
        shown: its text so far, in the log.
        spent: on what is in the log.
        prompt: the text and the ids of the answer's prompt, with the summary.
        max_model_len: tokens of the context.
    """

    generation: Generation | None
    prompt: Callable[[str], Awaitable[tuple[str, Sequence[int]]]]
    max_model_len: int
    shown: str = ""
    spent: Usage = NO_USAGE


async def compacted(
    source: DeltaSource, items: Sequence[Item], files: Mapping[str, bytes]
) -> dict[str, Any]:
    """The answer.

    Args:
        source: writes the summary.
        items: of the conversation.
        files: its images, by digest.

    Raises:
        GenerationFailedError: the model wrote nothing.
    """
    [[output]] = await collected([source])
    await source.settle()
    summary = output.text.strip()
    if not summary:
        raise GenerationFailedError("the model wrote no summary")
    request, used = source.request, source.usage
    kept = [shown_item(item, files) for item in items if item.get("role") == "user"]
    return {
        "id": request.request_id,
        "object": "response.compaction",
        "created_at": int(request.arrival_s),
        "output": [*kept, compaction_item(summary)],
        "usage": usage_object(used),
        "penstock": penstock_object(used, source.cache),
    }
