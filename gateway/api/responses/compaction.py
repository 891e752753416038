"""`POST /v1/responses/compact`: a conversation becomes its users' messages and one item, which
stands for all the rest.

The model writes a summary under a fixed instruction (`items.INSTRUCTION`), at the end of the same
prompt as before, so that nearly all of it is in the cache. The item has the summary sealed, and is
an input item of later requests, where templates show it as a user's message. What is stored stays
as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.api.responses.events import usage_object
from penstock.gateway.api.shared.items import new_item_id, shown_item
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.generation.generation import DeltaSource, collected
from penstock.gateway.storage.conversations.records import Item
from penstock.gateway.storage.sealed_text import sealed


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
    summary = output.text.strip()
    if not summary:
        raise GenerationFailedError("the model wrote no summary")
    request, used = source.request, source.usage
    compaction = {
        "id": new_item_id("cmp_"),
        "type": "compaction",
        "status": "completed",
        "encrypted_content": sealed(summary),
    }
    kept = [shown_item(item, files) for item in items if item.get("role") == "user"]
    return {
        "id": request.request_id,
        "object": "response.compaction",
        "created_at": int(request.arrival_s),
        "output": [*kept, compaction],
        "usage": usage_object(
            used.prompt_tokens, used.cached_tokens, used.output_tokens, used.reasoning_tokens
        ),
    }
