"""From the first rank to the others, which it starts, watches and ends, and back.

    this process ── messages, through shared memory ──► each other rank
                 ◄── a heartbeat each quarter of a second ──
                 ◄── results, through a pipe ── the last stage's first rank, if there are such

A rank that has ended, or shows no sign of life, is the end of all: the others are killed, and
`check` raises. Children also end with this process, whatever ends it; where a supervisor starts it
again, they end it when it stands still.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from penstock.engine.batch import BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError, EngineDeadError, EngineError
from penstock.engine.parallel.ranks import ALONE, Link, SharedRanks, shared_file
from penstock.engine.process.launch import EXIT_STUCK, HEARTBEAT_FD

_HEARTBEAT_S = 0.25
# Without a heartbeat. The thread that sends it needs the GIL; no step holds that for long.
_MAX_SILENCE_S, _MAX_SILENCE_OF_FIRST_S = 10.0, 15.0
_SLOT_BYTES, _NUM_SLOTS = 1 << 18, 16
_HEAD, _LENGTH = struct.Struct("=Q?"), struct.Struct("=Q")
_POLL_S, _CLOSE_S = 0.001, 5.0
_CHECK_S = 0.1  # while a result is awaited
_LOG = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What another rank is told at its start.

    Attributes:
        arguments: of its `ModelRunner`.
        result_fd: where it hands out the results; None: another rank does.
    """

    rank: int
    fds: tuple[int, ...]
    store: str
    config: EngineConfig
    arguments: Mapping[str, Any]
    parent_pid: int
    dies_by_signal: bool
    ends_first: bool
    result_fd: int | None

    def make_ranks(self) -> SharedRanks:
        return _make_ranks(self.config, self.rank, self.fds, self.store)


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


class RankChannel:
    """
    Args:
        module: what each other rank runs: with a file descriptor as its argument, on which it says
            once how its start went, and a `Start` on stdin (`read_start`).
        arguments: of each rank's `ModelRunner`, besides the config.
        reporter: the rank that hands out results, if that is another one.

    Attributes:
        ranks: for this one.
        wake: called, in another thread, when a rank has ended.
    """

    def __init__(
        self,
        module: str,
        config: EngineConfig,
        arguments: Mapping[str, Any],
        *,
        reporter: int | None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._end: str | None = None  # why no more steps can run
        self._is_closing = threading.Event()
        self._telling = threading.Lock()
        self._children: list[_Child] = []
        self._results: _Results | None = None
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        num_stages = config.device.pipeline_parallel_size
        self._fds = tuple(shared_file() for _ in range(2 * num_stages))  # see `_make_ranks`
        store = str(self._folder / "store")
        try:
            self.ranks = _make_ranks(config, 0, self._fds, store, check=self._check_start)
            self._board = ShmBroadcast(self.ranks)
            for rank in range(1, config.device.num_ranks):
                result_fds = os.pipe() if rank == reporter else None
                start = Start(
                    rank=rank,
                    fds=self._fds,
                    store=store,
                    config=config,
                    arguments=arguments,
                    parent_pid=os.getpid(),
                    # The signal comes when the thread ends that started the child.
                    dies_by_signal=threading.current_thread() is threading.main_thread(),
                    ends_first=HEARTBEAT_FD in os.environ,  # a supervisor starts it again
                    result_fd=None if result_fds is None else result_fds[1],
                )
                self._children.append(_start_child(start, module))
                if result_fds is not None:
                    os.close(result_fds[1])
                    self._results = _Results(os.fdopen(result_fds[0], "rb"))
        except BaseException:
            self.abandon()
            raise

    @property
    def has_results(self) -> bool:
        """Whether another rank hands out the results."""
        return self._results is not None

    def wait_for_start(self) -> None:
        """Wait until all ranks are ready, and watch them from then on; raises what one raised."""
        while not all(child.is_ready for child in self._children):
            self._check_start()
            time.sleep(_POLL_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._board.heartbeats[0] += 1  # it has started: from here on the ranks miss its heartbeat
        self._watcher.start()

    def abandon(self) -> None:
        """End a start."""
        self._kill()
        self._close_files()
        shutil.rmtree(self._folder, ignore_errors=True)

    def tell(self, message: bytes) -> None:
        """Write a message for all other ranks; any thread may call it."""
        with self._telling:
            self._board.write(message, self._wake_children, self.check)

    def next_result(self) -> BatchResult:
        """Wait for the result of the oldest step that another rank computes to the end."""
        assert self._results is not None
        return self._results.next(self.check)

    def check(self) -> None:
        """Raise `EngineDeadError` if a rank has ended."""
        if self._end is not None:
            raise EngineDeadError(self._end)

    def num_parts_done(self) -> int:
        """Of the other ranks' steps."""
        return int(self._board.num_parts.sum())

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
        self.ranks.close()
        self._close_files()

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
        self.ranks.give_up()
        self.wake()
        # Calls of `torch.distributed` may wait for ever; a supervisor starts this process again.
        if self.ranks.is_distributed and HEARTBEAT_FD in os.environ:
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


def _start_child(start: Start, module: str) -> _Child:
    status, child_status = os.pipe()
    own_fds = () if start.result_fd is None else (start.result_fd,)
    try:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", module, str(child_status)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(*start.fds, child_status, *own_fds),
        )
    finally:
        os.close(child_status)
    child = _Child(process, os.fdopen(status, "rb"))
    with contextlib.suppress(OSError):  # it has ended, which its status will show
        _write(_stdin(child).fileno(), pickle.dumps(start))
    return child


def _write(fd: int, data: bytes) -> None:
    """Write data with its length before it."""
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(fd, left) :]


def _stdin(child: _Child) -> IO[bytes]:
    assert child.process.stdin is not None
    return child.process.stdin


def _is_readable(pipe: IO[bytes]) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


# -- the other end --------------------------------------------------------------------------------


def read_start() -> Start:
    """What this process was told."""
    start: Start = pickle.loads(_read(_LENGTH.unpack(_read(_LENGTH.size))[0]))  # noqa: S301
    return start


def hand_out(result: BatchResult, fd: int) -> None:
    """Send a result to the first rank."""
    with contextlib.suppress(BrokenPipeError):  # the first rank ends
        _write(fd, msgspec.msgpack.encode(result))


def _read(num_bytes: int) -> bytes:
    """From stdin; raises `EOFError` if the first rank has ended."""
    data = b""
    while len(data) < num_bytes:
        part = os.read(0, num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def wait_for_message() -> None:
    """Raises `EOFError` if the first rank has ended."""
    _read(1)


class Life(threading.Thread):
    """Lets the first rank see that this process runs, and ends with it, whatever this one waits
    for."""

    def __init__(self, board: ShmBroadcast, start: Start) -> None:
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
