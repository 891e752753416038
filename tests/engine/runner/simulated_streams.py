"""Streams of a GPU, simulated on the CPU: work is queued, and runs late and in any legal order.

A stream runs its own work in order. Between streams only events order anything, so here a random
choice decides which stream goes on; what is ordered by luck alone comes out wrong sooner or later.
It stands in for the parts of `torch.cuda` that streams are made of, under the names of `torch.cpu`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_QUEUED = {aten.copy_.default, aten.index_copy_.default}


class Event:
    """A flag that a stream raises when it gets there; recorded again, it is another flag."""

    def __init__(self) -> None:
        self.passed = [True]  # nobody waits for what was never recorded

    def record(self, stream: Stream) -> None:
        passed = self.passed = [False]
        stream.queue.append((lambda: True, lambda: passed.__setitem__(0, True)))

    def query(self) -> bool:
        return self.passed[0]

    def synchronize(self) -> None:
        """The host waits, and the device goes on until here, perhaps no further."""
        passed = self.passed
        _host.run_until(lambda: passed[0])


class Stream:
    """Work in order, each piece with the condition that lets it run."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()
        _streams.append(self)

    def wait_event(self, event: Event) -> None:
        passed = event.passed
        self.queue.append((lambda: passed[0], lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


_streams: list[Stream] = []


class _Host:
    """How it waits for the device that is simulated now."""

    run_until: Callable[[Callable[[], bool]], None]


_host = _Host()


class SimulatedStreams(TorchDispatchMode):
    """While entered, copies are queued on the current stream instead of run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        _streams.clear()
        self._random = random.Random(seed)
        self._current = Stream()
        self._is_running = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_running:
            return func(*args, **kwargs)
        if func is aten.index_select.out:
            result = kwargs["out"]
        elif func is aten.index_select.default:
            source, dim, index = args
            result = source.new_empty(*source.shape[:dim], len(index), *source.shape[dim + 1 :])
            func, kwargs = aten.index_select.out, {"out": result}
        elif func in _QUEUED:
            result = args[0]
        else:
            return func(*args, **kwargs)
        self._current.queue.append((lambda: True, lambda: func(*args, **kwargs)))
        return result

    def install(self, monkeypatch: Any) -> None:
        """Take the place of the streams that do nothing."""
        monkeypatch.setattr(_host, "run_until", self._run_until, raising=False)
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self._on,
            "current_stream": lambda: self._current,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(torch.cpu, name, value)

    def synchronize(self) -> None:
        """Run all that is queued, in an order that the events allow."""
        self._run_until(lambda: not any(stream.queue for stream in _streams))

    def launch(self, run: Callable[[], Any]) -> None:
        """Work of any kind, behind what the current stream has."""
        self._current.queue.append((lambda: True, run))

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        self._is_running = True
        while not is_done():
            able = [stream for stream in _streams if stream.queue and stream.queue[0][0]()]
            assert able, "the streams wait for each other"
            _, run = self._random.choice(able).queue.popleft()
            run()
        self._is_running = False

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
