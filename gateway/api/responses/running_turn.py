"""The stored turn of a response: in progress while the response runs, finished at its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from array import array
from collections.abc import Sequence

import orjson
from msgspec import structs

from penstock.gateway.api.responses.events import response_object
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.records import Rendering, StoredTurn
from penstock.gateway.storage.conversations.store import (
    ConversationStore,
    StoreUnavailableError,
)
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import EndEntry, LogHeader

_LOG = logging.getLogger(__name__)
_STORE_EVERY_S = 0.1  # while the store is away


async def store_end(
    conversations: ConversationStore, ended: StoredTurn, *, within_s: float
) -> bool:
    """Store the ended turn, before the end is logged: a reader may continue from it at once.

    Returns: False if the store was away all the time. An end that cannot be stored at all is
    logged nevertheless.
    """
    give_up_s = time.monotonic() + within_s
    while True:
        try:
            await conversations.finish_turn(ended)
        except StoreUnavailableError:
            if time.monotonic() >= give_up_s:
                return False
            await asyncio.sleep(_STORE_EVERY_S)
            continue
        except RequestRefusedError as error:
            _LOG.warning("cannot store turn %s: %s", ended.turn_id, error)
        except Exception:  # a bug
            _LOG.exception("cannot store turn %s", ended.turn_id)
        return True


async def replace_end(conversations: ConversationStore, ended: StoredTurn) -> None:
    """Store what was found of an ended turn after its end was stored."""
    try:
        await conversations.replace_items(ended)
    except RequestRefusedError as error:  # it was deleted, or the store is away
        _LOG.warning("cannot store what became of turn %s: %s", ended.turn_id, error)


async def correct_end(conversations: ConversationStore, ended: StoredTurn) -> None:
    """Have a turn say what the end says that will be logged. Another gateway may have stored it and
    have died before it logged its end: its output is the same, but not what it has used."""
    try:
        stored = await conversations.turn(ended.tenant, ended.turn_id)
        is_whole = (stored.items, stored.output) == (ended.items, ended.output)
        if is_whole and stored.response != ended.response:  # else items were deleted
            await conversations.replace_items(ended)
    except RequestRefusedError as error:  # it was deleted, or the store is away
        _LOG.warning("cannot correct what turn %s has used: %s", ended.turn_id, error)


def turn_of(header: LogHeader) -> StoredTurn:
    """The turn of a response, as stored while it runs."""
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
            else Rendering(
                num_chars=header.rendering[0],
                digest=header.rendering[1],
                origin=b"".join(header.rendering[2:]),
            )
        ),
        cache_salt=request.cache_salt,
        images={image.digest: image.data for image in request.images},
        places=tuple(structs.replace(image, data=b"") for image in request.images),
    )


def ended_turn(
    turn: StoredTurn,
    log: ResponseLog,
    end: EndEntry,
    *,
    token_ids: Sequence[int],
    whole: Rendering | None,
) -> StoredTurn:
    """A turn at its response's end, which is not logged yet.

    Args:
        token_ids: of the output.
        whole: the text of prompt and output, if known.
    """
    response = response_object(log, end)
    return dataclasses.replace(
        turn,
        status=response["status"],
        output=tuple(response["output"]),
        output_token_ids=array("I", token_ids),
        whole=whole,
        prefix_id=end.prefix_id,
        response=orjson.dumps(response),
    )
