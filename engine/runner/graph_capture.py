"""Recording what a device is told to do, and telling it again: CUDA graphs behind a small protocol.

Not known here: what is recorded. The protocol is there so that those who record can be tested
where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Launches between `begin` and `end`, which are not run then; `replay` runs them.

    They read and write the memory they were recorded with, and host values stay what they were.
    """

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None:
        """Launch it all on the current stream."""
        ...


class GraphMaker(Protocol):
    """Makes graphs that share their temporary memory: replay them one at a time."""

    def capturing(self) -> AbstractContextManager[None]:
        """Within it, graphs can be recorded."""
        ...

    def graph(self) -> Graph: ...


class CudaGraph:
    """One `torch.cuda.CUDAGraph`."""

    def __init__(self, memory: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory

    def begin(self) -> None:
        # Other threads (the heartbeats') are none of this graph's business.
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphMaker:
    """CUDA graphs with one pool of memory."""

    def __init__(self) -> None:
        handle: Any = torch.cuda.graph_pool_handle
        self._memory = handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """On a stream of its own: the default one cannot be captured."""
        side: Any = torch.cuda.Stream
        torch.cuda.synchronize()
        with torch.cuda.stream(side()):
            yield
        torch.cuda.synchronize()

    def graph(self) -> CudaGraph:
        return CudaGraph(self._memory)
