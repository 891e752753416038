"""A pipe that a server logs to, whose reader can pause, as that of a log collector does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_CAPACITY_BYTES = 4096  # the least that Linux takes: soon full
_PIECE_BYTES = 65536
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPipe:
    """A thread copies what comes to a file.

    Attributes:
        path: of that file.
        write_end: for the server.
    """

    path: Path
    write_end: int
    _read_end: int
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        with tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory:
            read_end, write_end = os.pipe()
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _CAPACITY_BYTES)
            pipe = cls(path=Path(directory) / "log", write_end=write_end, _read_end=read_end)
            thread = threading.Thread(target=pipe._copy)
            thread.start()
            try:
                yield pipe
            finally:
                pipe._is_over.set()
                thread.join()
                os.close(read_end)
                os.close(write_end)

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """The reader pauses meanwhile, then reads all."""
        with self._reading:
            yield

    @property
    def is_full(self) -> bool:
        """Whether a writer would wait: its one page is taken, in part at least."""
        return not select.select([], [self.write_end], [], 0)[1]

    def _copy(self) -> None:
        with self.path.open("ab", buffering=0) as file:
            while not self._is_over.is_set():
                if select.select([self._read_end], [], [], _LOOK_S)[0]:
                    with self._reading:
                        file.write(os.read(self._read_end, _PIECE_BYTES))
