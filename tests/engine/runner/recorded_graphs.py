"""Graphs as a GPU has them, simulated on the CPU: operations are recorded, and run again on replay.

As there, they run on the memory they were recorded with: what a step does not put into that memory
does not reach it. While it is recorded nothing may be read back, and what comes out is no result;
here it becomes NaN. Paged operations and the products of experts and adapters are recorded whole,
as the one launch that each is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.engine.config import CudagraphMode
from penstock.engine.runner import cuda_graphs
from penstock.kernels import experts, lora, paged_attention, rotary_store_kv

aten = torch.ops.aten
_LAUNCHES = (
    (experts, "experts_linear_reference"),
    (lora, "lora_expand_reference"),
    (lora, "lora_shrink_reference"),
    (paged_attention, "paged_attention_reference"),
    (rotary_store_kv, "rotary_store_kv_reference"),
)


def record_graphs(monkeypatch: pytest.MonkeyPatch, mode: CudagraphMode) -> None:
    """Let engines on a CPU have graphs of this mode."""
    monkeypatch.setattr(cuda_graphs, "resolve_cudagraph_mode", lambda *_: mode)
    monkeypatch.setattr(cuda_graphs, "CudaGraphMaker", RecordedGraphMaker)


class RecordedGraph:
    def __init__(self, maker: RecordedGraphMaker) -> None:
        self._maker = maker
        self._mode = _Recording(self)
        self.operations: list[Callable[[], object]] = []
        self.outputs: list[torch.Tensor] = []

    def begin(self) -> None:
        assert self._maker.is_capturing, "begun outside"
        assert self._maker.recording is None, "begun within another"
        self._maker.recording = self
        self._mode.__enter__()

    def end(self) -> None:
        assert self._maker.recording is self
        self._mode.__exit__(None, None, None)
        self._maker.recording = None
        for output in self.outputs:
            if output.is_floating_point():
                output.fill_(torch.nan)

    def replay(self) -> None:
        assert self._maker.recording is None
        self._maker.num_replays += 1
        for operation in self.operations:
            operation()

    def record(self, run: Callable[[], Any], output: Any) -> None:
        """An operation that made new tensors; they are written again when it is replayed."""
        tensors = _tensors(output)
        self.outputs += tensors

        def again() -> None:
            for old, new in zip(tensors, _tensors(run()), strict=True):
                old.copy_(new)

        self.operations.append(again)


class RecordedGraphMaker:
    """Takes the place of `CudaGraphMaker`.

    Attributes:
        num_replays: of all its graphs.
    """

    def __init__(self) -> None:
        self.recording: RecordedGraph | None = None
        self.is_capturing = False
        self.num_replays = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.is_capturing = True
        with _launches_as_one(self):
            yield
        self.is_capturing = False

    def graph(self) -> RecordedGraph:
        return RecordedGraph(self)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not aten._local_scalar_dense.default, "read back while it is recorded"
        output = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._graph.operations.append(lambda: func(*args, **kwargs))
        elif not _storages(output) <= _storages((args, kwargs)):  # else a view
            self._graph.record(lambda: func(*args, **kwargs), output)
        return output


def _tensors(found: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


def _storages(found: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in _tensors(found)}


@contextmanager
def _launches_as_one(maker: RecordedGraphMaker) -> Iterator[None]:
    """What these do inside is the device's affair."""
    found = [getattr(module, name) for module, name in _LAUNCHES]

    def launch(run: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            graph = maker.recording
            if graph is None:
                return run(*args, **kwargs)
            graph._mode.__exit__(None, None, None)
            output = run(*args, **kwargs)
            graph.record(lambda: run(*args, **kwargs), output)
            graph._mode.__enter__()
            return output

        return recorded

    for (module, name), run in zip(_LAUNCHES, found, strict=True):
        setattr(module, name, launch(run))
    try:
        yield
    finally:
        for (module, name), run in zip(_LAUNCHES, found, strict=True):
            setattr(module, name, run)
