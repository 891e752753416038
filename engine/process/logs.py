"""Logging in every process: the format of a line, and the thread that writes it.

One event is one line of at most 2 KB: control characters in a message are escaped, a long message
is cut in the middle, and the lines of a traceback are indented, so that no caller can forge a line.
Logging and printing never wait for the log's reader (`LogWriter`). Standard library only, since the
supervisor logs too.
"""

from __future__ import annotations

import atexit
import io
import itertools
import json
import logging
import operator
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO, cast

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_STDERR_FD = 2
_MAX_QUEUED_BYTES = 1 << 19  # about 4,000 lines
_DRAIN_S = 1.0
_MAX_MESSAGE_BYTES = 1800
_PAUSE_S = 0.01  # between writes: waking for every line took a sixth of a small request's time


def configure_logging(level: str, style: str, *, text_format: str | None = None) -> LogWriter:
    """Log to stderr from `level` on. The `LogWriter` returned writes everything that this process
    writes to stdout and stderr, including `print`, warnings and tracebacks.

    Args:
        level: `debug`, `info`, `warning`, `error` or `critical`.
        style: `text` or `json`.
        text_format: format string of `logging`, for `text`.
    """
    formatter = _JsonFormatter() if style == "json" else _TextFormatter(text_format)

    def dropped(num_lines: int) -> str:
        text = "1 log line was dropped" if num_lines == 1 else f"{num_lines} log lines were dropped"
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return formatter.format(logging.makeLogRecord(fields))

    writer = LogWriter(dropped)
    _redirect(writer)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return writer


class LogWriter:
    """Writes lines to stdout and stderr, in order, from its own thread.

    A pipe without a reader blocks only that thread. Lines then wait in a queue; while it is full,
    new lines are dropped and counted, and so are lines that cannot be written (a full disk, a
    closed pipe). When lines can be written again, one reports how many are missing. At the end of
    the process the queue has a second to drain.

    Args:
        notice: makes the line that reports how many were dropped.
        max_bytes: of the queue; the writing thread holds as much again.

    Attributes:
        num_dropped: lines dropped so far.
    """

    def __init__(self, notice: Callable[[int], str], *, max_bytes: int = _MAX_QUEUED_BYTES) -> None:
        self.num_dropped = 0
        self._notice = notice
        self._max_bytes = max_bytes
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self.drain)

    def put(self, fd: int, data: bytes) -> None:
        """Queue bytes for a file descriptor, or drop them; never waits."""
        with self._changed:
            if self._queue and self._num_bytes + len(data) > self._max_bytes:
                self._is_full = True  # until the thread takes it, so that the gap is in one place
            if self._is_full:
                self._num_overflowed += data.count(b"\n")
                self.num_dropped += data.count(b"\n")
                return
            self._queue.append((fd, data))
            self._num_bytes += len(data)
            if len(self._queue) == 1 or self._is_filling():
                self._changed.notify_all()

    def drain(self, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything is written; whether it is. Called at interpreter exit; before
        `os._exit` or a fatal signal, the caller must call it."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return not (self._queue or self._is_writing)

    def _is_filling(self) -> bool:
        return self._num_bytes > self._max_bytes // 2

    def _start(self) -> None:
        """Start the thread with an empty queue; also after a fork, which does not copy threads."""
        # Its lock is re-entrant: a signal handler may log while its thread is in `put`.
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._is_full = False
        self._is_writing = False
        self._num_overflowed = 0  # lines that found the queue full
        self._num_untold = 0  # lines dropped and not reported yet
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                self._is_writing = True
                taken, self._queue = self._queue, deque()
                num_overflowed, self._num_overflowed = self._num_overflowed, 0
                self._num_bytes = 0
                self._is_full = False
            self._tell_dropped()
            for fd, items in itertools.groupby(taken, key=operator.itemgetter(0)):
                self._write(fd, b"".join(data for _, data in items))
            self._num_untold += num_overflowed
            if num_overflowed:
                self._tell_dropped()
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._is_filling, _PAUSE_S)

    def _write(self, fd: int, data: bytes) -> None:
        num_lost = _write_all(fd, data).count(b"\n")
        with self._changed:
            self.num_dropped += num_lost
        self._num_untold += num_lost

    def _tell_dropped(self) -> None:
        if self._num_untold:
            line = f"{self._notice(self._num_untold)}\n".encode()
            if not _write_all(_STDERR_FD, line):
                self._num_untold = 0


def _write_all(fd: int, data: bytes) -> bytes:
    """Write to `fd`; returns what could not be written, usually nothing."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process that shares the pipe made it non-blocking
            select.select([], [fd], [])
        except OSError:
            break
    return data


class _QueuedFile(io.RawIOBase):
    """A file descriptor whose writes go through a `LogWriter`."""

    def __init__(self, writer: LogWriter, fd: int) -> None:
        self._writer = writer
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        self._writer.put(self._fd, bytes(data))
        return len(data)


def _redirect(writer: LogWriter) -> None:
    """Send sys.stdout and sys.stderr, if open, through `writer`."""
    if sys.stdout is not None:
        sys.stdout = _queued(writer, sys.stdout)
    if sys.stderr is None:
        return
    before, sys.stderr = sys.stderr, _queued(writer, sys.stderr)
    for logger in logging.Logger.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):  # libraries create some at import
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(sys.stderr)


def _queued(writer: LogWriter, stream: TextIO) -> TextIO:
    # A descriptor of its own, since `native_panics` redirects that of stderr for moments.
    return io.TextIOWrapper(
        cast("BinaryIO", _QueuedFile(writer, os.dup(stream.fileno()))),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _TextFormatter(logging.Formatter):
    def __init__(self, text_format: str | None) -> None:
        super().__init__(text_format or "%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (overrides it)
        text = "".join(_escaped(c) for c in super().formatMessage(record))
        return _cut(text, written=str)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {line}" for line in super().formatException(ei).splitlines())


class _JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, the fields of `extra=`, and `exception`."""

    converter = time.gmtime  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), written=json.dumps),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _cut(text: str, *, written: Callable[[str], str]) -> str:
    """The text, without its middle if it is too long as it is written."""
    while (num_bytes := len(written(text).encode("utf-8", "replace"))) > _MAX_MESSAGE_BYTES:
        num_kept = len(text) * _MAX_MESSAGE_BYTES // num_bytes - 20  # always fewer
        tail = num_kept // 3
        text = f"{text[: num_kept - tail]} … {text[-tail:]}"
    return text


def _escaped(character: str) -> str:
    is_printed = character.isprintable() or character in " \t"
    return character if is_printed else repr(character)[1:-1]
