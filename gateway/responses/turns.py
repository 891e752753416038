"""A response as the turn of a conversation that is stored of it."""

from __future__ import annotations

from array import array

from penstock.gateway.conversations.records import Rendering, StoredTurn
from penstock.gateway.responses.record import ResponseHeader


def turn_of(header: ResponseHeader) -> StoredTurn:
    """What is stored of a response while it runs."""
    request = header.request
    return StoredTurn(
        turn_id=header.response_id,
        conversation_id=header.conversation_id,
        tenant=header.tenant,
        parent_id=header.parent_id,
        status="in_progress",
        created_at=header.created_at,
        items=header.input_items,
        continues=header.continues,
        prompt_token_ids=array("I", request.prompt_token_ids),
        prompt=(
            None
            if header.rendering is None
            else Rendering(num_chars=header.rendering[0], digest=header.rendering[1])
        ),
        cache_salt=request.cache_salt,
    )
