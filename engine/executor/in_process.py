"""The executor for one device in this process."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.pooling.encoder_runner import EncoderRunner
from penstock.engine.runner.kv_swap import HostTier, NoBlockBytes
from penstock.engine.runner.model_runner import ModelRunner


class InProcessExecutor:
    """Runs each batch: on a CPU the step has finished when `submit` returns, and a GPU has it after
    the earlier ones."""

    def __init__(self, runner: ModelRunner | EncoderRunner) -> None:
        self.wake: Callable[[], None] = lambda: None  # never called
        self._runner = runner
        self.submit = (
            runner.launch
            if isinstance(runner, ModelRunner) and runner.info.async_scheduling
            else runner.execute
        )
        self.info, self.grammars, self.adapters = runner.info, runner.grammars, runner.adapters
        self.block_bytes: HostTier | NoBlockBytes = runner.block_bytes
        self.num_parts_done = runner.progress.num_parts_done
        self.describe = runner.progress.describe

    def check(self) -> None:
        """Nothing to check: there is no other process."""

    def close(self) -> None:
        """Nothing to give back: memory goes with the runner."""
