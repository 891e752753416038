"""Gateways on one Redis, without sockets, tasks and time: what may happen, happens when a test says
so. The gateways are the real machines and steps; only their shells are here, as short as possible.

Commands reach Redis at once, late or never, in full or in part; replies come, are lost, or come
twice. A gateway may stand still for any time, and its lease ends whenever the world says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from penstock.engine.request import FinishReason
from penstock.gateway.storage.redis.errors import RedisAwayError
from penstock.gateway.storage.redis.trips import Command, Steps
from penstock.gateway.storage.response_log import redis_steps as steps
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.leases import Leases
from penstock.gateway.storage.response_log.log import LogReader, ResponseLog, Run, response_expired
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, LogHeader
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    RedisLog,
    cancel_key,
    log_key,
    read_page,
    unless_foreign,
)
from penstock.gateway.storage.response_log.replica import BrokenLogError, Commands, Role

from .records import header

NUM_TOKENS = 20  # of a response
_LEASE_S, _MAX_BYTES = 3.0, 1 << 20
_TTL_S = 3600.0


class ModelRedis:
    """The commands that response logs use. Ids of streams rise."""

    def __init__(self) -> None:
        self.streams: dict[str, list[tuple[bytes, dict[bytes, bytes]]]] = {}
        self.sets: dict[str, set[bytes]] = {}
        self.values: dict[str, bytes] = {}

    def run(self, commands: Sequence[Command]) -> list[Any]:
        return [self._run(command) for command in commands]

    def _run(self, command: Command) -> Any:
        name, *words = command
        handle: Callable[..., Any] = getattr(self, f"_{str(name).lower()}")
        return handle(*words)

    def _xadd(self, key: str, *words: Any) -> Any:
        stream = self.streams.get(key)
        if words[0] == "NOMKSTREAM":
            words = words[1:]
            if stream is None:
                return None
        entry_id, *rest = (_bytes(word) for word in words)
        fields = dict(zip(rest[::2], rest[1::2], strict=True))
        if stream and _position(entry_id) <= _position(stream[-1][0]):
            return ResponseError("ERR the ID is equal or smaller than the target stream top item")
        self.streams.setdefault(key, []).append((entry_id, fields))
        return entry_id

    def _xrange(self, key: str, start: str, stop: str, *words: Any) -> Any:
        found = list(self.streams.get(key, ()))
        if start.startswith("("):
            found = [each for each in found if _position(each[0]) > _position(start[1:].encode())]
        elif start != "-":
            found = [each for each in found if each[0] == start.encode() == stop.encode()]
        return found[: words[1]] if words else found

    def _xrevrange(self, key: str, *_: Any) -> Any:
        return self.streams.get(key, [])[-1:]

    def _sadd(self, key: str, member: str) -> int:
        self.sets.setdefault(key, set()).add(member.encode())
        return 1

    def _srem(self, key: str, member: str) -> int:
        self.sets.get(key, set()).discard(member.encode())
        return 1

    def _smembers(self, key: str) -> Any:
        return sorted(self.sets.get(key, ()))

    def _set(self, key: str, value: bytes, *_: Any) -> Any:
        before = self.values.get(key)
        self.values[key] = value
        return before

    def _exists(self, key: str) -> int:
        return int(key in self.values)

    def _del(self, key: str) -> int:
        self.values.pop(key, None)
        return 1

    def _pexpire(self, *_: Any) -> int:
        return 1


def _bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def _position(entry_id: bytes) -> tuple[int, int]:
    epoch, _, number = entry_id.partition(b"-")
    return int(epoch), int(number)


@dataclasses.dataclass(eq=False)
class Process:
    """Some steps of a gateway.

    Attributes:
        commands: of the round trip that it waits for.
        replies: Redis has carried them out, and the replies are on their way.
        batch: the logs that it writes.
    """

    name: str
    steps: Steps[Any]
    done: Callable[[Any], None]
    commands: Sequence[Command] = ()
    replies: list[Any] | None = None
    batch: Sequence[RedisLog] = ()


class Runner:
    """Runs a response at a gateway: its tokens follow from their positions."""

    def __init__(self, gateway: ModelGateway, run: Run) -> None:
        self.gateway, self.run = gateway, run
        self.num_tokens = len(run.log.token_ids)
        self.is_cancelled = self.is_over = False
        run.begin(self)

    def cancel(self) -> None:
        self.is_cancelled = True

    def lose(self) -> None:
        self.is_over = True
        self.gateway.stale.append(self)

    def readers_changed(self) -> None:
        pass

    def go_on(self, num_tokens: int) -> None:
        """Append some tokens, or the end."""
        log, begin = self.run.log, self.num_tokens
        end = min(begin + num_tokens, NUM_TOKENS)
        if begin == NUM_TOKENS:
            self.is_over = True
            reason = FinishReason.ABORT if self.is_cancelled else FinishReason.STOP
            number = log.next_number
            usage = (3, 0, end)
            entry = EndEntry(number=number, num_events=3, reason=reason, usage=usage, ended_at=1)
            self.run.append(entry)
            return
        self.num_tokens = end
        text = "".join(f"<{index}>" for index in range(begin, end))
        self.run.append_delta(text, tuple(range(begin, end)))


class ModelGateway:
    """A gateway's logs and processes; the shell of its logs.

    Attributes:
        stale: runners that have been told that they are over.
        has_given_up: it has shown what Redis may not have.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.logs: dict[str, RedisLog] = {}
        self.dirty: dict[RedisLog, None] = {}
        self.to_mark: dict[RedisLog, None] = {}
        self.followed: dict[RedisLog, None] = {}
        self.chores: list[Command] = []
        self.runners: list[Runner] = []
        self.stale: list[Runner] = []
        self.processes: dict[str, Process] = {}
        self.is_frozen = False
        self.has_given_up = False
        self.repeat: Callable[[], None] = lambda: None
        settings = RedisLogSettings(lease_s=_LEASE_S, without_engine_s=0.0)
        self.leases = Leases(settings)
        self.takeovers = steps.Takeovers(name, self.leases, self, self)

    # -- `Storage` and `KnownLogs`

    def store(self, log: ResponseLog) -> None:
        assert isinstance(log, RedisLog)
        self.dirty[log] = None

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        assert isinstance(log, RedisLog)
        if commands & do.MEND:
            self.to_mark[log] = None
            self.has_given_up = True
        if commands & do.FOLLOW:
            self.followed[log] = None
        if commands & do.RELEASE:
            epoch = log.replica.epoch
            self.chores.append(steps.forget(self.name, log.response_id, epoch))
        if commands & do.FORWARD:
            self.world.redis.values[cancel_key(log.response_id)] = b"1"

    def doubt(self, log: ResponseLog) -> None:
        log.do(log.replica.unsure(log.replica.epoch))

    async def settle(self, log: ResponseLog) -> None:
        raise NotImplementedError

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        raise NotImplementedError

    def known(self, response_id: str) -> RedisLog | None:
        log = self.logs.get(response_id)
        return None if log is None or log.replica.role is Role.LOST else log

    def begin_following(self, log: RedisLog) -> None:
        self.logs[log.response_id] = log
        if log.replica.role is Role.FOLLOWED:
            self.followed[log] = None

    def taken_over(self, log: RedisLog) -> None:
        """See `_see_runs`."""

    # -- processes

    def begin(
        self,
        name: str,
        of: Steps[Any],
        done: Callable[[Any], None] = lambda _: None,
        batch: Sequence[RedisLog] = (),
    ) -> None:
        process = Process(name, of, done, batch=batch)
        self.processes[name] = process
        self.advance(process, None)

    def advance(self, process: Process, replies: Any) -> None:
        process.replies = None
        try:
            if isinstance(replies, Exception):
                process.commands = process.steps.throw(replies)
            else:
                process.commands = process.steps.send(replies)
            return
        except StopIteration as stop:
            result = stop.value
        except (RedisAwayError, LogExistsError, BrokenLogError, ResponseError) as error:
            result = error
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
        process.done(result)
        for log in process.batch:
            if log.replica.pending & do.STORE:
                self.dirty[log] = None
        self._see_runs()

    def _see_runs(self) -> None:
        """The response service would find these in its queue."""
        running = {runner.run for runner in self.runners}
        for log in self.logs.values():
            if log.run is not None and log.run not in running:
                self.runners.append(Runner(self, log.run))

    def can_begin(self) -> dict[str, Callable[[], None]]:
        """What this gateway could begin now."""
        found: dict[str, Callable[[], None]] = {}
        busy = self.processes
        if self.dirty and "write" not in busy:
            found["write"] = self._write
        if self.to_mark and "mark" not in busy:
            found["mark"] = self._mark
        if self.followed and "follow" not in busy:
            found["follow"] = self._follow
        if self.chores and "chores" not in busy:
            found["chores"] = self._send_chores
        if "beat" not in busy and not self.leases.is_leaving:
            found["beat"] = self._beat
        if "take over" not in busy and self.leases.may_scan(self.world.now_s):
            found["take over"] = self._scan
        return found

    def _write(self) -> None:
        batch, self.dirty = list(self.dirty), {}

        def write() -> Steps[None]:
            yield from steps.verify(batch)
            yield from steps.write(batch, max_bytes=_MAX_BYTES)

        self.begin("write", write(), batch=batch)

    def _mark(self) -> None:
        log = next(iter(self.to_mark))

        def done(result: Any) -> None:
            log.do(result if isinstance(result, int) else do.NOTHING)
            if not log.replica.pending & do.MEND:
                self.to_mark.pop(log, None)

        self.begin("mark", steps.mark_broken(log), done)

    def _follow(self) -> None:
        log = next(iter(self.followed))
        del self.followed[log]
        position = log.replica.position

        def done(result: Any) -> None:
            if isinstance(result, BrokenLogError):
                log.fail(response_expired(log.response_id))
            elif log.replica.role is Role.FOLLOWED:
                self.followed[log] = None

        def read() -> Steps[None]:
            (page,) = yield [read_page(log.key, after=position)]
            log.receive(position, unless_foreign(page) or [])

        self.begin("follow", read(), done)

    def _send_chores(self) -> None:
        chores, self.chores = self.chores, []

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                self.chores += chores

        def send() -> Steps[None]:
            yield chores

        self.begin("chores", send(), done)

    def _beat(self) -> None:
        def beat() -> Steps[None]:
            yield from steps.beat(self.takeovers, lease_s=_LEASE_S, ttl_s=_TTL_S)
            if self.leases.has_lapsed:
                running = [log for log in self.logs.values() if log.replica.runs]
                yield from steps.verify_all(running, self.takeovers)

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                self.leases.away()
            else:
                self.leases.turned(self.world.now_s)

        self.begin("beat", beat(), done)

    def _scan(self) -> None:
        def scan() -> Steps[None]:
            for claim in list(self.leases.claims.values()):
                yield from self.takeovers.finish(claim)
            found = yield from steps.scan(self.takeovers, lambda: self.world.now_s, lambda: True)
            for name, notes in found:
                for each in notes:
                    yield from self.takeovers.take_over(name, each)

        self.begin("take over", scan())

    def create(self, made: LogHeader) -> None:
        key, opener = log_key(made.response_id) or "", f"{self.name} {made.nonce}".encode()
        log = RedisLog(made, key=key, storage=self, opener=opener)

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                is_refused = isinstance(result, LogExistsError)
                log.do(log.replica.not_opened(is_refused=is_refused))
            else:
                self.logs[log.response_id] = log
                log.do(log.replica.opened())

        self.begin("create", steps.open_log(log, self.name, ttl_s=_TTL_S), done)

    def find(self, response_id: str, then: Callable[[RedisLog], None]) -> None:
        """Have a log read, and call `then` with it."""
        known = self.known(response_id)
        if known is not None and known.replica.pending & do.MEND:

            def marked(result: Any) -> None:
                known.do(result if isinstance(result, int) else do.NOTHING)
                then(known)

            self.begin("find", steps.mark_broken(known), marked)
            return
        if known is not None:
            then(known)
            return

        def done(result: Any) -> None:
            log = self.known(response_id) or (None if isinstance(result, Exception) else result)
            if log is not None:
                self.begin_following(log)
                then(log)

        key = log_key(response_id) or ""
        self.begin("find", steps.read_log(key, self), done)

    def give_up_writing(self) -> None:
        """Redis has not answered in time."""
        process = self.processes.pop("write")
        self.world.stragglers.append((process.commands, process.replies is not None))
        for log in process.batch:
            log.do(log.replica.late(log.replica.epoch))
        for log in self.logs.values():
            log.do(log.replica.unsure(log.replica.epoch))


