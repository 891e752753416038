"""`Idempotency-Key`: an answer that can be requested again if its first reader was lost.

    POST, key → id of a log, derived from tenant, endpoint and key
              → if the log exists: read it from the start · if not: plan, log, run

Such an answer is logged and continues without a reader, like a response, but belongs to no
conversation. A failed answer stays failed for its readers; the next POST starts a new attempt under
the next id.

A response has an id in its conversation instead. Then a claim under the derived id names it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request

from penstock.gateway.api.responses.logged_generation import LoggedGeneration
from penstock.gateway.api.responses.response_task import ResponseTask
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.auth.callers import Caller, caller_of
from penstock.gateway.errors import RequestRefusedError, key_reused
from penstock.gateway.generation.generation import DeltaSource, Generation
from penstock.gateway.storage.conversations.ids import conversation_of, derived_response_id
from penstock.gateway.storage.idempotency.claims import Claim, ClaimStore
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.record import LogHeader

HEADER = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_DIGEST, _RESPONSE_ID = "body_digest", "response_id"  # keys of `LogHeader.echo`
_MAX_BEGINNING_S = 5.0  # between a claim and its response; both are single writes
_TRY_AGAIN_S = 0.05
Plan = Callable[[str], Awaitable[Generation]]
Create = Callable[[Callable[[str], Awaitable[None]]], Awaitable[ResponseTask]]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyKey:
    """Identifies a request that may be repeated.

    Attributes:
        tenant: the key's owner.
        endpoint: the same key at another endpoint is another key.
        key: as the client sent it.
        digest: SHA-256 of the body.
    """

    tenant: str
    endpoint: str
    key: str
    digest: str

    def response_id(self, attempt: int) -> str:
        return derived_response_id(self.tenant, self.endpoint, self.key, str(attempt))


def idempotency_key(
    request: Request, body: Mapping[str, Any], caller: Caller
) -> IdempotencyKey | None:
    """The request's key, or None if it has none.

    Raises:
        RequestRefusedError: the header is not a valid key.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if _KEY.fullmatch(key) is None:
        raise _refused("must be 1 to 255 visible ASCII characters")
    return IdempotencyKey(
        tenant=caller.tenant,
        endpoint=request.url.path,
        key=key,
        digest=hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest(),
    )


def refuse_with_key(params: Iterable[str]) -> None:
    """
    Raises:
        RequestRefusedError: a request with a key has one of these parameters.
    """
    for param in params:
        raise _refused(f"cannot be used with {param}: only single, stored outputs are supported")


