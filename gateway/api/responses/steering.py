"""Steering: input for a response that runs, which ends for it and has a successor that answers it.

    accepted ──▶ committed: the successor has it as its input
       │   └───▶ pending: the response made tool calls, and the request with their results gets it
       └───────▶ failed: nobody answers it, and the client gets it back

A steer is an entry of the response's log (`record.SteerEntry`), and so is its outcome
(`record.Steered`, in the end), so that who reads the log to its end knows both, on any gateway.
Who begins the successor is in `successors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field

from penstock.gateway.api.responses.events import steers_objects
from penstock.gateway.api.schema.messages import MAX_ITEMS, InputItem, Message
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.items import CALLS
from penstock.gateway.errors import Failure, RequestRefusedError, key_reused
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import SteerEntry

MAX_PENDING = 16  # steers of one response
MAX_PENDING_BYTES = 1 << 20  # of their input, as JSON
CODES = frozenset(
    """
    response_not_found invalid_input steering_not_supported too_many_pending_steers
    response_already_completed response_not_active successor_creation_failed
    """.split()  # noqa: SIM905
)
_ASK_AGAIN_S = 2.0  # a gateway that takes a response over has not heard of its steers
_MESSAGE_FIELDS = frozenset({"type", "role", "content", "id", "status"})
# Of a request: its input, its place in a conversation, and what is about its own stream.
_NOT_INHERITED = frozenset(
    """
    input previous_response_id conversation stream stream_options generate prediction type stream_id
    prompt_cache_options
    """.split()  # noqa: SIM905
)


class SteerRequest(Model):
    """Input for a response that runs. Items other than messages of the user are refused."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]


def inherited(body: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a successor has from a request's body."""
    kept = {name: value for name, value in body.items() if name not in _NOT_INHERITED}
    extensions = kept.get("penstock")
    if isinstance(extensions, dict) and "continue" in extensions:
        kept["penstock"] = {k: v for k, v in extensions.items() if k != "continue"}
    return kept


def new_steer_id() -> str:
    return f"steer_{secrets.token_hex(12)}"


def derived_steer_id(tenant: str, response_id: str, key: str) -> str:
    """The id of the steer that a request with an `Idempotency-Key` stands for."""
    parts = "\0".join((tenant, response_id, key))
    return f"steer_{hashlib.sha256(parts.encode()).hexdigest()[:24]}"


def checked_text(value: Any) -> str:
    """The JSON of an input: a text that is not empty, or messages of the user.

    Raises:
        RequestRefusedError: 400 `invalid_input`: it is neither.
    """
    if isinstance(value, str):
        if not value:
            raise _invalid("input must not be empty", "input")
        return orjson.dumps(value).decode()
    if not (isinstance(value, list) and value):
        raise _invalid("input must be a text, or a list of messages that is not empty", "input")
    for index, part in enumerate(value):
        param = f"input[{index}]"
        if not isinstance(part, dict) or part.get("type", "message") != "message":
            raise _invalid(f"{param} is not a message: only those can steer a response", param)
        if part.get("role") != "user":
            raise _invalid(f"{param}.role must be 'user'", f"{param}.role")
        for name in part:
            if name not in _MESSAGE_FIELDS:
                raise _invalid(f"{param}.{name}: a message that steers has no such field", param)
    try:
        items = _items_of(value)
    except RequestRefusedError as error:
        raise _invalid(str(error), error.param) from error
    for index, item in enumerate(items):
        if isinstance(item, Message) and not any(item.content):
            raise _invalid(f"input[{index}].content must not be empty", f"input[{index}].content")
    return orjson.dumps(value).decode()


def items_of_inputs(inputs: Sequence[Any]) -> list[InputItem]:
    """The items of some steers' inputs, in order. Raises: RequestRefusedError."""
    return [item for value in inputs for item in _items_of(value)]


def _items_of(value: Any) -> Sequence[InputItem]:
    parsed = parse_fields(SteerRequest, {"input": value}).input
    return [Message(role="user", content=(parsed,))] if isinstance(parsed, str) else parsed


def check_room(log: ResponseLog, text: str) -> None:
    """
    Raises:
        RequestRefusedError: 429 `too_many_pending_steers`: the response has no room for this input.
    """
    steers = log.steers
    num_bytes = sum(len(each.encode()) for each in (text, *(entry.text for entry in steers)))
    if len(steers) >= MAX_PENDING or num_bytes > MAX_PENDING_BYTES:
        raise RequestRefusedError(
            f"a response takes at most {MAX_PENDING} steers and {MAX_PENDING_BYTES} bytes of their "
            "input",
            code="too_many_pending_steers",
            param="input",
            status=429,
        )


def is_steerable(log: ResponseLog) -> bool:
    """Whether a response can have a successor for which it ends."""
    header = log.header
    return (
        header.is_turn
        and header.settings is not None
        and header.generates
        and header.compaction is None
        and not header.compacts
    )


def waits_for_calls(log: ResponseLog, *, drops_call: bool) -> bool:
    """Whether the output has a tool call, which the client is to answer.

    Args:
        drops_call: the last item is half a call, which does not count.
    """
    calls = {entry.output_index for entry in log.deltas if entry.kind in CALLS}
    return len(calls) > drops_call


async def steer(
    log: ResponseLog,
    steer_id: str,
    value: Any,
    *,
    count: Callable[[], Awaitable[None]],
    ask: Callable[[str], Awaitable[None]],
) -> dict[str, Any]:
    """Steer a response, on whichever gateway it runs, once for an id.

    Args:
        value: the input.
        count: counts it as a request of the tenant. Raises: RequestRefusedError.
        ask: asks the gateway that runs the response to take a `SteerEntry.text`.

    Returns: what is known of the steer (`events.steers_objects`) once it is in the log.

    Raises:
        RequestRefusedError: the steer was not accepted; `CODES` says why.
    """
    text = checked_text(value)
    if not is_steerable(log):
        raise not_supported(log.response_id)
    is_counted = False
    asked_again_s = 0.0
    with log.read(log.replica.last_stored_number) as reader:
        while (told := _told_of(log, steer_id, text)) is None:
            if log.is_ended:
                raise already_completed(log.response_id)
            if all(entry.name != steer_id for entry in log.steers):  # not yet visible
                check_room(log, text)
            if not is_counted:
                is_counted = True
                await count()
                continue  # it may have ended meanwhile
            if log.run is not None:
                log.steer(steer_id, text)
            elif time.monotonic() >= asked_again_s:
                await ask(text)
                asked_again_s = time.monotonic() + _ASK_AGAIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_AGAIN_S):
                    await next_of(reader)
    return told