@dataclasses.dataclass(eq=False)
class Reader:
    """A client that reads a response from its beginning, at one gateway after another.

    Attributes:
        token_ids: all that it got.
        number: of the last event.
        is_warned: it was told that the response is not resumable.
        is_astray: it resumed all the same.
        failure: its last gateway could not read on.
    """

    response_id: str
    at: ModelGateway | None = None
    reader: LogReader | None = None
    number: int = -1
    token_ids: list[int] = dataclasses.field(default_factory=list)
    entries: list[DeltaEntry | EndEntry] = dataclasses.field(default_factory=list)
    is_warned: bool = False
    is_astray: bool = False
    is_over: bool = False
    failure: Exception | None = None

    def attach(self, gateway: ModelGateway) -> None:
        self.leave()
        self.at, self.failure = gateway, None

        def open_at(log: RedisLog) -> None:
            if self.at is gateway and self.reader is None:
                self.reader = log.read(self.number).__enter__()
                # Redis cannot say whether another gateway has it, so there is no other answer.
                self.is_astray |= self.number >= 0 and log.replica.role is Role.UNLOGGED

        if "find" not in gateway.processes:
            gateway.find(self.response_id, open_at)

    def leave(self) -> None:
        if self.reader is not None:
            self.reader.__exit__()
        self.at = self.reader = None

    def read(self) -> None:
        """Take what there is, and check it."""
        reader = self.reader
        if reader is None or self.failure is not None:
            return
        try:
            found = reader.take()
        except Exception as error:  # as a client sees it: it may resume
            self.failure = error
            return
        self.is_warned |= not reader.log.is_resumable
        for entry in found:
            assert isinstance(entry, DeltaEntry | EndEntry)
            self._check(entry, reader.log)
            self.entries.append(entry)
        if reader.is_over:
            assert self.entries
            assert self.entries[-1].is_end, "it is over, and has no end"
            self.is_over = True

    def _check(self, entry: DeltaEntry | EndEntry, log: ResponseLog) -> None:
        assert not (self.entries and self.entries[-1].is_end), "something after the end"
        expected = max(self.number + 1, log.header.num_opening_events)
        if isinstance(entry, DeltaEntry) or not self.is_warned:
            assert entry.number == expected, f"event {entry.number} instead of {expected}"
        self.number = entry.last_number
        if isinstance(entry, DeltaEntry):
            self.token_ids += entry.token_ids
            whole = list(range(len(self.token_ids)))
            assert self.token_ids == whole or self.is_astray, self.token_ids


