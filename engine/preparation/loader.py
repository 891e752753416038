"""The resources of one kind that are in memory, and the thread that loads them one at a time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Set
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.engine.errors import InvalidRequestError
from penstock.engine.preparation.resources import Need, Resources


class Loader:
    """
    Args:
        notify: called in the thread when a resource has been loaded, or could not be.
    """

    def __init__(self, kind: Resources, notify: Callable[[], None]) -> None:
        self.kind = kind
        self._notify = notify
        self._loaded: dict[Hashable, str] = {}  # key → tenant, the least recently used first
        self._in_thread: Need | None = None
        self._done: deque[tuple[Need, str, InvalidRequestError | None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-{kind.name}")

    def __contains__(self, key: Hashable) -> bool:
        """Whether a resource is loaded."""
        return key in self._loaded

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def num_bytes(self) -> int:
        """Of all that are loaded."""
        return sum(map(self.kind.size, self._loaded))

    @property
    def is_loading(self) -> bool:
        """Whether `collect` has not returned what the thread began with."""
        return self._in_thread is not None

    def touch(self, key: Hashable) -> None:
        """Say that a resource is used."""
        if key in self._loaded:
            self._loaded[key] = self._loaded.pop(key)

    def has_room(self, claimed: Set[Hashable]) -> bool:
        """Whether one more may be claimed beside these, which are or will be loaded. Those that
        will be are taken to be as large as the others are on average."""
        bounds = self.kind.bounds
        if bounds.max_count is not None and len(claimed) >= bounds.max_count:
            return False
        if not claimed:
            return True
        sizes = [self.kind.size(key) for key in claimed if key in self._loaded]
        num_bytes = float(sum(sizes))
        if len(sizes) < len(claimed) and self._loaded:
            num_bytes += (len(claimed) - len(sizes)) * self.num_bytes / len(self._loaded)
        return num_bytes < bounds.max_needed_bytes

    def fit(self, claimed: Set[Hashable], *, num_more: int = 0) -> bool:
        """Drop what is not claimed until the rest is within the bounds, the least recently used of
        the tenant that has the most first; whether it is.

        Args:
            num_more: that are to be loaded.
        """
        bounds, size = self.kind.bounds, self.kind.size
        sizes = {key: size(key) for key in self._loaded}
        num_bytes = sum(sizes.values())
        tenants = Counter[str]()
        for key, tenant in self._loaded.items():
            tenants[tenant] += sizes[key]
        others = [key for key in self._loaded if key not in claimed]
        max_count = math.inf if bounds.max_count is None else bounds.max_count - num_more
        while num_bytes > bounds.max_bytes or len(self._loaded) > max_count:
            if not others:
                return False
            victim = max(others, key=lambda key: tenants[self._loaded[key]])  # the first of equals
            others.remove(victim)
            num_bytes -= sizes[victim]
            tenants[self._loaded.pop(victim)] -= sizes[victim]
            self.kind.drop(victim)
        return True

    def start(self, need: Need, tenant: str) -> Future[InvalidRequestError | None]:
        """Have the thread load a resource; nothing else may be in it."""
        assert self._in_thread is None
        self._in_thread = need
        return self._thread.submit(self._load, need, tenant)

    def collect(self) -> tuple[Need, InvalidRequestError | None] | None:
        """What the thread has loaded, or why it could not; None: nothing new."""
        if not self._done:
            return None
        need, tenant, error = self._done.popleft()
        self._in_thread = None
        if error is None:
            self._loaded[need.key] = tenant
        return need, error

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, need: Need, tenant: str) -> InvalidRequestError | None:
        """In the thread."""
        error = None
        try:
            self.kind.load(need)
        except InvalidRequestError as refusal:
            error = refusal
        except BaseException as failure:  # the thread's, which nobody waits for
            message = f"{self.kind.title(need)} cannot be loaded: {failure!r:.200}"
            error = InvalidRequestError(message, param=self.kind.param)
        self._done.append((need, tenant, error))
        self._notify()
        return error
