"""Runs a model on several ranks: this process is the first, the others are its children.

Every rank has a `ModelRunner` of its own, with a part of each matrix and of each block, and gets
every batch. Those of one stage draw the same tokens, since all have the same logits; so nothing but
sums and logits travels between them, and one of them hands out results.

    this process ── batches, through shared memory ──► each other rank
                 ◄── a heartbeat each quarter of a second ──
                 ◄── results, through a pipe ── the last stage's first rank, if there are such

With stages of a native model, only the last one draws tokens. This process, which is in the first,
hands out the result when it has come, and the others learn the tokens with the next batch. So each
stage may be in another step; a sequence is in one of them only (`Scheduler`).

A rank that has ended, or shows no sign of life, is the end of all: the others are killed, and the
step raises. Children also end with this process, whatever ends it; where a supervisor starts it
again, they end it when it stands still.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import pickle
import queue
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import torch

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError, EngineDeadError, EngineError
from penstock.engine.executor.in_process import DoneHandle, InProcessExecutor, OverlappedExecutor
from penstock.engine.lora.slots import AdapterSlots, NoAdapters
from penstock.engine.models.registry import is_native
from penstock.engine.parallel.ranks import ALONE, Link, SharedRanks, shared_file
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.process.launch import EXIT_STUCK, HEARTBEAT_FD, die_with_parent
from penstock.engine.process.sandbox import give_way
from penstock.engine.request import Adapter, StructuredOutputs
from penstock.engine.runner.kv_swap import NoBlockBytes
from penstock.engine.runner.model_runner import ModelRunner, PendingStage, RunnerInfo, StepInFlight
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.cpu.cores import keep_on, pin_rank, usable_cpus

_HEARTBEAT_S = 0.25
# Without a heartbeat. The thread that sends it needs the GIL; no step holds that for long.
_MAX_SILENCE_S, _MAX_SILENCE_OF_FIRST_S = 10.0, 15.0
_SLOT_BYTES, _NUM_SLOTS = 1 << 18, 16
_HEAD, _LENGTH = struct.Struct("=Q?"), struct.Struct("=Q")
_POLL_S, _CLOSE_S = 0.001, 5.0
_CHECK_S = 0.1  # while a result is awaited
# Kinds of messages.
_BATCH, _LOAD, _DROP, _COMPILE, _DROP_GRAMMAR = b"b", b"l", b"d", b"c", b"g"
_READ_VOCABULARY = b"v"
_LOG = logging.getLogger(__name__)


class _Step(msgspec.Struct, array_like=True, frozen=True):
    """A step's message.

    Attributes:
        tokens: that have become known, for stages that do not draw them: seq_id → in place of how
            many drafts, and the tokens.
    """

    batch: Batch
    tokens: dict[int, tuple[int, tuple[int, ...]]] = {}


class ShmBroadcast:
    """Where the first rank writes messages that all others read, each once.

    Attributes:
        heartbeats: a number of each rank, which grows while it lives.
        num_parts: of each rank, the parts of its steps that are done.
    """

    def __init__(self, ranks: SharedRanks) -> None:
        header = ranks.memory.region(mmap.PAGESIZE).view(torch.int64).view(-1, 8)
        self._num_read = header[1 : ranks.size, 0].numpy()  # by each reader
        self.heartbeats = header[: ranks.size, 1].numpy()
        self.num_parts = header[: ranks.size, 2].numpy()
        slots = ranks.memory.region(_NUM_SLOTS * _SLOT_BYTES).view(_NUM_SLOTS, _SLOT_BYTES)
        self._slots = [memoryview(slot.numpy()) for slot in slots]
        self._num_written = 0

    def write(self, message: bytes, wake: Callable[[], None], check: Callable[[], None]) -> None:
        """
        Args:
            wake: called for every part of it.
            check: called while a reader has not read a part whose place is needed; may raise.
        """
        step = _SLOT_BYTES - _HEAD.size
        for start in range(0, len(message), step):
            part = memoryview(message)[start : start + step]
            while self._num_written - self._num_read.min() >= _NUM_SLOTS:
                check()
                time.sleep(_POLL_S)
            slot = self._slots[self._num_written % _NUM_SLOTS]
            slot[_HEAD.size : _HEAD.size + len(part)] = part
            _HEAD.pack_into(slot, 0, len(part), start + step >= len(message))
            self._num_written += 1
            wake()

    def read(self, reader: int, wait: Callable[[], None]) -> bytes:
        """
        Args:
            wait: returns once for every call of `wake`.
        """
        parts, is_last = [], False
        while not is_last:
            wait()
            slot = self._slots[self._num_read[reader - 1] % _NUM_SLOTS]
            size, is_last = _HEAD.unpack_from(slot)
            parts.append(bytes(slot[_HEAD.size : _HEAD.size + size]))
            self._num_read[reader - 1] += 1
        return b"".join(parts)


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    status: IO[bytes]  # on which it says once how its start went
    is_ready: bool = False


class _Results:
    """The results of the last stage, in the order of the steps.

    A thread reads them, so that a rank never waits for the first one to take its result.

    Args:
        pipe: from the rank that hands them out.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._read: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(BatchResult)
        self._thread = threading.Thread(target=self._run, name="penstock-results", daemon=True)
        self._thread.start()

    def next(self, check: Callable[[], None]) -> BatchResult:
        """
        Args:
            check: called while none has come; may raise.
        """
        while True:
            try:
                return self._decoder.decode(self._read.get(timeout=_CHECK_S))
            except queue.Empty:
                check()

    def close(self) -> None:
        """Once the rank has ended."""
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._pipe as pipe:
            while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
                (size,) = _LENGTH.unpack(head)
                data = pipe.read(size)
                if len(data) == size:  # or the rank ended
                    self._read.put(data)


