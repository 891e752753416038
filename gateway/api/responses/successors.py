"""Successors of responses that were steered: who begins one, so that there is one.

    the output ends ─▶ what becomes of the steers is settled, the successor planned
                    ─▶ the turn is stored ─▶ the successor begins ─▶ the end is logged

A gateway that dies in between leaves all of it to the one that takes the response over. Each step
holds however many gateways take it, because a successor's id follows from the response before, and
a store of logs has one log of an id:

- who creates the log of that id has begun the successor;
- who tells that there is none (`response.steer.failed`) has created that log before, ended;
- of the requests that could get a steer that waits for the results of tool calls, the one that
  creates the log does. A request with `store: false` creates it ended, as a mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from penstock.engine.errors import EngineDeadError
from penstock.gateway.api.responses.events import failed_end, num_closing_events
from penstock.gateway.api.responses.prompt import PromptBuilder, TurnPosition
from penstock.gateway.api.responses.response_planner import (
    Asked,
    PlannedResponse,
    ResponsePlanner,
)
from penstock.gateway.api.responses.schema import ResponsesRequest
from penstock.gateway.api.responses.steering import (
    already_completed,
    committed_in,
    items_of_inputs,
    pending_of,
    waits_for_calls,
)
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.items import CALLS
from penstock.gateway.auth.callers import Caller
from penstock.gateway.errors import RequestRefusedError, failure_of
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.storage.conversations.ids import new_conversation_id, successor_id
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.conversations.store import (
    ConversationStore,
    StoreUnavailableError,
)
from penstock.gateway.storage.response_log.log import ResponseLog, Run
from penstock.gateway.storage.response_log.log_store import LogExistsError, LogStore
from penstock.gateway.storage.response_log.record import EndEntry, LogHeader, Steered

_LOG = logging.getLogger(__name__)
_ASK_EVERY_S = 0.1  # while the store is away
_NUM_PLANS = 3  # of a successor, if an engine dies each time
_MARK_WITHIN_S = 600.0  # that a steer was taken, while the store is away


class Successors:
    """Those of one gateway's responses.

    Args:
        begin: stores a planned response and starts it. Raises as `ResponseService.create`, and
            LogExistsError.
        ready: waits until a response can run. Raises: EngineDeadError.
        caller_of_tenant: None: it has no key any more.
    """

    def __init__(
        self,
        responses: ResponsePlanner,
        *,
        prompts: PromptBuilder,
        adapters: AdapterRegistry,
        conversations: ConversationStore,
        logs: LogStore,
        begin: Callable[[PlannedResponse], Awaitable[ResponseLog]],
        ready: Callable[[], Awaitable[None]],
        caller_of_tenant: Callable[[str], Caller | None],
    ) -> None:
        self._responses = responses
        self._prompts = prompts
        self._adapters = adapters
        self._conversations = conversations
        self._logs = logs
        self._begin = begin
        self.ready = ready
        self._caller_of_tenant = caller_of_tenant
        self._marking: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._marking:
            task.cancel()
        await asyncio.gather(*self._marking, return_exceptions=True)

    # -- of responses that have ended for it -----------------------------------------------------

    async def plan(
        self, log: ResponseLog, ended: StoredTurn, asked: Asked | None
    ) -> PlannedResponse:
        """Plan the response to what one was steered with. Raises as `ResponseService.create`.

        Args:
            ended: its turn, as it will be stored.
            asked: what began it; None: another gateway did.
        """
        header = log.header
        assert header.settings is not None
        place = {"previous_response_id": header.response_id}
        if header.takes_head:
            place = {"conversation": header.conversation_id}
        request = parse_request(ResponsesRequest, {**header.settings, **place})
        request = request.after(items_of_inputs([entry.input for entry in log.steers]))
        memory = None if asked is None else asked.memory
        if asked is None:
            caller = self._caller_of_tenant(header.tenant) or _former_caller(header)
            caller = dataclasses.replace(caller, key_id=header.key_id)
        else:
            caller = asked.caller
        model = await self._adapters.require(request.model, caller, task="generate")
        position = TurnPosition(conversation_id=new_conversation_id(), is_new=True, path=[ended])
        if header.echo["store"]:
            *path, _ = await self._conversations.path(header.tenant, header.response_id)
            position = TurnPosition(
                conversation_id=header.conversation_id,
                takes_head=header.takes_head,
                path=[*path, ended],
            )
        prompt = await self._prompts.build(request, caller, memory, position=position)
        again = Asked(request, caller, model, None, memory, header.settings)
        return await self._responses.plan(again, prompt, successor_id(header.response_id))

    async def begin(self, run: Run, planned: PlannedResponse) -> None:
        """Begin the response that was planned, unless another gateway has, or has ruled it out.
        Raises as `ResponseService.create`.

        Args:
            run: of the response before.
        """
        if not await run.verify(is_superseded=False):
            planned.generation.discard()
            return
        with contextlib.suppress(LogExistsError):
            run.log.successor = await self._begin(planned)

    async def has_begun(self, log: ResponseLog) -> bool:
        """Whether another gateway has begun the successor. Raises: StoreUnavailableError."""
        return _was_elsewhere(log) and await self._exists(
            log.header.tenant, successor_id(log.response_id)
        )

    async def rule_out(self, log: ResponseLog) -> bool:
        """Have no gateway begin the successor any more; False: one has. Raises:
        StoreUnavailableError."""
        if not _was_elsewhere(log):
            return True
        header = dataclasses.replace(log.header, response_id=successor_id(log.response_id))
        try:
            await self._mark(header)
        except LogExistsError:
            return not await self._exists(header.tenant, header.response_id)
        await self.retract(header)
        return True

    async def retract(self, header: LogHeader) -> None:
        """Delete the turn of a response that does not begin; it stays if there is a response of
        that id."""
        if await self._exists(header.tenant, header.response_id):
            return
        try:
            await self._conversations.delete_turn(header.tenant, header.response_id)
        except RequestRefusedError as error:
            _LOG.info("cannot delete the turn of %s: %s", header.response_id, error)

    async def _exists(self, tenant: str, response_id: str) -> bool:
        """Whether there is a response of this id, running or ended."""
        try:
            log = await self._logs.find(tenant, response_id)
        except RequestRefusedError as error:
            if error.code != "response_expired":
                raise
            return False
        return log.header.is_turn

    async def _mark(self, header: LogHeader) -> None:
        """Have no response of an id begin any more, by an ended log under it.

        Raises:
            LogExistsError: there is a log of that id.
            StoreUnavailableError: there may be one now.
        """
        mark = dataclasses.replace(
            header, nonce=secrets.token_hex(16), is_turn=False, input_items=()
        )
        log = await self._logs.create(mark)
        assert log.run is not None
        log.run.append(failed_end(log, str(already_completed(header.response_id))))

    # -- of responses that wait for the results of tool calls ------------------------------------

    async def take(self, planned: PlannedResponse) -> None:
        """Take what the turn before was steered with for a response that is about to be stored.
        If it is, its log takes it; otherwise this does.

        Raises:
            LogExistsError: another response has it.
            StoreUnavailableError: it cannot be taken now.
        """
        position, asked = planned.prompt.position, planned.asked
        previous = position.previous
        assert previous is not None
        if position.is_new:  # the connection remembers the turn before
            assert asked.memory is not None
            if not asked.memory.take_steers(previous.turn_id):
                raise LogExistsError(planned.header.response_id)
        elif not asked.request.store:
            await self._mark(planned.header)

    async def tell_taken(self, planned: PlannedResponse) -> None:
        """Have the turn before tell that what it was steered with is taken, for as long as it is
        stored. Raises: StoreUnavailableError."""
        position = planned.prompt.position
        previous = position.previous
        assert previous is not None
        if position.is_new:
            return
        try:
            turn = await self._conversations.turn(previous.tenant, previous.turn_id)
            if pending_of(turn):
                response = committed_in(turn.response, planned.header.response_id)
                await self._conversations.replace_items(
                    dataclasses.replace(turn, response=response)
                )
        except StoreUnavailableError:
            raise
        except RequestRefusedError as error:  # it was deleted
            _LOG.info("cannot mark what %s took: %s", planned.header.response_id, error)

    async def tell_taken_soon(self, planned: PlannedResponse) -> None:
        """The same, in a task of its own: now, or when the store is back."""
        has_tried = asyncio.Event()
        task = asyncio.create_task(self._tell_taken_patiently(planned, has_tried))
        self._marking.add(task)
        task.add_done_callback(self._marking.discard)
        await has_tried.wait()

    async def _tell_taken_patiently(
        self, planned: PlannedResponse, has_tried: asyncio.Event
    ) -> None:
        give_up_s = time.monotonic() + _MARK_WITHIN_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(StoreUnavailableError):
                try:
                    await self.tell_taken(planned)
                    return
                finally:
                    has_tried.set()
            await asyncio.sleep(_ASK_EVERY_S)
        _LOG.warning("cannot mark what %s took: the store was away", planned.header.response_id)


class Succession:
    """What becomes of what one response was steered with.

    Args:
        run: which the response has here.
        asked: what began it; None: another gateway did.
    """

    def __init__(self, successors: Successors, run: Run, asked: Asked | None) -> None:
        self._successors = successors
        self._run = run
        self._log = run.log
        self._asked = asked
        self._planned: PlannedResponse | None = None

    async def ready(self) -> None:
        """Wait for an engine, which may have died: that may be why the output has ended."""
        with contextlib.suppress(EngineDeadError):
            await self._successors.ready()

    async def settle(
        self,
        end: EndEntry,
        *,
        is_whole: bool,
        is_cut: bool,
        is_calling: bool,
        ended: Callable[[EndEntry], StoredTurn],
    ) -> EndEntry:
        """The end with what is to become of the steers; the successor, if any, is planned.

        Args:
            is_whole: the output ended of itself.
            is_cut: it ended for the steers.
            is_calling: it ended within a tool call.
            ended: the turn with this end.
        """
        log = self._log
        newest = log.open_item
        drops_call = is_cut and newest is not None and newest[1] in CALLS and is_calling
        has_begun = await self._known(self._successors.has_begun, otherwise=False)
        if not (is_whole or is_cut):
            message = "the response was stopped before its successor began"
            if end.error is not None:
                message = end.error[1]
            fate = Steered(status="committed") if has_begun else _stopped(message)
        else:
            is_waiting = waits_for_calls(log, drops_call=drops_call)
            fate = Steered(
                status="pending" if is_waiting else "committed",
                is_cut=is_cut,
                drops_call=drops_call,
            )
        end = self._with_fate(end, fate)
        if fate.status == "committed" and not has_begun:
            try:
                self._planned = await self._plan(ended(end))
            except Exception as error:
                end = self._without_successor(end, error)
        return end

    async def _plan(self, ended: StoredTurn) -> PlannedResponse:
        """The successor. An engine that dies meanwhile is waited for, as before."""
        for _ in range(_NUM_PLANS - 1):
            with contextlib.suppress(EngineDeadError):
                return await self._successors.plan(self._log, ended, self._asked)
            await self._successors.ready()
        return await self._successors.plan(self._log, ended, self._asked)

    async def begin(self, end: EndEntry) -> EndEntry:
        """The settled end, once the successor has begun, or no gateway can begin it."""
        end = await self._handed_over(end)
        fate = end.steered
        if fate is None or fate.status != "failed" or not self._run.is_current:
            return end
        # A gateway that stands still may be about to begin it.
        if await self._known(self._successors.rule_out, otherwise=True):
            return end
        return self._with_fate(end, dataclasses.replace(fate, status="committed", error=None))

    def discard(self) -> None:
        """If the successor has not begun, it will not."""
        if self._planned is not None:
            self._planned.generation.discard()

    async def _handed_over(self, end: EndEntry) -> EndEntry:
        """The end, once this gateway has begun the successor, or could not."""
        planned, log = self._planned, self._log
        if planned is None or not self._run.is_current:
            return end
        if self._is_cancelled():  # while the successor was planned
            return self._with_fate(end, _stopped("the response was cancelled"))
        self._planned = None
        try:
            await self._successors.begin(self._run, planned)
        except Exception as error:
            return self._without_successor(end, error)
        if self._is_cancelled() and log.successor is not None:
            log.successor.cancel()
        return end

    def _is_cancelled(self) -> bool:
        """Also once the output has ended, and nobody tells the response's task any more."""
        return self._log.replica.is_cancelled

    async def _known(
        self, ask: Callable[[ResponseLog], Awaitable[bool]], *, otherwise: bool
    ) -> bool:
        """What other gateways did about the successor. While the store is away, it waits: what it
        told would be no more than a guess."""
        while True:
            try:
                return await ask(self._log)
            except StoreUnavailableError:
                await asyncio.sleep(_ASK_EVERY_S)
            except Exception:  # a bug
                _LOG.exception("cannot look for the successor of %s", self._log.response_id)
                return otherwise

    def _with_fate(self, end: EndEntry, fate: Steered) -> EndEntry:
        num_events = num_closing_events(self._log, end.reason, fate)
        # There may be more steers by now than when the output ended.
        number = self._log.next_number
        return dataclasses.replace(end, number=number, steered=fate, num_events=num_events)

    def _without_successor(self, end: EndEntry, error: Exception) -> EndEntry:
        """The end of a response whose successor cannot begin."""
        assert end.steered is not None
        told = ("successor_creation_failed", failure_of(error).message)
        return self._with_fate(end, dataclasses.replace(end.steered, status="failed", error=told))


def _stopped(message: str) -> Steered:
    """The fate of the steers of a response that was stopped."""
    return Steered(status="failed", error=("response_not_active", message))


def _was_elsewhere(log: ResponseLog) -> bool:
    """Whether another gateway, or this one before it was started again, may have begun a successor:
    nobody else begins one while this gateway runs the response from the first."""
    return log.replica.epoch > 1 or log.outage is not None


def _former_caller(header: LogHeader) -> Caller:
    """The caller of a response whose tenant has no key any more. Its requests get the priority and
    the cache salt that the response has."""
    request = header.request
    salt, own = request.cache_salt, (header.settings or {}).get("cache_salt") or ""
    tenant_salt, used = "", ""
    if salt != own:
        tenant_salt, _, used = salt.partition("\n")
    return Caller(
        tenant=header.tenant,
        weight=request.weight,
        priority=request.priority,
        priority_bounds=None,
        allows_cache_salt=salt == own or bool(used),
        cache_salt=tenant_salt,
    )
