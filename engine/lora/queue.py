"""Which adapters are in memory, and which requests with adapters may run.

A request waits here, outside the scheduler, while its adapter is read from disk (in a thread: the
steps go on), or while `max_loras` other adapters have requests in the scheduler. Those that wait
for a place get it in the order of arrival. Later requests for adapters that have one may go ahead,
but no more than `MAX_OVERTAKING` of them: then one of these adapters runs out of requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol

from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import Quarantine
from penstock.engine.request import (
    Adapter,
    FinishReason,
    Request,
    RequestOutput,
    Requests,
    refusal,
)

MAX_OVERTAKING = 16  # later requests that go ahead of one that waits for a place


class Adapters(Protocol):
    """The device's part: adapters in memory, by digest.

    Attributes:
        max_bytes: of an adapter's file, at most.
    """

    @property
    def max_bytes(self) -> int: ...

    def load(self, adapter: Adapter) -> None:
        """Read an adapter into memory, which may take seconds; any thread may call this.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forget an adapter that no sequence has."""
        ...

    def has_head(self, digest: str) -> bool:
        """Whether an adapter in memory changes the output head."""
        ...


class AdapterQueue:
    """
    Args:
        max_loras: adapters that have requests in the scheduler at once.
        max_cpu_loras: adapters in memory; no fewer.
        quarantine: of adapters whose reading has ended engines.

    Attributes:
        wake: called in another thread when an adapter has been read.
    """

    def __init__(
        self,
        adapters: Adapters,
        requests: Requests,
        *,
        max_loras: int,
        max_cpu_loras: int,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._adapters, self._requests = adapters, requests
        self._max_loras, self._max_cpu_loras = max_loras, max_cpu_loras
        self._quarantine = quarantine
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="penstock-adapter")
        self._waiting: deque[Request] = deque()
        self._aborted: dict[str, list[int]] = {}  # of waiting requests: branches to abort
        self._overtaking: dict[str, int] = {}  # by waiting request: those that went ahead
        self._live: dict[str, Adapter] = {}  # by request_id, in the scheduler as far as we know
        self._loaded: dict[str, None] = {}  # digests, the least recently used first
        self._being_loaded: set[str] = set()
        self._done: deque[tuple[str, InvalidRequestError | None]] = deque()
        self._outputs: list[RequestOutput] = []
        self._has_news = threading.Event()
        self._lacks_slots = False

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def max_bytes(self) -> int:
        """The largest file of an adapter."""
        return self._adapters.max_bytes

    @property
    def has_work(self) -> bool:
        """Whether `admit` would do something."""
        if self._has_news.is_set():
            return True
        has_request = self._requests.has_request
        return self._lacks_slots and not all(map(has_request, self._live))

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._has_news.set()

    def abort(self, request_id: str, *, index: int | None = None) -> bool:
        """Drop a waiting request, or one of its samples; whether it waits here."""
        if index is None:
            self._outputs = [each for each in self._outputs if each.request_id != request_id]
        for request in self._waiting:
            if request.request_id == request_id:
                if index is None or request.sampling_params.num_branches == 1:
                    self._remove(request)
                    self._has_news.set()
                else:
                    self._aborted.setdefault(request_id, []).append(index)
                return True
        return False

    def has_request(self, request_id: str) -> bool:
        """Whether it waits here."""
        return any(request.request_id == request_id for request in self._waiting)

    def load(self, adapter: Adapter) -> None:
        """Read an adapter now, unless it is in memory.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        self._collect()
        if adapter.digest not in self._loaded:
            self._make_room(self._digests())
            self._adapters.load(adapter)
            self._loaded[adapter.digest] = None

    def wait(self) -> None:
        """Wait until an adapter has been read."""
        self._has_news.wait()

    def unload(self, name: str) -> None:
        """End all requests for the adapters of this name."""
        message = f"the adapter {name!r} was unloaded"
        error = InvalidRequestError(message, param="model")
        for request in list(self._waiting):
            if request.adapter is not None and request.adapter.name == name:
                self._refuse(request, error)
        self._forget_ended()
        for request_id, adapter in list(self._live.items()):
            if adapter.name == name:
                self._requests.abort(request_id)
                self._outputs.append(_ended(request_id, message))
        self._has_news.set()

    def admit(self) -> list[RequestOutput]:
        """Hand over the requests that may run, and have their adapters read for others; the
        outputs of those that cannot."""
        self._has_news.clear()
        self._collect()
        if self._waiting:
            self._forget_ended()
        used = self._digests()
        self._lacks_slots = False
        without_slot: list[str] = []
        overtaking = 0  # the most that went ahead of one of these
        for request in list(self._waiting):
            adapter = request.adapter
            assert adapter is not None
            if adapter.digest not in used and len(used) >= self._max_loras:
                self._lacks_slots = True
                without_slot.append(request.request_id)
                overtaking = max(overtaking, self._overtaking.get(request.request_id, 0))
                continue
            if overtaking >= MAX_OVERTAKING:
                break
            used.add(adapter.digest)
            if adapter.digest in self._loaded:
                self._hand_over(request, adapter)
                for request_id in without_slot:
                    count = self._overtaking.get(request_id, 0) + 1
                    self._overtaking[request_id] = count
                    overtaking = max(overtaking, count)
            elif adapter.digest not in self._being_loaded:
                self._make_room(used)
                self._being_loaded.add(adapter.digest)
                self._loading.submit(self._load, adapter)
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, request: Request, adapter: Adapter) -> None:
        self._loaded[adapter.digest] = self._loaded.pop(adapter.digest)
        request_id, wants = request.request_id, request.sampling_params.prompt_logprobs
        try:
            if wants is not None and self._adapters.has_head(adapter.digest):
                raise InvalidRequestError(
                    "prompt_logprobs is not available with an adapter of the output head",
                    param="prompt_logprobs",
                )
            self._requests.add(request)
        except InvalidRequestError as error:
            self._refuse(request, error)
            return
        self._live[request_id] = adapter
        for index in self._remove(request):
            self._requests.abort(request_id, index=index)

    def _remove(self, request: Request) -> list[int]:
        """Let it wait no longer; its branches to abort."""
        self._waiting.remove(request)
        self._overtaking.pop(request.request_id, None)
        return self._aborted.pop(request.request_id, [])

    def _refuse(self, request: Request, error: InvalidRequestError) -> None:
        self._remove(request)
        self._has_news.set()  # others may have its place
        self._outputs.append(refusal(request.request_id, error))

    def _load(self, adapter: Adapter) -> None:
        """In the thread."""
        error = None
        try:
            with self._quarantine.reading(adapter) if self._quarantine else nullcontext():
                self._adapters.load(adapter)
        except InvalidRequestError as refusal:
            error = refusal
        except BaseException as failure:  # the thread's, which nobody waits for
            message = f"the adapter {adapter.name!r} cannot be loaded: {failure!r:.200}"
            error = InvalidRequestError(message, param="model")
        self._done.append((adapter.digest, error))
        self._has_news.set()
        self.wake()

    def _collect(self) -> None:
        """Note what the thread has read; the requests for what it could not read end."""
        while self._done:
            digest, error = self._done.popleft()
            self._being_loaded.discard(digest)
            if error is None:
                self._loaded[digest] = None
                continue
            for request in list(self._waiting):
                if request.adapter is not None and request.adapter.digest == digest:
                    self._refuse(request, error)

    def _forget_ended(self) -> None:
        has_request = self._requests.has_request
        self._live = {key: each for key, each in self._live.items() if has_request(key)}

    def _digests(self) -> set[str]:
        """The digests of adapters that have requests in the scheduler, or will have."""
        return {adapter.digest for adapter in self._live.values()}

    def _make_room(self, used: set[str]) -> None:
        """Forget adapters that nobody uses until there is room for one more."""
        self._forget_ended()
        for digest in list(self._loaded):
            if len(self._loaded) + len(self._being_loaded) < self._max_cpu_loras:
                break
            if digest not in used:
                del self._loaded[digest]
                self._adapters.drop(digest)


def _ended(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, finish_reason=FinishReason.ERROR, is_last=True, error=error
    )