class RankAdapters:
    """The adapters of all ranks."""

    def __init__(self, own: AdapterSlots | NoAdapters, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    @property
    def max_bytes(self) -> int:
        return self._own.max_bytes

    def load(self, adapter: Adapter) -> None:
        self._own.load(adapter)
        self._tell(_LOAD + msgspec.msgpack.encode(adapter))

    def drop(self, digest: str) -> None:
        self._own.drop(digest)
        self._tell(_DROP + digest.encode())

    def size(self, digest: str) -> int:
        return self._own.size(digest)

    def has_head(self, digest: str) -> bool:
        return self._own.has_head(digest)


class RankGrammars:
    """The grammars of all ranks; the others compile while this one does."""

    def __init__(self, own: GrammarCompiler, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    @property
    def num_kept(self) -> int:
        return self._own.num_kept

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        self._tell(_COMPILE + msgspec.msgpack.encode(grammar))
        self._own.compile(grammar, is_checked=is_checked)

    def read_vocabulary(self) -> None:
        self._tell(_READ_VOCABULARY)
        self._own.read_vocabulary()

    def drop(self, grammar: StructuredOutputs) -> None:
        self._tell(_DROP_GRAMMAR + msgspec.msgpack.encode(grammar))
        self._own.drop(grammar)

    def size(self, grammar: StructuredOutputs) -> int:
        return self._own.size(grammar)


class RanksExecutor:
    """
    Args:
        config, model_path, eos_token_ids, pooling: as for `ModelRunner`.

    Attributes:
        wake: called, in another thread, when a rank has ended.

    Raises:
        ConfigError, ModelLoadError: what any rank raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        eos_token_ids: tuple[int, ...],
        pooling: ModelPooling,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        size = config.device.num_ranks
        self._end: str | None = None  # why no more steps can run
        self._is_closing = threading.Event()
        self._telling = threading.Lock()
        self._children: list[_Child] = []
        folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        self._folder = Path(folder)
        self._num_stages = config.device.pipeline_parallel_size
        # See `_make_ranks`.
        self._fds = tuple(shared_file() for _ in range(2 * self._num_stages))
        self._results: _Results | None = None  # of another stage
        self._tokens: dict[int, tuple[int, tuple[int, ...]]] = {}  # that no other rank knows yet
        store = str(self._folder / "store")
        try:
            self._ranks = _make_ranks(config, 0, self._fds, store, check=self._check_start)
            self._board = ShmBroadcast(self._ranks)
            reporter = None  # the rank that hands out results, if that is another one
            if self._num_stages > 1 and is_native(config.model, model_path):
                reporter = size - config.device.tensor_parallel_size
            for rank in range(1, size):
                result_fds = os.pipe() if rank == reporter else None
                start = _Start(
                    rank=rank,
                    fds=self._fds,
                    store=store,
                    config=config,
                    model_path=model_path,
                    eos_token_ids=eos_token_ids,
                    pooling=pooling,
                    parent_pid=os.getpid(),
                    # The signal comes when the thread ends that started the child.
                    dies_by_signal=threading.current_thread() is threading.main_thread(),
                    ends_first=HEARTBEAT_FD in os.environ,  # a supervisor starts it again
                    result_fd=None if result_fds is None else result_fds[1],
                )
                self._children.append(_start_child(start))
                if result_fds is not None:
                    os.close(result_fds[1])
                    self._results = _Results(os.fdopen(result_fds[0], "rb"))
            self._affinity = usable_cpus()
            self._ranks.num_on_cores = pin_rank(0, size)
            runner = ModelRunner(
                config, model_path, eos_token_ids=eos_token_ids, pooling=pooling, ranks=self._ranks
            )
            while not all(child.is_ready for child in self._children):
                self._check_start()
                time.sleep(_POLL_S)
        except BaseException:
            self._kill()
            self._close_files()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._runner = runner
        self._executor: InProcessExecutor | OverlappedExecutor = (
            OverlappedExecutor(runner)
            if runner.info.async_scheduling
            else InProcessExecutor(runner)
        )
        self._adapters = RankAdapters(self._executor.adapters, self._tell)
        self._grammars = RankGrammars(self._executor.grammars, self._tell)
        self._board.heartbeats[0] += 1  # it has started: from here on the ranks miss its heartbeat
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()

    @property
    def info(self) -> RunnerInfo:
        return self._executor.info

    def submit(self, batch: Batch) -> _CheckedHandle | _SentOnHandle:
        step, self._tokens = _Step(batch, self._tokens), {}
        self._tell(_BATCH + msgspec.msgpack.encode(step))
        self._runner.receive(step.tokens)
        handle = self._executor.submit(batch)
        if self._results is None:
            return _CheckedHandle(handle, self.check)
        return _SentOnHandle(batch, handle, self._finish)

    def _finish(self, batch: Batch, own: BatchResult) -> BatchResult:
        """The result of the oldest step in flight, once the last stage hands it out.

        Args:
            own: of this stage.
        """
        assert self._results is not None
        result = self._results.next(self.check)
        assert result.step == batch.step
        for item in batch.scheduled:
            token_ids = result.token_ids.get(item.seq_id)
            if token_ids:
                self._tokens[item.seq_id] = (len(item.draft_token_ids), token_ids)
        return msgspec.structs.replace(
            result,
            compute_s=own.compute_s * self._num_stages,  # each takes about as long
            swap_out_s=own.swap_out_s,
            swap_in_s=own.swap_in_s,
        )

    def check(self) -> None:
        if self._end is not None:
            raise EngineDeadError(self._end)

    def num_parts_done(self) -> int:
        return self._executor.num_parts_done() + int(self._board.num_parts.sum())

    def describe(self) -> str:
        return self._executor.describe()

    @property
    def grammars(self) -> RankGrammars:
        return self._grammars

    @property
    def adapters(self) -> RankAdapters:
        return self._adapters

    @property
    def block_bytes(self) -> NoBlockBytes:
        return NoBlockBytes()  # each rank has a part of every block

    def close(self) -> None:
        """End the other ranks."""
        self._is_closing.set()
        self._watcher.join()
        for child in self._children:
            _stdin(child).close()
        deadline_s = time.monotonic() + _CLOSE_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        if self._results is not None:
            self._results.close()
        self._ranks.close()
        self._close_files()
        keep_on(self._affinity)

    def _tell(self, message: bytes) -> None:
        """Write a message for all other ranks; any thread may call it."""
        with self._telling:
            self._board.write(message, self._wake_children, self.check)

    def _wake_children(self) -> None:
        for child in self._children:
            try:
                os.write(_stdin(child).fileno(), b"\0")
            except OSError:  # it has ended, which the watcher will see
                self.check()

    def _check_start(self) -> None:
        """Read what the other ranks say about their start; raises what one of them raised."""
        for rank, child in enumerate(self._children, 1):
            if child.is_ready or not _is_readable(child.status):
                continue
            with child.status:
                text = child.status.read()
            found = pickle.loads(text) if text else None  # noqa: S301 (our own child's)
            if isinstance(found, EngineError):
                raise found
            if found is None:
                raise ConfigError(f"rank {rank} ended while it started; see its messages above")
            child.is_ready = True

    def _watch(self) -> None:
        """In a thread: end all ranks when one has ended, or does not move."""
        num_still = [0] * len(self._children)
        seen = list(self._board.heartbeats[1:])
        while not self._is_closing.wait(_HEARTBEAT_S):
            self._board.heartbeats[0] += 1
            heartbeats = list(self._board.heartbeats[1:])
            # Counted, not timed: where this process stands still, nothing is seen.
            num_still = [
                0 if now != last else num + 1
                for now, last, num in zip(heartbeats, seen, num_still, strict=True)
            ]
            seen = heartbeats
            for rank, child in enumerate(self._children, 1):
                code = child.process.poll()
                if code is not None:
                    self._give_up(f"rank {rank} has ended (exit code {code})")
                    return
                if num_still[rank - 1] * _HEARTBEAT_S > _MAX_SILENCE_S:
                    self._give_up(f"rank {rank} has not moved for {_MAX_SILENCE_S:.0f} s")
                    return

    def _give_up(self, why: str) -> None:
        _LOG.critical("%s: the engine ends", why)
        self._end = why
        self._kill()
        self._ranks.give_up()
        self.wake()
        # Calls of `torch.distributed` may wait for ever; a supervisor starts this process again.
        if self._ranks.is_distributed and HEARTBEAT_FD in os.environ:
            time.sleep(_CLOSE_S)
            os._exit(EXIT_STUCK)

    def _close_files(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            _stdin(child).close()
            child.status.close()


def _make_ranks(
    config: EngineConfig,
    rank: int,
    fds: Sequence[int],
    store: str,
    check: Callable[[], None] = lambda: None,
) -> SharedRanks:
    """
    Args:
        fds: of the memory of all ranks, of those with the same layers, stage by stage, and of the
            links from each stage to the next.
    """
    num_stages, size = config.device.pipeline_parallel_size, config.device.tensor_parallel_size
    make = partial(SharedRanks, store=store, check=check)
    if num_stages == 1:
        return make(rank=rank, size=size, fd=fds[0])
    stage, number = divmod(rank, size)
    layers = make(rank=number, size=size, fd=fds[1 + stage]) if size > 1 else ALONE
    links = fds[1 + num_stages :]
    link = partial(Link, num_ranks=1 + size, num_steps=num_stages)
    return make(
        rank=rank, size=size * num_stages, fd=fds[0], layers=layers, stage=stage,
        num_stages=num_stages,
        before=link(links[stage - 1], rank=1 + number) if stage else None,
        after=link(links[stage], rank=0) if number == 0 and stage < num_stages - 1 else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _CheckedHandle:
    """A step whose result is worthless if a rank has ended meanwhile."""

    handle: DoneHandle | StepInFlight | PendingStage
    check: Callable[[], None]

    def result(self) -> BatchResult:
        result = self.handle.result()
        self.check()
        return result


@dataclass(frozen=True, slots=True)
class _SentOnHandle:
    """A step of which this process has done the first stage."""

    batch: Batch
    handle: DoneHandle | StepInFlight | PendingStage
    finish: Callable[[Batch, BatchResult], BatchResult]

    def result(self) -> BatchResult:
        return self.finish(self.batch, self.handle.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What another rank is told at its start.

    Attributes:
        result_fd: where it hands out the results; None: another rank does.
    """

    rank: int
    fds: tuple[int, ...]
    store: str
    config: EngineConfig
    model_path: Path
    eos_token_ids: tuple[int, ...]
    pooling: ModelPooling
    parent_pid: int
    dies_by_signal: bool
    ends_first: bool
    result_fd: int | None


def _start_child(start: _Start) -> _Child:
    status, child_status = os.pipe()
    own_fds = () if start.result_fd is None else (start.result_fd,)
    try:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", __name__, str(child_status)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(*start.fds, child_status, *own_fds),
        )
    finally:
        os.close(child_status)
    child = _Child(process, os.fdopen(status, "rb"))
    data = pickle.dumps(start)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    with contextlib.suppress(OSError):  # it has ended, which its status will show
        while left:
            left = left[os.write(_stdin(child).fileno(), left) :]
    return child


def _stdin(child: _Child) -> IO[bytes]:
    assert child.process.stdin is not None
    return child.process.stdin


def _is_readable(pipe: IO[bytes]) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


# -- another rank -------------------------------------------------------------------------------


def main(status: int) -> int:
    """Another rank's process: run every batch until the first rank ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank handles it
    start: _Start = pickle.loads(_read(_LENGTH.unpack(_read(_LENGTH.size))[0]))  # noqa: S301
    import setproctitle  # as in `engine.process.launch`

    setproctitle.setproctitle(f"penstock-rank {start.rank}")
    if start.dies_by_signal:
        die_with_parent(start.parent_pid)
    ranks = _make_ranks(start.config, start.rank, start.fds, start.store)
    ranks.num_on_cores = pin_rank(start.rank, ranks.size)
    board = ShmBroadcast(ranks)
    life = _Life(board, start)
    life.start()
    try:
        runner = ModelRunner(
            start.config,
            start.model_path,
            eos_token_ids=start.eos_token_ids,
            pooling=start.pooling,
            ranks=ranks,
        )
    except EngineError as error:
        os.write(status, pickle.dumps(error))
        return 1
    os.write(status, pickle.dumps("ready"))
    os.close(status)
    gc.collect()
    gc.freeze()
    life.num_parts_done = runner.progress.num_parts_done
    rank = _OtherRank(
        runner, max_steps_in_flight=1 + runner.info.async_scheduling, result_fd=start.result_fd
    )
    while True:
        try:
            message = board.read(start.rank, _wait)
        except EOFError:
            return 0
        rank.do(message)


class _OtherRank:
    """Does what the first rank says."""

    def __init__(
        self, runner: ModelRunner, *, max_steps_in_flight: int, result_fd: int | None
    ) -> None:
        self._runner, self._max_steps_in_flight = runner, max_steps_in_flight
        self._result_fd = result_fd
        self._in_flight: deque[StepInFlight | PendingStage] = deque()
        self._compiling = ThreadPoolExecutor(1)
        self._steps = msgspec.msgpack.Decoder(_Step)
        self._adapters = msgspec.msgpack.Decoder(Adapter)
        self._grammars = msgspec.msgpack.Decoder(StructuredOutputs)

    def do(self, message: bytes) -> None:
        kind, data = message[:1], memoryview(message)[1:]
        if kind == _BATCH:
            step = self._steps.decode(data)
            self._runner.receive(step.tokens)
            if len(self._in_flight) == self._max_steps_in_flight:
                self._in_flight.popleft().result()
            self._in_flight.append(self._runner.launch(step.batch))
            if self._result_fd is not None:
                self._hand_out(self._in_flight.popleft().result(), self._result_fd)
        elif kind == _LOAD:
            self._runner.adapters.load(self._adapters.decode(data))
        elif kind == _DROP:
            self._runner.adapters.drop(bytes(data).decode())
        elif kind == _COMPILE:
            self._compiling.submit(self._compile, self._grammars.decode(data))
        elif kind == _READ_VOCABULARY:
            self._compiling.submit(self._runner.grammars.read_vocabulary)
        else:  # after those that are being compiled, of which it may be one
            self._compiling.submit(self._runner.grammars.drop, self._grammars.decode(data))

    def _compile(self, grammar: StructuredOutputs) -> None:
        try:  # the first rank tells of errors
            self._runner.grammars.compile(grammar, is_checked=True)
        finally:
            give_way(threading.get_native_id())  # as the first rank's thread does

    def _hand_out(self, result: BatchResult, fd: int) -> None:
        data = msgspec.msgpack.encode(result)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        with contextlib.suppress(BrokenPipeError):  # the first rank ends
            while left:
                left = left[os.write(fd, left) :]


def _read(num_bytes: int) -> bytes:
    """From stdin; raises `EOFError` if the first rank has ended."""
    data = b""
    while len(data) < num_bytes:
        part = os.read(0, num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _wait() -> None:
    _read(1)


class _Life(threading.Thread):
    """Lets the first rank see that this process runs, and ends with it, whatever this one waits
    for."""

    def __init__(self, board: ShmBroadcast, start: _Start) -> None:
        super().__init__(name="penstock-life", daemon=True)
        self._board, self._start_info = board, start
        self.num_parts_done: Callable[[], int] = lambda: 0

    def run(self) -> None:
        board, start = self._board, self._start_info
        num_still, seen = 0, 0
        while os.getppid() == start.parent_pid:
            board.heartbeats[start.rank] += 1
            board.num_parts[start.rank] = self.num_parts_done()
            time.sleep(_HEARTBEAT_S)
            now = int(board.heartbeats[0])
            num_still, seen = num_still + 1 if now == seen else 0, now
            # It shows life once it has started.
            if start.ends_first and seen and num_still * _HEARTBEAT_S > _MAX_SILENCE_OF_FIRST_S:
                os.kill(start.parent_pid, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