class World:
    """Some gateways, one response, and its readers."""

    def __init__(self, num_gateways: int = 3, *, may_give_up: bool = True) -> None:
        self.redis = ModelRedis()
        self.now_s = 100.0
        self.gateways = [ModelGateway(self, f"{{{index}}}") for index in range(num_gateways)]
        self.header = header()
        self.readers = [Reader(self.header.response_id) for _ in range(num_gateways + 1)]
        self.stragglers: list[tuple[Sequence[Command], bool]] = []
        self._may_give_up = may_give_up
        for gateway in self.gateways:
            self._serve(gateway, "beat", gateway.can_begin()["beat"])
        first = self.gateways[0]
        first.create(self.header)
        self._finish(first)
        for reader, gateway in zip(self.readers, [first, *self.gateways], strict=True):
            reader.attach(gateway)
            self._finish(gateway)

    def _serve(self, gateway: ModelGateway, name: str, begin: Callable[[], None]) -> None:
        begin()
        while (process := gateway.processes.get(name)) is not None:
            gateway.advance(process, self.redis.run(process.commands))

    def _finish(self, gateway: ModelGateway) -> None:
        while gateway.processes:
            process = next(iter(gateway.processes.values()))
            replies = process.replies
            if replies is None:
                replies = self.redis.run(process.commands)
            gateway.advance(process, replies)

    @property
    def has_given_up(self) -> bool:
        return any(gateway.has_given_up for gateway in self.gateways)

    # -- what may happen

    def happenings(self) -> list[Callable[[int], None]]:
        """All that could happen next; each takes a number for its details."""
        found: list[Callable[[int], None]] = [self._pass_time, self._expire]
        for gateway in self.gateways:
            found.append(lambda _, of=gateway: self._freeze(of))  # type: ignore[misc]
            if gateway.is_frozen:
                continue
            found += [
                lambda _, call=begin: call()  # type: ignore[misc]
                for begin in gateway.can_begin().values()
            ]
            found += [lambda num, of=gateway: self._work(of, num)] * 2  # type: ignore[misc]
            found.append(lambda num, of=gateway: self._hand_over(of, num))  # type: ignore[misc]
            for process in gateway.processes.values():
                found += [
                    lambda how, of=gateway, it=process: self._answer(of, it, how)  # type: ignore[misc]
                ] * 3
            found.append(lambda _, of=gateway: of.repeat())  # type: ignore[misc]
            for runner in [each for each in gateway.runners if not each.is_over]:
                found += [lambda num, of=runner: of.go_on(1 + num % 3)] * 2  # type: ignore[misc]
            for runner in gateway.stale[-2:]:
                found.append(lambda num, of=runner: of.go_on(1 + num % 3))  # type: ignore[misc]
            if "write" in gateway.processes and self._may_give_up:
                found.append(lambda _, of=gateway: of.give_up_writing())  # type: ignore[misc]
        for reader in self.readers:
            found.append(lambda _, of=reader: of.read())  # type: ignore[misc]
            found.append(lambda num, of=reader: self._move(of, num))  # type: ignore[misc]
        if self.stragglers:
            found.append(self._arrive_late)
        return found

    def _work(self, gateway: ModelGateway, num: int) -> None:
        """It does undisturbed what it has to."""
        self._finish(gateway)
        for _ in range(1 + num % 2):
            for name in ("beat", "write", "take over", "mark", "chores", "follow"):
                if (begin := gateway.can_begin().get(name)) is not None:
                    self._serve(gateway, name, begin)

    def _hand_over(self, gateway: ModelGateway, num: int) -> None:
        """It leaves, if another stays."""
        if num % 4 or any(other.leases.is_leaving for other in self.gateways):
            return
        gateway.leases.is_leaving = True
        gateway.processes.pop("take over", None)
        for log in gateway.logs.values():
            if log.replica.role is not Role.UNLOGGED:
                log.do(log.replica.fenced(log.replica.epoch))
        self.redis.values.pop(steps.lease_key(gateway.name), None)

    def _pass_time(self, num: int) -> None:
        self.now_s += (0.1, 0.5, 1.0, 4.0)[num % 4]

    def _expire(self, num: int) -> None:
        """A lease ends, as it would for a gateway that is frozen or far away."""
        gateway = self.gateways[num % len(self.gateways)]
        self.redis.values.pop(steps.lease_key(gateway.name), None)

    def _freeze(self, gateway: ModelGateway) -> None:
        gateway.is_frozen = not gateway.is_frozen
        if gateway.is_frozen:
            self.redis.values.pop(steps.lease_key(gateway.name), None)

    def _answer(self, gateway: ModelGateway, process: Process, how: int) -> None:
        if gateway.processes.get(process.name) is not process:
            return
        kind = how % 8
        if process.replies is not None:
            if kind < 6:
                self._reply(gateway, process, process.replies)
            else:
                self._away(gateway, process)
        elif kind < 4:
            self._reply(gateway, process, self.redis.run(process.commands))
        elif kind == 4:  # the replies come later
            process.replies = self.redis.run(process.commands)
        elif kind == 5:  # the connection is cut in the middle
            num = how // 8 % (len(process.commands) + 1)
            self.redis.run(process.commands[:num])
            self.stragglers.append((process.commands[num:], False))
            self._away(gateway, process)
        elif kind == 6:  # some replies are lost
            num = how // 8 % (len(process.commands) + 1)
            replies = self.redis.run(process.commands)
            away = [RedisAwayError()] * (len(replies) - num)
            self._reply(gateway, process, [*replies[:num], *away])
        else:
            self.stragglers.append((process.commands, False))
            self._away(gateway, process)

    def _reply(self, gateway: ModelGateway, process: Process, replies: list[Any]) -> None:
        epochs = [(log, log.replica.epoch, len(log.entries)) for log in process.batch]
        is_written = bool(process.commands) and process.commands[0][0] == "XADD"
        gateway.advance(process, replies)

        def repeat() -> None:
            for log, epoch, num in epochs:
                if num <= len(log.entries) and log.replica.num_stored >= num:
                    log.do(log.replica.acknowledged(epoch, num))

        if is_written and process.batch:
            gateway.repeat = repeat

    def _away(self, gateway: ModelGateway, process: Process) -> None:
        for log in process.batch:
            log.do(log.replica.unsure(log.replica.epoch))
        gateway.advance(process, RedisAwayError())

    def _arrive_late(self, num: int) -> None:
        commands, is_done = self.stragglers.pop(num % len(self.stragglers))
        if not is_done:
            self.redis.run([each for each in commands if each[0] in ("XADD", "SADD", "SREM")])

    def _move(self, reader: Reader, num: int) -> None:
        gateway = self.gateways[num % len(self.gateways)]
        reader.read()
        if not (gateway.is_frozen or reader.is_over or reader.is_warned):
            reader.attach(gateway)

    # -- and in the end

    def settle(self) -> None:
        """Nothing more goes wrong: whatever is to happen, happens."""
        for gateway in self.gateways:
            gateway.is_frozen = False
        for turn in range(80):
            self.now_s += 1.0
            for gateway in self.gateways:
                self._finish(gateway)
                if gateway.leases.is_leaving:
                    self.redis.values.pop(steps.lease_key(gateway.name), None)
                for name in ("beat", "write", "mark", "chores", "take over", "follow", "write"):
                    if (begin := gateway.can_begin().get(name)) is not None:
                        self._serve(gateway, name, begin)
                if turn > 5:
                    for runner in [each for each in gateway.runners if not each.is_over]:
                        runner.go_on(3)
            for reader in self.readers:
                reader.read()
                if reader.is_over or reader.is_warned:
                    continue
                if reader.failure is not None or reader.reader is None:
                    reader.attach(reader.at or self.gateways[0])
                    self._finish(reader.at or self.gateways[0])
            if turn > 10 and all(reader.is_over for reader in self.readers):
                return

    def check(self) -> None:
        """Who was not warned has it all, and the same as everybody else; and Redis has it."""
        warned = [reader for reader in self.readers if reader.is_warned]
        if not self.has_given_up:
            assert not warned
            for reader in self.readers:
                assert reader.is_over, f"{reader.failure!r} after event {reader.number}"
                assert reader.entries == self.readers[0].entries
                assert reader.token_ids == list(range(NUM_TOKENS))
            running = [log for each in self.gateways for log in each.logs.values() if log.run]
            assert not running
        complete = [reader.entries for reader in self.readers if reader.is_over]
        told = {len(entries) for entries in complete}
        assert len(told) <= 1 or self.has_given_up
