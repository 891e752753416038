"""Runs a model on several ranks: this process is the first, the others are its children.

Every rank has a `ModelRunner` of its own, with a part of each matrix and of each block, and gets
every batch. All draw the same tokens, since all have the same logits; so nothing but sums and
logits travels between them, and only this process hands out results.

    this process ── batches, through shared memory ──► each other rank
                 ◄── a pulse each quarter of a second ──

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
from penstock.engine.parallel.ranks import ALONE, SharedRanks
from penstock.engine.pooling import ModelPooling
from penstock.engine.process import EXIT_STUCK, PULSE_FD, die_with_parent
from penstock.engine.request import Adapter, StructuredOutputs
from penstock.engine.runner.kv_swap import NoBlockBytes
from penstock.engine.runner.model_runner import ModelRunner, RunnerInfo, StepInFlight
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.cpu.cores import pin_rank

_PULSE_S = 0.25
# Without a pulse. The thread that sends it needs the GIL; no step holds that for long.
_MAX_SILENCE_S, _MAX_SILENCE_OF_FIRST_S = 10.0, 15.0
_SLOT_BYTES, _NUM_SLOTS = 1 << 18, 16
_HEAD, _LENGTH = struct.Struct("=Q?"), struct.Struct("=Q")
_POLL_S, _CLOSE_S = 0.001, 5.0
_BATCH, _LOAD, _DROP, _COMPILE = b"b", b"l", b"d", b"c"  # kinds of messages
_LOG = logging.getLogger(__name__)


class Board:
    """Where the first rank writes messages that all others read, each once.

    Attributes:
        pulses: a number of each rank, which grows while it lives.
    """

    def __init__(self, ranks: SharedRanks) -> None:
        header = ranks.memory.region(mmap.PAGESIZE).view(torch.int64).view(-1, 8)
        self._num_read = header[1 : ranks.size, 0].numpy()  # by each reader
        self.pulses = header[: ranks.size, 1].numpy()
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


class RankAdapters:
    """The adapters of all ranks."""

    def __init__(self, own: AdapterSlots | NoAdapters, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    def load(self, adapter: Adapter) -> None:
        self._own.load(adapter)
        self._tell(_LOAD + msgspec.msgpack.encode(adapter))

    def drop(self, digest: str) -> None:
        self._own.drop(digest)
        self._tell(_DROP + digest.encode())

    def has_head(self, digest: str) -> bool:
        return self._own.has_head(digest)


class RankGrammars:
    """The grammars of all ranks; the others compile while this one does."""

    def __init__(self, own: GrammarCompiler, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, grammar: StructuredOutputs) -> bool:
        return grammar in self._own

    def compile(self, grammar: StructuredOutputs) -> None:
        self._tell(_COMPILE + msgspec.msgpack.encode(grammar))
        self._own.compile(grammar)


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
        self._fds = tuple(
            os.memfd_create("penstock-ranks")
            for _ in range(1 + config.device.pipeline_parallel_size)
        )
        store = str(self._folder / "store")
        try:
            self._ranks = _make_ranks(config, 0, self._fds, store, check=self._check_start)
            self._board = Board(self._ranks)
            for rank in range(1, size):
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
                    ends_first=PULSE_FD in os.environ,  # a supervisor starts it again
                )
                self._children.append(_start_child(start))
            self._affinity = os.sched_getaffinity(0)
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
        self._executor: InProcessExecutor | OverlappedExecutor = (
            OverlappedExecutor(runner) if runner.info.overlaps_steps else InProcessExecutor(runner)
        )
        self._adapters = RankAdapters(self._executor.adapters, self._tell)
        self._grammars = RankGrammars(self._executor.grammars, self._tell)
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()

    @property
    def info(self) -> RunnerInfo:
        return self._executor.info

    def submit(self, batch: Batch) -> _CheckedHandle:
        self._tell(_BATCH + msgspec.msgpack.encode(batch))
        return _CheckedHandle(self._executor.submit(batch), self.check)

    def check(self) -> None:
        if self._end is not None:
            raise EngineDeadError(self._end)

    def num_parts_done(self) -> int:
        return self._executor.num_parts_done()

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
        self._ranks.close()
        self._close_files()
        os.sched_setaffinity(0, self._affinity)

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
        seen = list(self._board.pulses[1:])
        while not self._is_closing.wait(_PULSE_S):
            self._board.pulses[0] += 1
            pulses = list(self._board.pulses[1:])
            # Counted, not timed: where this process stands still, nothing is seen.
            num_still = [
                0 if now != last else num + 1
                for now, last, num in zip(pulses, seen, num_still, strict=True)
            ]
            seen = pulses
            for rank, child in enumerate(self._children, 1):
                code = child.process.poll()
                if code is not None:
                    self._give_up(f"rank {rank} has ended (exit code {code})")
                    return
                if num_still[rank - 1] * _PULSE_S > _MAX_SILENCE_S:
                    self._give_up(f"rank {rank} has not moved for {_MAX_SILENCE_S:.0f} s")
                    return

    def _give_up(self, why: str) -> None:
        _LOG.critical("%s: the engine ends", why)
        self._end = why
        self._kill()
        self._ranks.give_up()
        self.wake()
        # Calls of `torch.distributed` may wait for ever; a supervisor starts this process again.
        if self._ranks.is_distributed and PULSE_FD in os.environ:
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
        fds: of the memory of all ranks, and of those with the same layers, stage by stage.
    """
    num_stages, size = config.device.pipeline_parallel_size, config.device.tensor_parallel_size
    make = partial(SharedRanks, store=store, check=check)
    if num_stages == 1:
        return make(rank=rank, size=size, fd=fds[0])
    stage, number = divmod(rank, size)
    layers = make(rank=number, size=size, fd=fds[1 + stage]) if size > 1 else ALONE
    return make(
        rank=rank, size=size * num_stages, fd=fds[0], layers=layers, stage=stage,
        num_stages=num_stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _CheckedHandle:
    """A step whose result is worthless if a rank has ended meanwhile."""

    handle: DoneHandle | StepInFlight
    check: Callable[[], None]

    def result(self) -> BatchResult:
        result = self.handle.result()
        self.check()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What another rank is told at its start."""

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


def _start_child(start: _Start) -> _Child:
    status, child_status = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", __name__, str(child_status)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(*start.fds, child_status),
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
    import setproctitle  # as in `engine.process`

    setproctitle.setproctitle(f"penstock-rank {start.rank}")
    if start.dies_by_signal:
        die_with_parent(start.parent_pid)
    ranks = _make_ranks(start.config, start.rank, start.fds, start.store)
    ranks.num_on_cores = pin_rank(start.rank, ranks.size)
    board = Board(ranks)
    beat = threading.Thread(target=_show_life, args=(board, start), daemon=True)
    beat.start()
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
    rank = _OtherRank(runner, max_steps_in_flight=1 + runner.info.overlaps_steps)
    while True:
        try:
            message = board.read(start.rank, _wait)
        except EOFError:
            return 0
        rank.do(message)


class _OtherRank:
    """Does what the first rank says."""

    def __init__(self, runner: ModelRunner, *, max_steps_in_flight: int) -> None:
        self._runner, self._max_steps_in_flight = runner, max_steps_in_flight
        self._in_flight: deque[StepInFlight] = deque()
        self._compiling = ThreadPoolExecutor(1)
        self._batches = msgspec.msgpack.Decoder(Batch)
        self._adapters = msgspec.msgpack.Decoder(Adapter)
        self._grammars = msgspec.msgpack.Decoder(StructuredOutputs)

    def do(self, message: bytes) -> None:
        kind, data = message[:1], memoryview(message)[1:]
        if kind == _BATCH:
            if len(self._in_flight) == self._max_steps_in_flight:
                self._in_flight.popleft().result()
            self._in_flight.append(self._runner.launch(self._batches.decode(data)))
        elif kind == _LOAD:
            self._runner.adapters.load(self._adapters.decode(data))
        elif kind == _DROP:
            self._runner.adapters.drop(bytes(data).decode())
        else:
            self._compiling.submit(self._runner.grammars.compile, self._grammars.decode(data))


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


def _show_life(board: Board, start: _Start) -> None:
    """In a thread: let the first rank see that this process runs, and end with it, whatever this
    one waits for."""
    num_still, seen = 0, 0
    while os.getppid() == start.parent_pid:
        board.pulses[start.rank] += 1
        time.sleep(_PULSE_S)
        now = int(board.pulses[0])
        num_still, seen = num_still + 1 if now == seen else 0, now
        # It shows life once it has started.
        if start.ends_first and seen and num_still * _PULSE_S > _MAX_SILENCE_OF_FIRST_S:
            os.kill(start.parent_pid, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
