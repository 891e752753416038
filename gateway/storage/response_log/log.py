"""The log of a response at one gateway: its machine (`replica`), its readers (`cursor`), and the
shell that stores it.

    Run.append ─► Replica ─ STORE ─► Storage (memory, disk, Redis)
                     ▲                  │
                     └─ acknowledged ◄──┘ ─ SHOW ─► cursors take what is visible

`Replica` decides, `ResponseLog.do` carries out what it says, and `Storage` reports what came of it.
There is one object for a response and gateway, however often the response changes gateways. Every
reader, live or replaying, on the gateway that runs the response or another, gets the same entries.
A slow reader gets several entries at a time and costs only its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.chat_formats import Piece
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.sources import next_of
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.cursor import Cursor, LogNotice
from penstock.gateway.storage.response_log.record import (
    MESSAGE,
    DeltaEntry,
    EndEntry,
    Entry,
    LogHeader,
    SteerEntry,
)
from penstock.gateway.storage.response_log.replica import Commands, Replica, Role

_ENDED = Role.ENDED
_SHOW, _STORE, _MEND = do.SHOW, do.STORE, do.MEND


class Storage(Protocol):
    """The shell of logs: carries out what their machines say."""

    def store(self, log: ResponseLog) -> None:
        """`replica.STORE`, soon."""
        ...

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        """All others; it may do nothing for those that need nothing of storage."""
        ...

    def doubt(self, log: ResponseLog) -> None:
        """Another gateway may have taken over this log, which runs here: verify it, if there are
        others."""
        ...

    async def settle(self, log: ResponseLog) -> None:
        """Wait until a log that is VERIFYING has been verified, or cannot be now."""
        ...

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        """Whether another gateway follows the log for a reader."""
        ...


class InMemory:
    """Storage in this process: entries are visible at once, and there is no other gateway."""

    def store(self, log: ResponseLog) -> None:
        replica = log.replica
        commands = replica.acknowledged(replica.epoch, len(replica.entries))
        if commands == _SHOW:  # nearly always
            for reader in log.readers:
                reader.wake()
        else:
            log.do(commands)

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        if commands & do.FOLLOW:
            log.fail(response_expired(log.response_id))

    def doubt(self, log: ResponseLog) -> None:
        """Nothing is uncertain."""

    async def settle(self, log: ResponseLog) -> None:
        """Nothing is uncertain."""

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:  # noqa: ARG002  (nowhere)
        return False


IN_MEMORY = InMemory()


def response_expired(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"the stream of response {response_id!r} is not available or has expired",
        code="response_expired",
        param="response_id",
        status=404,
    )


def not_active(response_id: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"the response {response_id!r} takes no more steering input; steer its successor, or "
        "continue it",
        code="response_not_active",
        param="response_id",
        status=409,
    )


def left_behind(response_id: str) -> RequestRefusedError:
    """The error of a reader whose gateway is stopping before the response has ended."""
    return RequestRefusedError(
        f"this gateway is shutting down; resume {response_id!r} on a new connection",
        code="response_moved",
        status=503,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What a store that was started again knows of a response that ran when it was stopped.

    Attributes:
        pool: the engines that computed it (`EnginePool.pool`).
        silent_s: since anything was last stored.
        is_complete: whether its log has all that readers may have seen.
    """

    pool: bytes
    silent_s: float
    is_complete: bool = True


class Runner(Protocol):
    """Runs a response."""

    def cancel(self) -> None:
        """Stop the response."""
        ...

    def steer(self, steer_id: str, text: str) -> None:
        """Queue the input of a `SteerEntry`, and end the response for it. Raises:
        RequestRefusedError."""
        ...

    def lose(self) -> None:
        """Another gateway has taken the response over."""
        ...

    def readers_changed(self) -> None:
        """The number of readers has changed."""
        ...


