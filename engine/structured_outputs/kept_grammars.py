"""Compiled grammars that are kept, and the memory that they take, as it is measured.

The text of a grammar says little: 40 characters may take 0.5 MB when they are compiled, and 40 MB
when outputs have used them, since matchers of a grammar share a lexer that grows. llguidance does
not say how large it is, but the heap does: whenever a grammar is compiled, what the heap has grown
since the last one is shared among those that were used meanwhile. Which ones are kept is decided
where requests wait for them (`engine.preparation`).
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.engine.request import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LEAST_BYTES = 64 << 10  # of one
_UNMEASURED_BYTES = 1 << 20  # of one, where the heap does not say
_TRIMMED_BYTES = 8 << 20  # are given back at once


class KeptGrammar:
    """A compiled grammar.

    Attributes:
        matcher: others are copies of it.
        num_bytes: of it, as far as they are known; `least_bytes` when it was compiled.
        num_masks: made for outputs.
    """

    __slots__ = (
        "__weakref__",
        "_num_seen",
        "least_bytes",
        "matcher",
        "num_bytes",
        "num_masks",
    )

    def __init__(self, matcher: LLMatcher, *, num_bytes: int) -> None:
        self.matcher = matcher
        least = _UNMEASURED_BYTES if _mallinfo2 is None else _LEAST_BYTES
        self.num_bytes = self.least_bytes = max(num_bytes, least)
        self.num_masks = self._num_seen = 0

    def newly_used(self) -> float:
        """How much it was used since the last call. Its lexer grows most at first."""
        seen, self._num_seen = self._num_seen, self.num_masks
        return math.log1p(self._num_seen) - math.log1p(seen)


class KeptGrammars:
    """Threads may share it.

    Sequences keep what they use: a grammar that is dropped meanwhile goes with the last of them.

    Args:
        heap: bytes of it that are in use.

    Attributes:
        num_bytes: of all that are kept.
    """

    def __init__(self, *, heap: Callable[[], int] | None = None) -> None:
        self.num_bytes = 0
        self._heap = heap or heap_bytes
        self._heap_bytes: int | None = None  # when it was last looked at
        self._kept: dict[StructuredOutputs, KeptGrammar] = {}
        self._dropped: list[tuple[weakref.ref[KeptGrammar], int]] = []  # that may be in use
        self._trimmable_bytes = 0
        self._lock = threading.RLock()
        self._trimming = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, grammar: StructuredOutputs) -> bool:
        return grammar in self._kept

    def get(self, grammar: StructuredOutputs) -> KeptGrammar | None:
        return self._kept.get(grammar)

    def size(self, grammar: StructuredOutputs) -> int:
        """The bytes of one that is kept, as far as they are known."""
        return self._kept[grammar].num_bytes

    def made(self, grammar: StructuredOutputs, compiled: Callable[[], LLMatcher]) -> KeptGrammar:
        """Compile one, and keep it in place of its like."""
        with self._lock:
            self._measure_used()
        matcher = compiled()
        with self._lock:
            num_bytes = self._heap() - (self._heap_bytes or 0) + 2 * len(grammar.text)
            made = KeptGrammar(matcher, num_bytes=num_bytes)
            self._drop(grammar)
            self._kept[grammar] = made
            self.num_bytes += made.num_bytes
            self._trim_freed()
            self._heap_bytes = self._heap()
        return made

    def _measure_used(self) -> None:
        now = self._heap()
        grown = self._freed_bytes()
        grown += 0 if self._heap_bytes is None else now - self._heap_bytes
        shares = {kept: kept.newly_used() for kept in self._kept.values()}
        total = sum(shares.values())
        for kept, share in shares.items():
            if share:
                size = kept.num_bytes + int(grown * share / total)
                size = max(size, kept.least_bytes)
                self.num_bytes += size - kept.num_bytes
                kept.num_bytes = size
        self._heap_bytes = now

    def _freed_bytes(self) -> int:
        """Bytes of dropped grammars that no sequence has any more, since the last call."""
        freed = sum(num_bytes for kept, num_bytes in self._dropped if kept() is None)
        self._dropped = [each for each in self._dropped if each[0]() is not None]
        self._trimmable_bytes += freed
        return freed

    def drop(self, grammar: StructuredOutputs) -> None:
        """Keep one no longer, if it is kept."""
        with self._lock:
            self._drop(grammar)
            self._trim_freed()

    def _trim_freed(self) -> None:
        self._freed_bytes()
        if self._trimmable_bytes >= _TRIMMED_BYTES and self._trimming.acquire(blocking=False):
            self._trimmable_bytes = 0
            threading.Thread(target=self._trim, daemon=True).start()

    def _drop(self, grammar: StructuredOutputs) -> None:
        dropped = self._kept.pop(grammar, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes
            self._dropped.append((weakref.ref(dropped), dropped.num_bytes))

    def _trim(self) -> None:
        """Give the system back what was freed; in a thread, as it takes milliseconds."""
        try:
            if _malloc_trim is not None:
                _malloc_trim(0)
        finally:
            self._trimming.release()


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _of_libc(name: str, result: Any) -> Any:
    """A function of glibc; None: another library, or an older one."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    function.restype = result
    return function


_mallinfo2 = _of_libc("mallinfo2", _Mallinfo2)
_malloc_trim = _of_libc("malloc_trim", ctypes.c_int)


def heap_bytes() -> int:
    """Bytes of the heap that are in use; 0 where it does not say."""
    if _mallinfo2 is None:
        return 0
    info = _mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)
