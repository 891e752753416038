"""Runs a model on several ranks: this process is the first, the others are its children.

Every rank has a `ModelRunner` of its own, with a part of each matrix and of each block, and gets
every batch (`rank_channel`). Those of one stage draw the same tokens, since all have the same
logits; so nothing but sums and logits travels between them, and one of them hands out results.

With stages of a native model, only the last one draws tokens. This process, which is in the first,
hands out the result when it has come, and the others learn the tokens with the next batch. So each
stage may be in another step; a sequence is in one of them only (`Scheduler`).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineError
from penstock.engine.executor.in_process import InProcessExecutor
from penstock.engine.executor.rank_channel import (
    Life,
    RankChannel,
    ShmBroadcast,
    hand_out,
    read_start,
    wait_for_message,
)
from penstock.engine.lora.slots import AdapterSlots, NoAdapters
from penstock.engine.models.registry import is_native
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.process import garbage
from penstock.engine.process.launch import die_with_parent
from penstock.engine.process.sandbox import give_way
from penstock.engine.request import Adapter, StructuredOutputs
from penstock.engine.runner.kv_swap import NoBlockBytes
from penstock.engine.runner.model_runner import ModelRunner, StepInFlight
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.cpu.cores import keep_on, pin_rank, usable_cpus

# Kinds of messages.
_BATCH, _LOAD, _DROP, _COMPILE, _DROP_GRAMMAR = b"b", b"l", b"d", b"c", b"g"
_READ_VOCABULARY = b"v"


class _Step(msgspec.Struct, array_like=True, frozen=True):
    """A step's message.

    Attributes:
        tokens: that have become known, for stages that do not draw them: seq_id → in place of how
            many drafts, and the tokens.
    """

    batch: Batch
    tokens: dict[int, tuple[int, tuple[int, ...]]] = {}


class RankAdapters:
    """The adapters of all ranks."""

    def __init__(self, own: AdapterSlots | NoAdapters, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    @property
    def max_bytes(self) -> int:
        return self._own.max_bytes

    def load(self, adapter: Adapter) -> None:
        self._own.load(adapter)
        self._tell(_LOAD + msgspec.msgpack.encode(adapter))

    def drop(self, digest: str) -> None:
        self._own.drop(digest)
        self._tell(_DROP + digest.encode())

    def size(self, digest: str) -> int:
        return self._own.size(digest)

    def has_head(self, digest: str) -> bool:
        return self._own.has_head(digest)


class RankGrammars:
    """The grammars of all ranks; the others compile while this one does."""

    def __init__(self, own: GrammarCompiler, tell: Callable[[bytes], None]) -> None:
        self._own, self._tell = own, tell

    @property
    def num_kept(self) -> int:
        return self._own.num_kept

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        self._tell(_COMPILE + msgspec.msgpack.encode(grammar))
        self._own.compile(grammar, is_checked=is_checked)

    def read_vocabulary(self) -> None:
        self._tell(_READ_VOCABULARY)
        self._own.read_vocabulary()

    def drop(self, grammar: StructuredOutputs) -> None:
        self._tell(_DROP_GRAMMAR + msgspec.msgpack.encode(grammar))
        self._own.drop(grammar)

    def size(self, grammar: StructuredOutputs) -> int:
        return self._own.size(grammar)


class RanksExecutor:
    """
    Args:
        config, model_path, eos_token_ids, pooling: as for `ModelRunner`.

    Raises:
        ConfigError, ModelLoadError: what any rank raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        eos_token_ids: tuple[int, ...],
        pooling: ModelPooling,
    ) -> None:
        self._num_stages = config.device.pipeline_parallel_size
        self._tokens: dict[int, tuple[int, tuple[int, ...]]] = {}  # that no other rank knows yet
        size, reporter = config.device.num_ranks, None
        if self._num_stages > 1 and is_native(config.model, model_path):
            reporter = size - config.device.tensor_parallel_size
        arguments = {"model_path": model_path, "eos_token_ids": eos_token_ids, "pooling": pooling}
        module = "penstock.engine.executor.ranks"
        self._channel = channel = RankChannel(module, config, arguments, reporter=reporter)
        self._affinity = usable_cpus()
        try:
            channel.ranks.num_on_cores = pin_rank(0, size)
            self._runner = ModelRunner(
                config,
                model_path,
                eos_token_ids=eos_token_ids,
                pooling=pooling,
                ranks=channel.ranks,
            )
            channel.wait_for_start()
        except BaseException:
            channel.abandon()
            raise
        self._executor = InProcessExecutor(self._runner)
        self.adapters = RankAdapters(self._executor.adapters, channel.tell)
        self.grammars = RankGrammars(self._executor.grammars, channel.tell)
        self.block_bytes = NoBlockBytes()  # each rank has a part of every block
        self.info = self._runner.info
        self.check = channel.check
        self.describe = self._executor.describe

    @property
    def wake(self) -> Callable[[], None]:
        return self._channel.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._channel.wake = wake

    def submit(self, batch: Batch) -> _Handle:
        step, self._tokens = _Step(batch, self._tokens), {}
        self._channel.tell(_BATCH + msgspec.msgpack.encode(step))
        self._runner.receive(step.tokens)
        return _Handle(batch, self._executor.submit(batch), self._finish)

    def _finish(self, batch: Batch, own: BatchResult) -> BatchResult:
        """The result of the oldest step in flight, once the last stage hands it out; worthless if a
        rank has ended meanwhile.

        Args:
            own: of this stage.
        """
        if not self._channel.has_results:
            self.check()
            return own
        result = self._channel.next_result()
        assert result.step == batch.step
        for item in batch.scheduled:
            token_ids = result.token_ids.get(item.seq_id)
            if token_ids:
                self._tokens[item.seq_id] = (len(item.draft_token_ids), token_ids)
        return msgspec.structs.replace(
            result,
            compute_s=own.compute_s * self._num_stages,  # each takes about as long
            swap_out_s=own.swap_out_s,
            swap_in_s=own.swap_in_s,
        )

    def num_parts_done(self) -> int:
        return self._executor.num_parts_done() + self._channel.num_parts_done()

    def close(self) -> None:
        """End the other ranks."""
        self._channel.close()
        keep_on(self._affinity)