class Run:
    """A response while this gateway runs it: the right to append to its log, until another gateway
    takes the response over.

    Attributes:
        log: the response's.
        epoch: appended under.
    """

    __slots__ = ("_is_over", "_runner", "epoch", "log")

    def __init__(self, log: ResponseLog) -> None:
        self.log = log
        self.epoch = log.replica.epoch
        self._runner: Runner | None = None
        self._is_over = False

    @property
    def is_current(self) -> bool:
        return self.log.run is self

    def begin(self, runner: Runner) -> None:
        """Tell the runner, from now on, what happens. Something may have happened already."""
        self._runner = runner
        if not self.is_current:
            runner.lose()
        elif self.log.replica.is_cancelled:
            runner.cancel()

    def end(self) -> None:
        """The runner wants to hear no more. It may still append the end."""
        self._runner, self._is_over = None, True

    def append_delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[Mapping[str, Any], ...] = (),
        *,
        output_index: int = 0,
        kind: str = MESSAGE,
        name: str = "",
    ) -> None:
        """Append a delta of the newest item, or the first delta of the next one."""
        log = self.log
        entries = log.entries
        num_events = 1
        last = entries[-1] if entries else None
        if not (isinstance(last, DeltaEntry) and last.output_index == output_index):
            newest = log.open_item
            if newest is None or newest[0] != output_index:
                num_events += log.header.item_events(kind).opening
                if newest is not None:
                    num_events += log.header.item_events(newest[1]).closing
        number = log.header.num_opening_events if last is None else last.last_number + 1
        self.append(
            DeltaEntry(number, text, token_ids, logprobs, output_index, kind, num_events, name)
        )

    def append_more(self, text: str, token_ids: tuple[int, ...], output_index: int) -> bool:
        """Append another delta of the same item as the last entry, as `append_delta` would. False:
        that is of another item, or of none; nothing was appended."""
        log = self.log
        entries = log.entries
        last = entries[-1] if entries else None
        if type(last) is not DeltaEntry or last.output_index != output_index:
            return False
        number = last.number + last.num_events
        commands = log.replica.append(
            self.epoch, DeltaEntry(number, text, token_ids, (), output_index, last.kind)
        )
        if commands == _STORE:  # nearly always
            log.storage.store(log)
        else:
            log.do(commands)
        return True

    def append(self, entry: Entry) -> None:
        """Append the next entry. Nothing follows an `EndEntry`."""
        self.log.do(self.log.replica.append(self.epoch, entry))

    def notify(self, kind: str, **values: Any) -> None:
        """Send a notice to current readers, in order with the entries."""
        if self.is_current:
            self.log.notify(kind, **values)

    async def verify(self, *, is_superseded: bool) -> bool:
        """Whether this gateway still runs the response.

        Args:
            is_superseded: the engine says that another does.
        """
        log = self.log
        if self.is_current:
            log.storage.doubt(log)
            await log.storage.settle(log)
        if is_superseded and not log.is_resumable:
            log.do(log.replica.fenced(self.epoch))
        return self.is_current

    def steer(self, steer_id: str, text: str) -> None:
        """See `ResponseLog.steer`."""
        if self._is_over:
            raise not_active(self.log.response_id)
        if self._runner is not None:
            self._runner.steer(steer_id, text)

    async def stored(self) -> bool:
        """Wait until all entries are visible; whether this gateway still runs the response."""
        log = self.log
        with log.read(log.replica.last_stored_number) as reader:
            while self.is_current and log.replica.num_visible < len(log.entries):
                await next_of(reader)
        return self.is_current

    async def is_read_elsewhere(self) -> bool:
        """Whether the log has readers at other gateways."""
        return await self.log.storage.is_read_elsewhere(self.log)

    def tell(self, commands: Commands) -> None:
        """What happened to the response."""
        runner = self._runner
        if runner is None:
            return
        if commands & do.STOP:
            self._runner = None
            runner.lose()
        elif commands & do.CANCEL:
            runner.cancel()
        else:
            runner.readers_changed()


