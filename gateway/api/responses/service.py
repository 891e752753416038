"""The Responses API, independent of the transport: create, take over, retrieve, cancel, delete.

    request → prompt → (admitted) → turn begun → log → task

It defines the order of a response's steps and what is stored of it. `events` makes its events;
`routes` and `websocket` send them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import orjson

from penstock.engine.errors import EngineDeadError
from penstock.gateway.api.responses.compaction import Summary
from penstock.gateway.api.responses.events import failed_end
from penstock.gateway.api.responses.logged_generation import usage_record
from penstock.gateway.api.responses.prompt import (
    LaneMemory,
    Prompt,
    PromptBuilder,
)
from penstock.gateway.api.responses.response_planner import (
    Asked,
    PlannedResponse,
    ResponsePlanner,
)
from penstock.gateway.api.responses.response_task import (
    ResponseInterruptedError,
    ResponseTask,
    ResponseTaskSettings,
)
from penstock.gateway.api.responses.running_turn import turn_of
from penstock.gateway.api.responses.schema import CompactRequest, ResponsesRequest
from penstock.gateway.api.responses.steering import (
    already_completed,
    checked_text,
    inherited,
    steer,
    stored_steer,
)
from penstock.gateway.api.responses.successors import Succession, Successors
from penstock.gateway.api.shared.items import without_ids, without_item
from penstock.gateway.auth.callers import Caller
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import RequestRefusedError, failure_of
from penstock.gateway.generation.generation import NO_USAGE, Generation, Usage
from penstock.gateway.generation.images.loader import ImageLoader
from penstock.gateway.generation.paced_work import PacedWork
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.ids import (
    new_response_id,
    successor_id,
)
from penstock.gateway.storage.conversations.records import (
    Conversation,
    StoredTurn,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import (
    ConversationStore,
    NotFoundError,
    StoreUnavailableError,
    head_locked,
)
from penstock.gateway.storage.response_log.log import (
    Outage,
    ResponseLog,
    pieces_of,
    response_expired,
    token_ids_of,
)
from penstock.gateway.storage.response_log.log_store import LogExistsError, LogStore
from penstock.gateway.storage.response_log.record import (
    Compaction,
    DeltaEntry,
    LogHeader,
)
from penstock.gateway.storage.usage.ledger import Ledger
from penstock.gateway.telemetry.metrics import Metrics

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseServiceSettings:
    """Settings of the service.

    Attributes:
        task: how responses run.
        retention_s: how long the engine should keep the KV of a stored turn; 0 gives no hint.
        engine_wait_s: how long a response waits for an engine.
        needs_storage: whether to refuse a response with `store: true` that cannot be stored.
    """

    task: ResponseTaskSettings = field(default_factory=ResponseTaskSettings)
    retention_s: float = 0.0
    engine_wait_s: float
    needs_storage: bool = True


class ResponseService:
    """All responses of one gateway."""

    def __init__(
        self,
        planner: RequestPlanner,
        *,
        engine: EnginePool,
        conversations: ConversationStore,
        logs: LogStore,
        ledger: Ledger,
        settings: ResponseServiceSettings,
        metrics: Metrics,
        caller_of_tenant: Callable[[str], Caller | None],
    ) -> None:
        self._metrics = metrics
        self._planner = planner
        self._engine = engine
        self._conversations = conversations
        self._logs = logs
        self._ledger = ledger
        self._settings = settings
        self._prompts = PromptBuilder(planner, conversations)
        self._responses = ResponsePlanner(planner, retention_s=settings.retention_s)
        self._successors = Successors(
            self._responses,
            prompts=self._prompts,
            adapters=planner.adapters,
            conversations=conversations,
            logs=logs,
            begin=self._begun_log,
            ready=self.wait_for_engine,
            caller_of_tenant=caller_of_tenant,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: WeakValueDictionary[str, ResponseTask] = WeakValueDictionary()
        self._deletions: set[asyncio.Task[None]] = set()
        self._taking_over: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """From now on this gateway takes over responses of gateways that died."""
        await self._logs.start(
            can_run=lambda: self._engine.info is not None, pool=lambda: self._engine.pool
        )
        self._taking_over = asyncio.create_task(self._take_over_on())

    async def close(self) -> None:
        """Stop the running responses; another gateway, if there is one, takes them over."""
        tasks = self._tasks | self._deletions
        if self._taking_over is not None:
            tasks.add(self._taking_over)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._successors.close()

    # -- new responses -----------------------------------------------------------------------

    @property
    def paced_work(self) -> PacedWork:
        """Validates large requests."""
        return self._planner.paced_work

    @property
    def images(self) -> ImageLoader:
        return self._planner.images

    async def create(
        self,
        request: ResponsesRequest,
        caller: Caller,
        *,
        deadline_s: float | None = None,
        memory: LaneMemory | None = None,
        claim: Callable[[str], Awaitable[None]] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> ResponseTask:
        """Start a response, which runs in a task of its own.

        Args:
            body: of the request, for a successor; None: it can have none.
            memory: remembers the response if it is not to be stored.
            claim: called with the response's id when it has been admitted, before it is stored.

        Raises:
            InvalidRequestError: the request cannot be served, or the turn to continue does not
                exist.
            RequestRefusedError: it was not admitted, or another turn holds the conversation.
            EngineDeadError: the engine is not available.
        """
        settings = None if body is None else inherited(body)
        model = await self._planner.adapters.require(request.model, caller, task="generate")
        asked = Asked(request, caller, model, deadline_s, memory, settings)
        prompt = await self._prompts.build(request, caller, memory)
        response_id = new_response_id(prompt.position.conversation_id)
        previous = prompt.position.previous
        if prompt.takes_steers and previous is not None and not prompt.position.is_new:
            response_id = successor_id(previous.turn_id)
        planned = await self._responses.plan(asked, prompt, response_id)
        try:
            return await self._begin(planned, claim=claim)
        except LogExistsError:
            if not prompt.takes_steers:
                raise
            await self._successors.tell_taken(planned)
        # Another request has what the turn before was steered with.
        return await self.create(
            request, caller, deadline_s=deadline_s, memory=memory, claim=claim, body=body
        )

    async def _begin(
        self, planned: PlannedResponse, *, claim: Callable[[str], Awaitable[None]] | None = None
    ) -> ResponseTask:
        """Store a response that was planned, and start it. Raises as `create`.

        Raises:
            LogExistsError: there is a response of its id.
        """
        request, memory = planned.asked.request, planned.asked.memory
        generation, header, prompt = planned.generation, planned.header, planned.prompt
        summary = planned.summary
        try:
            if claim is not None:
                await claim(header.response_id)
            if prompt.takes_steers:
                await self._successors.take(planned)
            log = await self._stored(header, prompt) if request.store else None
        except BaseException:
            generation.discard()
            raise
        is_stored = log is not None
        if log is None:
            # It was to be resumable; without `store` nobody expects it.
            log = ResponseLog(header, is_resumable=not request.store)
        remember = None if memory is None or request.store else memory.keep
        task = self._task(
            generation,
            log,
            has_turn=is_stored,
            text=prompt.text,
            remember=remember,
            summary=None if summary is None else self._summary(header, summary),
            asked=planned.asked,
        )
        self._keep(task.start(after=self.wait_for_engine))  # it may have died meanwhile
        if prompt.takes_steers:
            await self._successors.tell_taken_soon(planned)
        return task

    async def _begun_log(self, planned: PlannedResponse) -> ResponseLog:
        """The log of a response that was planned, once it runs. Raises as `_begin`."""
        return (await self._begin(planned)).log

    async def compaction(
        self, request: CompactRequest, caller: Caller, *, deadline_s: float | None = None
    ) -> tuple[Prompt, Callable[[str], Awaitable[Generation]]]:
        """The prompt of a conversation that is to be compacted, and what plans the generation of
        its summary under the given id. Both raise as `create`."""
        await self._planner.adapters.require(request.model, caller, task="generate")
        prompt = await self._prompts.build(request, caller, None)
        plan = partial(
            self._responses.generation,
            request=request,
            prompt=prompt,
            caller=caller,
            deadline_s=deadline_s,
        )
        return prompt, plan

    async def num_input_tokens(self, request: ResponsesRequest, caller: Caller) -> int:
        """How many tokens the prompt of a request would have. Raises as `create`."""
        await self._planner.adapters.require(request.model, caller, task="generate")
        prompt = await self._prompts.build(request, caller, None, must_fit=False)
        return len(prompt.token_ids)

    async def answer(self, generation: Generation, header: LogHeader) -> ResponseLog:
        """Start an answer that is not a turn, in a task of its own; returns its log.

        Raises:
            LogExistsError: the answer was already started.
            StoreUnavailableError: it cannot be logged now.
        """
        try:
            log = await self._logs.create(header)
        except BaseException:
            generation.discard()
            raise
        task = self._task(generation, log, has_turn=False, text=None)
        self._keep(task.start(after=self.wait_for_engine))
        return log

    async def _stored(self, header: LogHeader, prompt: Prompt) -> ResponseLog | None:
        """Begin the turn and create the log; None if the response is to run without storage.

        Raises:
            LogExistsError: there is a log of its id.
        """
        position = prompt.position
        try:
            if position.is_new:
                await self._conversations.create(
                    Conversation(
                        conversation_id=position.conversation_id,
                        tenant=header.tenant,
                        created_at=header.created_at,
                        is_listed=False,
                    )
                )
            turn = turn_of(header)
            await self._conversations.begin_turn(turn, takes_head=position.takes_head)
            self._metrics.count("turns")
            if turn.parent_id is None:
                self._metrics.count("sessions")
            return await self._logs.create(header)
        except LogExistsError:
            await self._successors.retract(header)
            raise
        except StoreUnavailableError:
            if self._settings.needs_storage or position.takes_head:
                raise
            return None

    def _task(
        self,
        generation: Generation,
        log: ResponseLog,
        *,
        has_turn: bool,
        text: str | None,
        remember: Callable[[StoredTurn], None] | None = None,
        summary: Summary | None = None,
        asked: Asked | None = None,
    ) -> ResponseTask:
        """
        Args:
            asked: what began it; None: another gateway did, or it has no successor.
        """
        task = self._running[log.response_id] = ResponseTask(
            generation,
            log,
            tokenizer=self._planner.model.tokenizer,
            conversations=self._conversations if has_turn else None,
            ledger=self._ledger,
            remember=remember,
            prompt_text=text,
            summary=summary,
            succession=partial(Succession, self._successors, asked=asked),
            settings=self._settings.task,
        )
        return task

    # -- responses of gateways that ended ----------------------------------------------------

    async def _take_over_on(self) -> None:
        while True:
            log = await self._logs.takeovers.get()
            if log.run is None:
                continue  # another gateway has it again
            try:
                self._take_over(log)
            except Exception as error:  # a bug, which must not keep others from being taken over
                assert log.run is not None
                end = failed_end(log, failure_of(error).message)
                epoch = log.run.epoch
                self._ledger.note(usage_record(log, end, epoch=epoch, may_move=True))
                log.run.append(end)

    def _take_over(self, log: ResponseLog) -> None:
        """Continue a response whose gateway has died, from the last entry it stored."""
        after = self.wait_for_engine
        if log.outage is not None:
            after = partial(self._wait_to_go_on, log, log.outage)
        header = log.header
        written, deltas = log.parts
        summary = None
        if header.compaction is not None:
            summary = self._taken_over(log, header.compaction, written, is_whole=bool(deltas))
        generation = self._planner.resume(
            header.request,
            output_token_ids=token_ids_of(deltas),
            shown=pieces_of(deltas),
            epoch=log.replica.epoch,
            continues_prompt=header.continues_prompt or header.continues,
            output_format=header.output_format,
        )
        task = self._task(generation, log, has_turn=header.is_turn, text=None, summary=summary)
        self._keep(task.start(after=after))

    async def _wait_to_go_on(self, log: ResponseLog, outage: Outage) -> None:
        """Wait for the engine, however long it takes to start.

        Raises:
            ResponseInterruptedError: nobody can have waited for the response, or it would become
                another one.
        """
        grace_s = self._settings.task.grace_s
        if outage.silent_s >= grace_s and not log.header.is_background:
            raise ResponseInterruptedError(f"the server was stopped for more than {grace_s:.0f} s")
        if not outage.is_complete:
            raise ResponseInterruptedError("what was stored of this response is damaged")
        await self._engine.wait_ready()
        if outage.pool != self._engine.pool:
            raise ResponseInterruptedError("the server was started again with another model")

    def _taken_over(
        self,
        log: ResponseLog,
        compaction: Compaction,
        written: Sequence[DeltaEntry],
        *,
        is_whole: bool,
    ) -> Summary:
        """A summary that another gateway has begun."""
        request = compaction.request
        token_ids = token_ids_of(written)
        text = "".join(entry.text for entry in written)
        spent = Usage(len(request.prompt_token_ids), len(token_ids), 0)
        generation = None
        if not is_whole:
            generation = self._planner.resume(
                request,
                output_token_ids=token_ids,
                shown=(),
                epoch=log.replica.epoch,
                output_format=compaction.output_format,
            )
        return self._summary(log.header, generation, shown=text, spent=spent)

    def _summary(
        self,
        header: LogHeader,
        generation: Generation | None,
        *,
        shown: str = "",
        spent: Usage = NO_USAGE,
    ) -> Summary:
        assert header.compaction is not None
        before, after = header.compaction.around

        async def prompt(summary: str) -> tuple[str, Sequence[int]]:
            text = f"{before}{summary}{after}"
            token_ids = await self._planner.tokenise(
                text, add_special_tokens=False, param="input", must_fit=False
            )
            return text, token_ids

        return Summary(
            generation=generation,
            prompt=prompt,
            max_model_len=self._engine.info_for_running().max_model_len,
            shown=shown,
            spent=spent,
        )

    async def wait_for_engine(self) -> None:
        """Raises: EngineDeadError: the engine is not available for too long."""
        try:
            async with asyncio.timeout(self._settings.engine_wait_s):
                await self._engine.wait_ready()
        except TimeoutError as error:
            raise EngineDeadError("the engine is not available") from error

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    # -- existing responses ------------------------------------------------------------------

    async def log(self, caller: Caller, response_id: str) -> ResponseLog:
        """The log of a response, running or ended. Raises as `LogStore.find`."""
        log = await self._logs.find(caller.tenant, response_id)
        if not log.header.is_turn:
            raise response_expired(response_id)
        return log

    async def answer_log(self, caller: Caller, response_id: str) -> ResponseLog:
        """The log of an answer that `answer` started. Raises as `LogStore.find`."""
        return await self._logs.find(caller.tenant, response_id)

    async def resume(self, caller: Caller, response_id: str) -> ResponseLog:
        """The log of a response whose stream is resumed. Raises as `log`."""
        log = await self.log(caller, response_id)
        try:  # until a deleted response has ended, it still has a log
            await self.turn(caller, response_id)
        except NotFoundError:
            raise response_expired(response_id) from None
        except StoreUnavailableError:
            pass  # nor can anything be deleted now
        self._metrics.count("resumes")
        return log

    @property
    def num_running(self) -> int:
        """Responses that this gateway runs."""
        return len(self._tasks)

    async def turn(self, caller: Caller, response_id: str) -> StoredTurn:
        """The stored turn of a response.

        Raises:
            RequestRefusedError: 404 `response_not_found`.
        """
        try:
            return await self._conversations.turn(caller.tenant, response_id)
        except NotFoundError as error:
            raise _not_found(response_id) from error

    async def path(self, caller: Caller, response_id: str) -> list[StoredTurn]:
        """The turns up to and including a response. Raises as `turn`."""
        try:
            return await self._conversations.path(caller.tenant, response_id)
        except NotFoundError as error:
            raise _not_found(response_id) from error

    async def cancel(self, caller: Caller, response_id: str) -> StoredTurn:
        """Stop a response on whichever gateway it runs; does nothing if it has ended.

        Returns: the turn as it was stored before. Raises as `turn`.
        """
        turn = await self.turn(caller, response_id)
        if turn.status == "in_progress":
            await self._logs.cancel(caller.tenant, response_id)
        return turn

    def cancel_here(self, response_id: str) -> bool:
        """Stop a response, or another logged answer, that runs here; False: there is none."""
        task = self._running.get(response_id)
        if task is None or task.log.run is None:
            return False
        task.log.cancel()
        return True

    async def steer(
        self,
        caller: Caller,
        response_id: str,
        steer_id: str,
        value: Any,
        *,
        log: ResponseLog | None = None,
    ) -> dict[str, Any]:
        """Steer a response, on whichever gateway it runs, once for an id.

        Args:
            log: its log, where that is known.

        Returns: what is known of the steer (`events.steers_objects`) once it is in the log.

        Raises:
            RequestRefusedError: the steer was not accepted; `steering.CODES` says why.
        """
        if log is None:
            try:
                log = await self.log(caller, response_id)
            except RequestRefusedError as error:
                if error.code != "response_expired":
                    raise
                turn = await self.turn(caller, response_id)
                checked_text(value)
                told = stored_steer(turn, steer_id, value)
                if told is None:
                    raise already_completed(response_id) from None
                return told
        return await steer(
            log,
            steer_id,
            value,
            count=partial(self._planner.count, caller),
            ask=partial(self._logs.steer, caller.tenant, response_id, steer_id),
        )

    async def successor(self, caller: Caller, log: ResponseLog) -> ResponseLog | None:
        """The log of the response that answers what one was steered with; None: there is none.
        Raises as `log`."""
        steered = None if log.end is None else log.end.steered
        if steered is None or steered.status != "committed":
            return None
        return log.successor or await self.log(caller, successor_id(log.response_id))

    async def delete(self, caller: Caller, response_id: str) -> None:
        """Delete a response and its KV, stopping it if it runs. Responses that continued it can no
        longer be continued. Raises as `turn`."""
        turn = await self.cancel(caller, response_id)
        self._drop_prefix_of(turn)
        await self._conversations.delete_turn(caller.tenant, response_id)
        await self._delete_log(caller, turn.turn_id, is_running=turn.status == "in_progress")

    async def delete_conversation(self, caller: Caller, conversation_id: str) -> None:
        """Delete a conversation with its responses; running ones are stopped. Raises:
        NotFoundError."""
        turns = await self._conversations.tree(caller.tenant, conversation_id)
        for turn in turns:
            if turn.status == "in_progress":
                await self._stop(caller, turn.turn_id)
        await self._conversations.delete(caller.tenant, conversation_id)
        for turn in turns:
            await self._delete_log(caller, turn.turn_id, is_running=turn.status == "in_progress")

    async def delete_item(self, caller: Caller, turn: StoredTurn, item_id: str) -> None:
        """Delete an item of a turn, and what else tells of it: the KV, the token ids of this turn
        and of those after it, and their logs, which are only for resuming. Raises: NotFoundError.
        """
        turns = await self._conversations.tree(caller.tenant, turn.conversation_id)
        self._drop_prefix_of(turn)
        await self._conversations.replace_items(without_ids(without_item(turn, item_id)))
        if turn.status != "in_progress":
            await self._logs.delete(caller.tenant, turn.turn_id)
        await self._forget_prompts_after(caller, turn, turns, is_left_out=False)

    async def delete_turn(self, caller: Caller, turn: StoredTurn) -> None:
        """Delete a turn, and what else tells of it, as `delete_item` does. Turns after it continue
        the one before it.

        Raises:
            NotFoundError: it is not there any more.
            ConversationLockedError: a turn of the conversation runs.
        """
        turns = await self._conversations.tree(caller.tenant, turn.conversation_id)
        if any(each.status == "in_progress" for each in turns):
            raise head_locked(turn.conversation_id)
        self._drop_prefix_of(turn)
        await self._forget_prompts_after(caller, turn, turns, is_left_out=True)
        await self._conversations.delete_turn(caller.tenant, turn.turn_id, joins=True)
        await self._logs.delete(caller.tenant, turn.turn_id)

    async def _forget_prompts_after(
        self, caller: Caller, turn: StoredTurn, turns: Sequence[TurnSummary], *, is_left_out: bool
    ) -> None:
        """Forget the token ids of the turns after one, and their logs.

        Args:
            turns: of the conversation, parents before children.
            is_left_out: the turn is about to be deleted, so that no answer goes on with its own.
        """
        after = {turn.turn_id}
        for each in turns:
            if each.parent_id not in after:
                continue
            after.add(each.turn_id)
            if each.status == "in_progress":
                continue
            later = without_ids(await self._conversations.turn(caller.tenant, each.turn_id))
            if is_left_out and each.parent_id == turn.turn_id:
                later = dataclasses.replace(later, continues=False)
            await self._conversations.replace_items(later)
            await self._logs.delete(caller.tenant, each.turn_id)

    async def _delete_log(self, caller: Caller, response_id: str, *, is_running: bool) -> None:
        """Delete a response's log: at once if it has ended, otherwise once it has been stopped, so
        that its readers see the end."""
        if is_running:
            task = asyncio.create_task(self._delete_log_at_end(caller, response_id))
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)
        else:
            await self._logs.delete(caller.tenant, response_id)

    async def _delete_log_at_end(self, caller: Caller, response_id: str) -> None:
        try:
            log = await self.log(caller, response_id)
            with log.read() as reader:
                while await next_of(reader) is not None:
                    pass
            await self._logs.delete(caller.tenant, response_id)
        except RequestRefusedError as error:  # it is gone, or is kept until it expires
            _LOG.info("cannot delete the log of %s: %s", response_id, error)

    async def _stop(self, caller: Caller, response_id: str) -> None:
        try:
            await self._logs.cancel(caller.tenant, response_id)
        except RequestRefusedError as error:
            if error.code != "response_expired":  # without a log it does not run
                raise

    async def drop_prefix(self, caller: Caller, response_id: str) -> None:
        """Have the engine drop the KV of a conversation up to and including a response. Raises as
        `turn`."""
        self._drop_prefix_of(await self.turn(caller, response_id))

    def _drop_prefix_of(self, turn: StoredTurn) -> None:
        name = orjson.loads(turn.response).get("model") if turn.response else None
        adapter = self._planner.adapters.known(name)
        self._engine.drop_prefix(
            [*turn.prompt_token_ids, *turn.output_token_ids],
            turn.cache_salt,
            adapter=None if adapter is None else adapter.digest,
            images=turn.places,
        )


def _not_found(response_id: str) -> RequestRefusedError:
    return NotFoundError(
        f"there is no response {response_id!r}",
        code="response_not_found",
        param="response_id",
        status=404,
    )
