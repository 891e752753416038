"""The resources of one kind that are in memory, and the thread that loads them one at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Set
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.engine.errors import InvalidRequestError
from penstock.engine.preparation.resources import Need, Resources


class Loader:
    """
    Args:
        notify: called in the thread when a resource has been loaded, or could not be.

    Attributes:
        num_bytes: of all that are loaded, when the last one was.
    """

    def __init__(self, kind: Resources, notify: Callable[[], None]) -> None:
        self.kind = kind
        self._notify = notify
        self.num_bytes = 0
        self._loaded: dict[Hashable, str] = {}  # key → tenant, the least recently used first
        self._sizes: dict[Hashable, int] = {}
        self._in_thread: Need | None = None
        self._done: deque[tuple[Need, str, InvalidRequestError | None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-{kind.name}")

    def __contains__(self, key: Hashable) -> bool:
        """Whether a resource is loaded."""
        return key in self._loaded

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def is_loading(self) -> bool:
        """Whether `collect` has not returned what the thread began with."""
        return self._in_thread is not None

    def touch(self, key: Hashable) -> None:
        """Say that a resource is used."""
        if key in self._loaded:
            self._loaded[key] = self._loaded.pop(key)

    def size(self, key: Hashable) -> float:
        """The bytes of a resource; of one that is not loaded, the mean of those that are."""
        size = self._sizes.get(key)
        return self.num_bytes / max(1, len(self._sizes)) if size is None else size

    def fit(self, claimed: Set[Hashable], *, num_more: int = 0) -> bool:
        """Drop what is not claimed until the rest is within the bounds, the least recently used of
        the tenant that has the most first; whether it is.

        Args:
            num_more: that are to be loaded.
        """
        if self._is_within(num_more):
            return True
        tenants = Counter[str]()
        for key, tenant in self._loaded.items():
            tenants[tenant] += self._sizes[key]
        others = [key for key in self._loaded if key not in claimed]
        while not self._is_within(num_more):
            if not others:
                return False
            victim = max(others, key=lambda key: tenants[self._loaded[key]])  # the first of equals
            others.remove(victim)
            size = self._sizes.pop(victim)
            self.num_bytes -= size
            tenants[self._loaded.pop(victim)] -= size
            self.kind.drop(victim)
        return True

    def _is_within(self, num_more: int) -> bool:
        bounds, num = self.kind.bounds, len(self._loaded) + num_more
        is_few = bounds.max_count is None or num <= bounds.max_count
        return is_few and self.num_bytes <= bounds.max_bytes

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
            self._sizes = {key: self.kind.size(key) for key in self._loaded}
            self.num_bytes = sum(self._sizes.values())
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


class Claims:
    """What of one kind must be in memory: what the scheduler's requests have, and what those that
    wait claim, one after the other."""

    def __init__(self, loader: Loader) -> None:
        self.keys: set[Hashable] = set()
        self._loader, self._num_bytes = loader, 0.0

    def add(self, key: Hashable) -> None:
        if key not in self.keys:
            self.keys.add(key)
            self._num_bytes += self._loader.size(key)

    def has_room(self) -> bool:
        """Whether one more may be claimed."""
        bounds = self._loader.kind.bounds
        if bounds.max_count is not None and len(self.keys) >= bounds.max_count:
            return False
        return not self.keys or self._num_bytes < bounds.max_needed_bytes
