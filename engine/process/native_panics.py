"""Panics of `tokenizers`, which is written in Rust, without the stack that Rust prints.

A regular expression of a tokenizer panics when it has to try too often, for example on a run of
millions of spaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

_STDERR_FD = 2
_PANIC = re.compile(
    rb"\n?thread '[^\n]*' (?:\(\d+\) )?panicked at [^\n]*\n[^\n]*\n"
    rb"(?:stack backtrace:\n(?: +[^\n]*\n)*)?(?:note: [^\n]*\n)?"
)


def is_panic(error: BaseException) -> bool:
    """PyO3's class of panics derives from `BaseException` and cannot be imported."""
    return type(error).__name__ == "PanicException"


class PanicsHidden:
    """A context manager, which threads may share: what Rust prints of a panic is dropped. Anything
    else that the process writes to file descriptor 2 meanwhile goes to `sys.stderr` afterwards."""

    def __init__(self) -> None:
        self._reset()
        # Which registers nothing: an engine's process is a fork of a fork of a fork …
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._saved_fd = -1
        self._written: IO[bytes] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                with contextlib.suppress(OSError):  # no stderr, or no room for a file
                    self._redirect()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            rest = b"" if self._num_inside else b"".join(self._restored())
        if rest and sys.stderr is not None:
            sys.stderr.write(rest.decode(errors="replace"))

    def _redirect(self) -> None:
        if self._written is None:
            self._written = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (kept open)
        self._saved_fd = os.dup(_STDERR_FD)
        os.dup2(self._written.fileno(), _STDERR_FD)

    def _restored(self) -> Iterator[bytes]:
        if self._saved_fd < 0:
            return
        os.dup2(self._saved_fd, _STDERR_FD)
        os.close(self._saved_fd)
        self._saved_fd = -1
        assert self._written is not None
        if self._written.tell():  # both descriptors share the position
            self._written.seek(0)
            yield _PANIC.sub(b"", self._written.read())
            self._written.seek(0)
            self._written.truncate()


PANICS_HIDDEN = PanicsHidden()
