"""Executors for one device in this process: `submit` runs a step, or launches it on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.lora.slots import AdapterSlots, NoAdapters
from penstock.engine.pooling.encoder_runner import EncoderRunner
from penstock.engine.runner.kv_swap import HostTier, NoBlockBytes
from penstock.engine.runner.model_runner import ModelRunner, PendingStage, RunnerInfo, StepInFlight
from penstock.engine.structured_outputs.compiler import GrammarCompiler


class DoneHandle(msgspec.Struct, frozen=True):
    """The handle of a finished step."""

    batch_result: BatchResult

    def result(self) -> BatchResult:
        return self.batch_result


class InProcessExecutor:
    """Runs each batch synchronously: the step has finished when `submit` returns."""

    def __init__(self, runner: ModelRunner | EncoderRunner) -> None:
        self.wake: Callable[[], None] = lambda: None  # never called
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def submit(self, batch: Batch) -> DoneHandle:
        return DoneHandle(self._runner.execute(batch))

    def check(self) -> None:
        """Nothing to check: there is no other process."""

    def num_parts_done(self) -> int:
        return self._runner.progress.num_parts_done()

    def describe(self) -> str:
        return self._runner.progress.describe()

    @property
    def grammars(self) -> GrammarCompiler:
        return self._runner.grammars

    @property
    def adapters(self) -> AdapterSlots | NoAdapters:
        return self._runner.adapters

    @property
    def block_bytes(self) -> HostTier | NoBlockBytes:
        return self._runner.block_bytes

    def close(self) -> None:
        """Nothing to give back: memory goes with the runner."""


class OverlappedExecutor:
    """Launches each batch on a GPU after the earlier ones, without waiting for it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.wake: Callable[[], None] = lambda: None  # never called
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def submit(self, batch: Batch) -> StepInFlight | PendingStage:
        return self._runner.launch(batch)

    def check(self) -> None:
        """Nothing to check: there is no other process."""

    def num_parts_done(self) -> int:
        return self._runner.progress.num_parts_done()

    def describe(self) -> str:
        return self._runner.progress.describe()

    @property
    def grammars(self) -> GrammarCompiler:
        return self._runner.grammars

    @property
    def adapters(self) -> AdapterSlots | NoAdapters:
        return self._runner.adapters

    @property
    def block_bytes(self) -> HostTier | NoBlockBytes:
        return self._runner.block_bytes

    def close(self) -> None:
        """Nothing to give back: memory goes with the runner."""
