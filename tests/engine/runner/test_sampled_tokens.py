"""Steps launched before the tokens of earlier ones are known, on streams that run as late as they
may: inputs are what they were when they were sent, and tokens reach their sequences."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import SamplingParams
from penstock.engine.runner import sampled_tokens
from penstock.engine.runner.input_batch import StepInputs
from penstock.engine.runner.sampled_tokens import TokensInFlight, make_token_path
from penstock.engine.runner.staging import InputStaging
from penstock.engine.sampling.sampler import ChosenTokens

from .simulated_streams import SimulatedStreams

BLOCK_SIZE, MAX_BLOCKS, NUM_SEQS, MAX_TOKENS = 4, 16, 6, 40
CPU = torch.device("cpu")


def next_token(token_id: int, position: int) -> int:
    """What the model of these tests says follows."""
    return (token_id * 31 + position * 7 + 3) % 1009


class World:
    """Sequences that come and go, a device that is a queue, and what must be true of both."""

    def __init__(self, seed: int, streams: SimulatedStreams, monkeypatch: Any) -> None:
        self.rng = random.Random(seed)
        self._streams = streams
        monkeypatch.setattr(sampled_tokens, "can_schedule_async", lambda device: True)
        config = SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=MAX_TOKENS)
        self.batch, self.tokens = make_token_path(
            config,
            max_blocks=MAX_BLOCKS,
            block_size=BLOCK_SIZE,
            device=CPU,
        )
        self.expected: dict[int, list[int]] = {}  # every token, those in flight too
        self.computed: dict[int, int] = {}
        self.left: list[int] = []
        self.next_id = 0
        self.num_checked = 0

    def step(self) -> tuple[list[int], TokensInFlight]:
        """Launch a step of whatever there is; the tokens it must give."""
        scheduled = self._schedule()
        batch = Batch(step=0, scheduled=tuple(scheduled), left_seq_ids=tuple(self.left))
        self.left.clear()
        self.batch.update(batch)
        inputs = self.batch.prepare(batch, torch.empty(0), needs_prompt_lens=False)
        ids = [
            token_id
            for item in scheduled
            for token_id in self._known(item.seq_id, item.num_new_tokens)
        ]
        answers = []
        for item in scheduled:
            tokens = self.expected[item.seq_id]
            if self.computed[item.seq_id] == len(tokens):
                answers.append(next_token(tokens[-1], len(tokens) - 1))
                tokens.append(answers[-1])
        chosen = self._launch(inputs, self.tokens.input_ids(inputs), ids)
        taken = self.tokens.append(inputs, chosen)
        assert isinstance(taken, TokensInFlight)
        return answers, taken

    def _schedule(self) -> list[ScheduledSequence]:
        if self.expected and self.rng.random() < 0.2:
            gone = self.rng.choice(list(self.expected))
            del self.expected[gone], self.computed[gone]
            self.left.append(gone)
        entries = {}
        while len(self.expected) < self.rng.randint(1, NUM_SEQS):
            prompt = tuple(self.rng.randrange(1009) for _ in range(self.rng.randint(1, 9)))
            self.expected[self.next_id], self.computed[self.next_id] = list(prompt), 0
            entries[self.next_id] = SequenceEntry(
                token_ids=prompt, num_prompt_tokens=len(prompt), num_computed_tokens=0, index=0,
                params=SamplingParams(temperature=0.0, max_tokens=99),
            )  # fmt: skip
            self.next_id += 1
        scheduled = []
        for seq_id, tokens in self.expected.items():
            is_full = len(tokens) >= BLOCK_SIZE * MAX_BLOCKS
            if seq_id not in entries and (is_full or self.rng.random() < 0.1):
                continue
            missing = len(tokens) - self.computed[seq_id]
            share = self.rng.randint(1, missing)
            before = -(-self.computed[seq_id] // BLOCK_SIZE)
            self.computed[seq_id] += share
            after = -(-self.computed[seq_id] // BLOCK_SIZE)
            scheduled.append(
                ScheduledSequence(
                    seq_id=seq_id,
                    num_new_tokens=share,
                    new_block_ids=tuple(self.rng.sample(range(500), after - before)),
                    entry=entries.get(seq_id),
                )
            )
        return scheduled or self._schedule()

    def _known(self, seq_id: int, share: int) -> list[int]:
        stop = self.computed[seq_id]
        return self.expected[seq_id][stop - share : stop]

    def _launch(self, inputs: StepInputs, input_ids: Tensor, ids: list[int]) -> ChosenTokens:
        """The model and the sampler, as one launch that runs some time."""
        at = inputs.sampled_tokens
        chosen = torch.full((len(inputs.sampled_seq_ids),), -7)
        is_valid = torch.zeros(len(chosen), dtype=torch.bool)
        layout, positions = inputs.context.layout, inputs.context.positions

        def run() -> None:
            assert input_ids.tolist() == ids
            starts = layout.query_start_loc.tolist()
            assert starts[-1] == len(ids)
            ends = [int(positions[stop - 1]) + 1 for stop in starts[1:]]
            assert layout.seq_lens.tolist() == ends
            blocks = np.repeat(np.arange(len(ends)), np.diff(starts))
            columns = positions.numpy() // BLOCK_SIZE
            slots = layout.block_tables.numpy()[blocks, columns] * BLOCK_SIZE
            assert layout.slot_mapping.tolist() == (slots + positions.numpy() % BLOCK_SIZE).tolist()
            places = range(len(ids)) if at is None else at.tolist()
            for row, place in enumerate(places):
                chosen[row] = next_token(int(input_ids[place]), int(positions[place]))
            is_valid.fill_(True)
            self.num_checked += 1

        self._streams.launch(run)
        return ChosenTokens(token_ids=chosen, is_valid=is_valid, described=())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_in_flight=st.integers(1, 3))
def test_no_order_of_the_streams_changes_a_token(seed: int, num_in_flight: int) -> None:
    streams = SimulatedStreams(seed)
    with pytest.MonkeyPatch.context() as monkeypatch, streams:
        streams.install(monkeypatch)
        world = World(seed, streams, monkeypatch)
        in_flight: deque[tuple[list[int], TokensInFlight]] = deque()
        for _ in range(25):
            in_flight.append(world.step())
            if len(in_flight) == num_in_flight:
                answers, taken = in_flight.popleft()
                assert taken.read().token_ids == answers
                if world.rng.random() < 0.1:  # penalties want every token that there is
                    world.tokens.wait_for_tokens()
                    for sequence_id, tokens in world.expected.items():
                        assert world.batch._sequences[sequence_id].token_ids == tokens
        for answers, taken in in_flight:
            assert taken.read().token_ids == answers
        streams.synchronize()
    assert world.num_checked == 25


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_staged_arrays_arrive_as_they_were_sent(seed: int) -> None:
    """Of all kinds and sizes; the host writes on as soon as it may."""
    rng = random.Random(seed)
    streams = SimulatedStreams(seed)
    arrived: list[bool] = []
    with pytest.MonkeyPatch.context() as monkeypatch, streams:
        streams.install(monkeypatch)
        staging = InputStaging(4096, CPU)
        for _ in range(12):
            arrays = [
                np.array([rng.randrange(-(2**31), 2**31) for _ in range(count * 2)], dtype).reshape(
                    count, 2
                )[:, : rng.randint(1, 2)]
                for count, dtype in [(rng.randint(0, 9), rng.choice([np.int32, np.int64]))] * 3
            ]
            tensors, expected = staging.upload(arrays), [array.copy() for array in arrays]
            for tensor in tensors:
                assert tensor.data_ptr() % 4 == 0

            def check(tensors: Any = tensors, expected: Any = expected) -> None:
                pairs = zip(tensors, expected, strict=True)
                arrived.append(all(np.array_equal(got.numpy(), sent) for got, sent in pairs))

            streams.launch(check)
            for array in arrays:
                array[...] = -1
        streams.synchronize()
    assert arrived == [True] * 12


def test_staging_has_its_bounds() -> None:
    staging = InputStaging(64, CPU)
    staging.upload([np.zeros(8, np.int64)])
    with pytest.raises(AssertionError, match="beyond 64 bytes"):
        staging.upload([np.zeros(1, np.int64), np.zeros(1, np.int64)])
