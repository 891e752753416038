"""The executor of one GPU in this process: `submit` launches a step and does not wait for it."""

from __future__ import annotations

from penstock.engine.batch import Batch
from penstock.engine.runner.model_runner import ModelRunner, RunnerInfo
from penstock.engine.runner.step_in_flight import StepInFlight


class OverlappedExecutor:
    """Launches each batch behind those before it."""

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