@dataclass(frozen=True, slots=True)
class _Handle:
    """A step of which this process has its part."""

    batch: Batch
    own: BatchResult | StepInFlight
    finish: Callable[[Batch, BatchResult], BatchResult]

    def result(self) -> BatchResult:
        return self.finish(self.batch, self.own.result())


def main(status: int) -> int:
    """Another rank's process: run every batch until the first rank ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank handles it
    start = read_start()
    import setproctitle  # as in `engine.process.launch`

    setproctitle.setproctitle(f"penstock-rank {start.rank}")
    if start.dies_by_signal:
        die_with_parent(start.parent_pid)
    ranks = start.make_ranks()
    ranks.num_on_cores = pin_rank(start.rank, ranks.size)
    board = ShmBroadcast(ranks)
    life = Life(board, start)
    life.start()
    try:
        runner = ModelRunner(start.config, **start.arguments, ranks=ranks)
    except EngineError as error:
        os.write(status, pickle.dumps(error))
        return 1
    os.write(status, pickle.dumps("ready"))
    os.close(status)
    garbage.keep_out_of_steps()
    life.num_parts_done = runner.progress.num_parts_done
    rank = _OtherRank(
        runner, max_steps_in_flight=1 + runner.info.async_scheduling, result_fd=start.result_fd
    )
    while True:
        try:
            message = board.read(start.rank, wait_for_message)
        except EOFError:
            return 0
        rank.do(message)
        garbage.collect(garbage.MANY_OBJECTS)


class _OtherRank:
    """Does what the first rank says."""

    def __init__(
        self, runner: ModelRunner, *, max_steps_in_flight: int, result_fd: int | None
    ) -> None:
        self._runner, self._max_steps_in_flight = runner, max_steps_in_flight
        self._result_fd = result_fd
        self._in_flight: deque[StepInFlight] = deque()
        self._compiling = ThreadPoolExecutor(1)
        self._steps = msgspec.msgpack.Decoder(_Step)
        self._adapters = msgspec.msgpack.Decoder(Adapter)
        self._grammars = msgspec.msgpack.Decoder(StructuredOutputs)

    def do(self, message: bytes) -> None:
        kind, data = message[:1], memoryview(message)[1:]
        if kind == _BATCH:
            step = self._steps.decode(data)
            self._runner.receive(step.tokens)
            if len(self._in_flight) == self._max_steps_in_flight:
                self._in_flight.popleft().result()
            self._in_flight.append(self._runner.launch(step.batch))
            if self._result_fd is not None:
                hand_out(self._in_flight.popleft().result(), self._result_fd)
        elif kind == _LOAD:
            self._runner.adapters.load(self._adapters.decode(data))
        elif kind == _DROP:
            self._runner.adapters.drop(bytes(data).decode())
        elif kind == _COMPILE:
            self._compiling.submit(self._compile, self._grammars.decode(data))
        elif kind == _READ_VOCABULARY:
            self._compiling.submit(self._runner.grammars.read_vocabulary)
        else:  # after those that are being compiled, of which it may be one
            self._compiling.submit(self._runner.grammars.drop, self._grammars.decode(data))

    def _compile(self, grammar: StructuredOutputs) -> None:
        try:  # the first rank tells of errors
            self._runner.grammars.compile(grammar, is_checked=True)
        finally:
            give_way(threading.get_native_id())  # as the first rank's thread does


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