class ResponseLog:
    """One response.

    Args:
        role: the one that it begins with.

    Attributes:
        entries: in order; the first `replica.num_visible` are visible to readers.
        run: while this gateway runs the response.
        readers: open ones.
        notices: each with the number of entries before it.
        outage: after which it is to go on; None: none, or another gateway ran it.
        successor: that this gateway began, once the log has its end.
    """

    __slots__ = (
        "__weakref__",
        "entries",
        "failure",
        "header",
        "notices",
        "outage",
        "readers",
        "replica",
        "run",
        "storage",
        "successor",
    )

    def __init__(
        self,
        header: LogHeader,
        *,
        storage: Storage = IN_MEMORY,
        role: Role = Role.OWNED,
        is_resumable: bool = True,
    ) -> None:
        self.header = header
        self.replica = Replica(role, num_opening_events=header.num_opening_events)
        self.replica.is_resumable = is_resumable
        self.entries = self.replica.entries
        self.run: Run | None = Run(self) if self.replica.runs else None
        self.readers: set[LogReader] = set()
        self.notices: list[tuple[int, LogNotice]] = []
        self.outage: Outage | None = None
        self.failure: Exception | None = None
        self.storage = storage
        self.successor: ResponseLog | None = None

    @property
    def response_id(self) -> str:
        return self.header.response_id

    @property
    def is_resumable(self) -> bool:
        """False once an entry was sent to a client without being stored."""
        return self.replica.is_resumable

    @property
    def is_ended(self) -> bool:
        return self.replica.role is _ENDED

    @property
    def end(self) -> EndEntry | None:
        """The last entry, once it is visible to readers."""
        if self.replica.role is not _ENDED:
            return None
        last = self.entries[-1]
        assert isinstance(last, EndEntry)
        return last

    @property
    def next_number(self) -> int:
        """The sequence number of the next event."""
        return self.replica.next_number

    @property
    def deltas(self) -> list[DeltaEntry]:
        """The output so far."""
        return [entry for entry in self.entries if isinstance(entry, DeltaEntry)]

    @property
    def steers(self) -> list[SteerEntry]:
        return [entry for entry in self.entries if isinstance(entry, SteerEntry)]

    @property
    def token_ids(self) -> list[int]:
        return token_ids_of(self.deltas)

    @property
    def parts(self) -> tuple[list[DeltaEntry], list[DeltaEntry]]:
        """The deltas of the summary that comes before the answer, and those of the answer."""
        deltas = self.deltas
        num = 0
        if self.header.compaction is not None:
            num = sum(not entry.output_index for entry in deltas)
        return deltas[:num], deltas[num:]

    @property
    def open_item(self) -> tuple[int, str] | None:
        """Output index and kind of the newest item; None before the first."""
        for entry in reversed(self.entries):
            if isinstance(entry, DeltaEntry):
                return entry.output_index, entry.kind
        return (0, MESSAGE) if self.header.begins_message else None

    def read(self, after: int = -1) -> LogReader:
        """A cursor after the event numbered `after`; use it as a context manager.

        The opening events are not among the entries: a reader makes them from the header.
        """
        return LogReader(self, after)

    def begin_reading(self, reader: LogReader) -> None:
        if self.failure is not None:
            reader.fail(self.failure, at_once=False)
        self.readers.add(reader)
        self._report()
        if reader.is_ahead and self.replica.role is Role.OWNED:
            self.storage.doubt(self)

    def end_reading(self, reader: LogReader) -> None:
        self.readers.discard(reader)
        self._report()

    def _report(self) -> None:
        if self.run is not None:
            self.run.tell(do.NOTHING)

    def cancel(self) -> None:
        """Stop the response if this gateway runs it and it has not ended."""
        self.do(self.replica.cancel())

    def steer(self, steer_id: str, text: str) -> None:
        """Have the run here queue a steer, once. Before the run has a runner nothing happens.

        Raises:
            RequestRefusedError: it does not run here, or takes no more steers.
        """
        if any(entry.name == steer_id for entry in self.steers):
            return
        if self.run is None:
            raise not_active(self.response_id)
        self.run.steer(steer_id, text)

    def notify(self, kind: str, **values: Any) -> None:
        """Send a notice to current readers, in order with the entries."""
        self.notices.append((len(self.entries), LogNotice(kind, values)))
        self.wake()

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()

    def do(self, commands: Commands) -> None:
        """Carry out what the log's machine said."""
        if commands & _STORE:
            self.storage.store(self)
        if commands & _SHOW:
            for reader in self.readers:
                reader.wake()
        if commands >= _MEND:
            self._do_rarely(commands)

    def _do_rarely(self, commands: Commands) -> None:
        run = self.run
        if commands & (do.STOP | do.END):
            self.run = None
        elif commands & do.RUN:
            self.run = Run(self)
        if run is not None and commands & (do.STOP | do.CANCEL):
            run.tell(commands)
        if commands & do.REJOIN:
            self._cut_astray()
        self.storage.carry_out(self, commands)

    def _cut_astray(self) -> None:
        """Fail the readers whose events may not go together with what is visible now."""
        for reader in list(self.readers):
            is_astray = reader.is_ahead if self.replica.runs else reader.has_passed_all
            if is_astray:
                reader.fail(response_expired(self.response_id), at_once=True)

    def fail(self, error: Exception) -> None:
        """It can no longer be read from storage. Readers get what is visible, then this error."""
        if self.replica.failed():
            self.failure = error
            for reader in list(self.readers):
                reader.fail(error, at_once=False)


class LogReader(Cursor):
    """A cursor that its log knows of while it is open.

    with log.read(after) as reader:
        while (entries := await next_of(reader)) is not None:
            ...
    """

    __slots__ = ("log",)

    def __init__(self, log: ResponseLog, after: int) -> None:
        super().__init__(log.replica, log.notices, after=after)
        self.log = log

    def __enter__(self) -> LogReader:
        self.log.begin_reading(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.forget_call()
        self.log.end_reading(self)


def pieces_of(deltas: Sequence[DeltaEntry]) -> list[Piece]:
    """Output in parts."""
    return [Piece(each.kind, each.text, each.num_events > 1, each.name) for each in deltas]


def token_ids_of(deltas: Sequence[DeltaEntry]) -> list[int]:
    return [token_id for entry in deltas for token_id in entry.token_ids]