class _ClaimedError(Exception):
    """Another gateway has claimed the key."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim


class IdempotentAnswers:
    """Finds or starts the answers to requests with a key."""

    def __init__(self, service: ResponseService, claims: ClaimStore) -> None:
        self._service = service
        self._claims = claims
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def source(
        self,
        request: Request,
        body: Mapping[str, Any],
        plan: Plan,
        *,
        new_id: str,
        continues_prompt: bool = False,
        unsupported: Iterable[str] = (),
    ) -> tuple[DeltaSource, bool]:
        """What answers a request: a new generation, or the log that its key stands for; and whether
        another request has begun it.

        Args:
            new_id: of the generation, where there is no key.
            unsupported: parameters of the request that need one without a key.

        Raises as `attach`, and RequestRefusedError: the key is not valid, or not supported here.
        """
        caller = caller_of(request.scope)
        key = idempotency_key(request, body, caller)
        if key is None:
            return await plan(new_id), False
        refuse_with_key(unsupported)
        logged = await self.attach(key, caller, plan, continues_prompt=continues_prompt)
        return logged, logged.is_resumed

    async def attach(
        self, key: IdempotencyKey, caller: Caller, plan: Plan, *, continues_prompt: bool
    ) -> LoggedGeneration:
        """The existing answer, running or ended, or a new one.

        Args:
            plan: makes the generation of a new answer under the given id.
            continues_prompt: the text continues the prompt.

        Raises:
            RequestRefusedError: 409 `idempotency_key_reused`: the key was used with another body.
            StoreUnavailableError: the answer cannot be logged now.
            Exception: whatever `plan` raises.
        """
        for attempt in itertools.count():
            response_id = key.response_id(attempt)
            # The lock picks one of several on this gateway; between gateways the store decides.
            async with self._locks.setdefault(response_id, asyncio.Lock()):
                log = await self._find(caller, response_id)
                is_resumed = log is not None
                if log is None:
                    generation = await plan(response_id)
                    header = _header(generation, key, continues_prompt=continues_prompt)
                    try:
                        log = await self._service.answer(generation, header)
                    except LogExistsError:
                        log = await self._find(caller, response_id)
            if log is None:
                continue  # its log exists but can no longer be read
            if log.header.echo.get(_DIGEST) != key.digest:
                raise key_reused("body")
            if log.end is None or log.end.error is None:
                return LoggedGeneration(log, is_resumed=is_resumed)
        raise AssertionError("unreachable")

    async def respond(
        self, key: IdempotencyKey, caller: Caller, create: Create
    ) -> ResponseTask | ResponseLog:
        """A new response, or the log of the existing one, running or ended.

        Args:
            create: starts a response after a call of its argument with the response's id.

        Raises:
            RequestRefusedError: 409 `idempotency_key_reused`: the key was used with another body.
            StoreUnavailableError: the key cannot be stored now.
            Exception: whatever `create` raises.
        """
        for attempt in itertools.count():
            key_id = key.response_id(attempt)
            async with self._locks.setdefault(key_id, asyncio.Lock()):
                claim = await self._claim_of(caller, key_id)
                if claim is None:
                    created = await self._created(key, create, key_id=key_id)
                    if isinstance(created, ResponseTask):
                        return created
                    claim = created
            if claim.digest != key.digest:
                raise key_reused("body")
            log = await self._claimed(caller, claim)
            if log is not None and (log.end is None or log.end.error is None):
                return log
        raise AssertionError("unreachable")

    async def _created(
        self, key: IdempotencyKey, create: Create, *, key_id: str
    ) -> ResponseTask | Claim:
        """A new response, or the claim of another gateway that was faster."""
        own: Claim | None = None

        async def claim(response_id: str) -> None:
            nonlocal own
            if own is not None:  # another request has begun the response of that id
                await self._claims.give_back(key_id)
                own = None
            wanted = Claim(key.digest, response_id, int(time.time()))
            stored = await self._claims.claim(key_id, wanted)
            if stored != wanted:
                raise _ClaimedError(stored)
            own = wanted

        try:
            return await create(claim)
        except _ClaimedError as error:
            return error.claim
        except BaseException:
            if own is not None:  # nothing was begun, so the next request is a first one
                await self._claims.give_back(key_id)
            raise

    async def _claim_of(self, caller: Caller, key_id: str) -> Claim | None:
        claim = await self._claims.find(key_id)
        if claim is None:
            # In Redis an older gateway stores a claim as a log without events.
            log = await self._find(caller, key_id)
            if log is not None and _RESPONSE_ID in log.header.echo:
                echo = log.header.echo
                return Claim(echo[_DIGEST], echo[_RESPONSE_ID], log.header.created_at)
        return claim

    async def _claimed(self, caller: Caller, claim: Claim) -> ResponseLog | None:
        """The log of a claim's response, which another gateway may be about to store; None if the
        response was deleted or never stored."""
        while True:
            try:
                return await self._service.resume(caller, claim.response_id)
            except RequestRefusedError as error:
                if error.code != "response_expired":
                    raise
                if abs(time.time() - claim.created_at) > _MAX_BEGINNING_S:
                    return None
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _find(self, caller: Caller, response_id: str) -> ResponseLog | None:
        try:
            return await self._service.answer_log(caller, response_id)
        except RequestRefusedError as error:
            if error.code != "response_expired":
                raise
            return None


def _header(generation: Generation, key: IdempotencyKey, *, continues_prompt: bool) -> LogHeader:
    request = generation.request
    return LogHeader(
        response_id=request.request_id,
        conversation_id=conversation_of(request.request_id) or "",
        tenant=key.tenant,
        key_id=generation.key_id,
        nonce=secrets.token_hex(16),
        created_at=int(request.arrival_s),
        echo={_DIGEST: key.digest},
        request=request,
        is_turn=False,
        continues_prompt=continues_prompt,
        output_format=generation.output_format,
    )


def _refused(rule: str) -> RequestRefusedError:
    return RequestRefusedError(f"{HEADER} {rule}", code="invalid_value", param=HEADER)
