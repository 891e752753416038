"""Core, policy and fake device, and what came out of them."""

from __future__ import annotations

import random
from array import array
from typing import Any

from penstock.engine.blocks import BlockManager
from penstock.engine.blocks.lasting_pool import BlockRecords
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.scheduling import Scheduler

from .fake_device import VOCAB_SIZE, FakeDevice

MAX_MODEL_LEN = 64
Branch = tuple[str, int]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Stack:
    """An engine without a model whose every step is checked."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = False,
        config: SchedulerConfig | None = None,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int = MAX_MODEL_LEN,
        kv_depends_on_prompt_len: bool = False,
        has_bidirectional_images: bool = False,
        num_microbatches: int = 1,
        records: BlockRecords | None = None,
    ) -> None:
        config = config or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
        self.clock = Clock()
        self.blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
            kv_depends_on_prompt_len=kv_depends_on_prompt_len,
            clock=self.clock,
            records=records,
        )
        self.scheduler = Scheduler(
            config,
            self.blocks,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            has_bidirectional_images=has_bidirectional_images,
            num_microbatches=num_microbatches,
            clock=self.clock,
        )
        self.device = FakeDevice(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
        )
        self.core = EngineCore(
            self.scheduler, self.device, max_steps_in_flight=config.max_steps_in_flight or 1
        )
        self.outputs: dict[Branch, list[RequestOutput]] = {}
        self.prompt_of: dict[str, list[int]] = {}
        self.ended: dict[str, None] = {}  # in order

    def add(self, request_id: str, prompt: list[int], **settings: Any) -> None:
        self.core.add(make_request(request_id, prompt, **settings))
        self.prompt_of[request_id] = prompt

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        self.check_blocks()
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last"
            branch = self.outputs.setdefault((output.request_id, output.index), [])
            assert not branch or branch[-1].finish_reason is None, "a branch ended twice"
            branch.append(output)
            if output.is_last:
                self.ended[output.request_id] = None
        return outputs

    def check_blocks(self) -> None:
        """Every block is accounted for, and whatever can be found holds what it is said to."""
        self.blocks.check_integrity()
        for sequence in self.scheduler._running_set.live.values():
            is_here = sequence.is_on_device
            assert sequence.num_slots <= (self.blocks.num_slots(sequence) if is_here else 0)
        for block in self.blocks.tiers.cache:
            claimed = list(array("I", block.tokens))
            stored = [
                blocks[place][: len(claimed)]
                for place, blocks in (
                    (block.device_id, self.device.blocks),
                    (block.host_id, self.device.host),
                )
                if place is not None
            ]
            for slots in stored:
                assert [slot and slot[0] for slot in slots] == claimed
            assert all(slots == stored[0] for slots in stored), "two places, two contents"

    def run(self) -> None:
        for _ in range(100_000):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work()
        assert self.blocks.tiers.device.num_held == 0, "blocks leaked"
        assert self.blocks.tiers.host.num_held == 0, "host blocks leaked"
        assert self.device.rows == {}, "the device was not told who left"

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        outputs = self.outputs.get((request_id, index), [])
        return [token for output in outputs for token in output.token_ids]

    def reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        outputs = self.outputs.get((request_id, index), [])
        return outputs[-1].finish_reason if outputs else None

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprobs]:
        outputs = self.outputs.get((request_id, 0), [])
        return [entry for output in outputs for entry in output.prompt_logprobs]

    def notices(self, request_id: str, index: int = 0) -> list[Notice]:
        outputs = self.outputs.get((request_id, index), [])
        return [output.notice for output in outputs if output.notice is not None]

    def num_cached(self, request_id: str) -> int:
        return sum(
            output.num_cached_tokens
            for (owner, _), outputs in self.outputs.items()
            if owner == request_id
            for output in outputs
        )


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    arrival: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    cache_salt: str = "",
    retention: Any = None,
    wants_queue_position: bool = False,
    prediction: tuple[int, ...] = (),
    session: str = "",
    is_agent: bool = False,
    **params: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),
        arrival_s=arrival,
        priority=priority,
        tenant=tenant,
        weight=weight,
        cache_salt=cache_salt,
        retention=retention,
        wants_queue_position=wants_queue_position,
        prediction_token_ids=prediction,
        session=session,
        is_agent=is_agent,
    )


def prompts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]