def _told_of(log: ResponseLog, steer_id: str, text: str) -> dict[str, Any] | None:
    """What readers know of a steer; None: nothing.

    Raises:
        RequestRefusedError: it has another input.
    """
    for entry in log.entries[: log.replica.num_visible]:
        if isinstance(entry, SteerEntry) and entry.name == steer_id:
            if entry.text != text:
                raise key_reused("input")
            return next(told for told in steers_objects(log) if told["id"] == steer_id)
    return None


def not_supported(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"the response {response_id!r} cannot be steered: it only prepares a prompt or compacts "
        "its conversation",
        code="steering_not_supported",
        param="response_id",
    )


def already_completed(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"the response {response_id!r} has ended; continue it with previous_response_id",
        code="response_already_completed",
        param="response_id",
        status=409,
    )


def steer_error(failure: Failure) -> dict[str, str]:
    """The error of `response.steer.failed`, for input that was not accepted."""
    code = failure.code or ""
    if code not in CODES:
        code = "response_not_found" if failure.status == 404 else code or "response_not_active"
    return {"type": "invalid_request_error", "code": code, "message": failure.message}


def _invalid(message: str, param: str | None) -> RequestRefusedError:
    return RequestRefusedError(message, code="invalid_input", param=param)


# -- steers that wait for the results of tool calls ------------------------------------------------


def pending_of(turn: StoredTurn | None) -> list[Any]:
    """The inputs that wait for the next request that continues a turn."""
    if turn is None or b'"pending"' not in turn.response:
        return []
    return [each["input"] for each in _steers_in(turn.response) if each["status"] == "pending"]


def committed_in(response: bytes, taken_by: str) -> bytes:
    """The JSON of a Response object, once the response `taken_by` has what was pending in it."""
    told = orjson.loads(response)
    for each in told["penstock"]["steers"]:
        if each["status"] == "pending":
            del each["input"]
            each |= {"status": "committed", "successor_id": taken_by}
    return orjson.dumps(told)


def stored_steer(turn: StoredTurn, steer_id: str, value: Any) -> dict[str, Any] | None:
    """What a stored turn tells of a steer, when there is no log any more; None: nothing.

    Raises:
        RequestRefusedError: it has another input.
    """
    for each in _steers_in(turn.response):
        if each["id"] == steer_id:
            if each.get("input", value) != value:
                raise key_reused("input")
            return each
    return None


def _steers_in(response: bytes) -> list[dict[str, Any]]:
    told = orjson.loads(response).get("penstock") if response else None
    steers: list[dict[str, Any]] = (told or {}).get("steers", [])
    return steers
