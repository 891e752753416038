"""The executors of one device in this process: `submit` runs a step, or launches it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.runner.model_runner import ModelRunner, RunnerInfo, StepInFlight


@dataclass(frozen=True, slots=True)
class DoneHandle:
    """The handle of a step that has run."""

    batch_result: BatchResult

    def result(self) -> BatchResult:
        return self.batch_result


class InProcessExecutor:
    """Runs each batch synchronously: the step is done when `submit` returns."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def submit(self, batch: Batch) -> DoneHandle:
        return DoneHandle(self._runner.execute(batch))

    def num_parts_done(self) -> int:
        return self._runner.progress.num_parts_done()

    def describe(self) -> str:
        return self._runner.progress.describe()

    def close(self) -> None:
        """Nothing to give back: memory goes with the runner."""


class OverlappedExecutor:
    """Launches each batch behind those before it, on a GPU, and does not wait for it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def submit(self, batch: Batch) -> StepInFlight:
        return self._runner.launch(batch)

    def num_parts_done(self) -> int:
        return self._runner.progress.num_parts_done()

    def describe(self) -> str:
        return self._runner.progress.describe()

    def close(self) -> None:
        """Nothing to give back: memory goes with the runner."""
