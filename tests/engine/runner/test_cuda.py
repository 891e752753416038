"""The same tokens on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.config import DeviceConfig, EngineConfig
from penstock.engine.request import SamplingParams
from penstock.engine.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_equal_those_of_the_cpu(temperature, tiny_checkpoint):
    outputs = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(device=DeviceConfig(device=device))
        runner = ModelRunner(config, tiny_checkpoint(), eos_token_ids=(2,))
        entry = SequenceEntry(
            token_ids=tuple(range(3, 40)),
            num_prompt_tokens=37,
            num_computed_tokens=0,
            index=0,
            params=SamplingParams(temperature=temperature, top_p=0.9, seed=3, logprobs=1),
        )
        first = ScheduledSequence(
            seq_id=0, num_new_tokens=37, new_block_ids=(5, 1, 7, 2), entry=entry
        )
        shares = [first] + [ScheduledSequence(seq_id=0, num_new_tokens=1)] * 20
        outputs.append(
            [
                runner.execute(Batch(step=step, scheduled=(share,))).token_ids[0]
                for step, share in enumerate(shares)
            ]
        )
    assert outputs[0] == outputs[1]
