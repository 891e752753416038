"""Timing calls from outside: what is measured stays as it is.

While attached, chosen functions are replaced by ones that add up the seconds they took. Standard
library only, since it also times imports.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

# A part's name → where its work is done: an owner (a class or a module) and a name in it.
Places: TypeAlias = Mapping[str, Sequence[tuple[Any, str]]]


def no_wait() -> None:
    """For devices whose work is done when the call returns."""


class CallTimer:
    """Seconds spent in each part.

    Args:
        places: none of them may call another, or its time counts twice.
        wait: returns when the device has done what a call launched.
    """

    def __init__(self, places: Places, *, wait: Callable[[], object] = no_wait) -> None:
        self._places = places
        self._wait = wait
        self._seconds = dict.fromkeys(places, 0.0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time what this process does, until the end of the block."""
        with ExitStack() as stack:
            for part, places in self._places.items():
                for owner, name in places:
                    original = getattr(owner, name)
                    stack.callback(setattr, owner, name, original)
                    setattr(owner, name, self._timed(part, original))
            yield

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._places, 0.0)
        return seconds

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **settings: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*args, **settings)
            self._wait()
            self._seconds[part] += time.perf_counter() - began_s
            return result

        return timed
