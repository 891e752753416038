"""How many Python functions a decode step of one stream calls.

From planning a step to its outputs, without the socket; what C calls and does is not counted. The
weights of a small model are read in less time than Python takes for this many calls, so a call that
every step makes is worth its reason, and what is off should make none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core

MAX_CALLS = 75
NUM_STEPS = 200  # of which some enter a new block


@pytest.fixture(scope="module")
def core(tiny_checkpoint: Callable[..., Path]) -> EngineCore:
    path = tiny_checkpoint(max_position_embeddings=512)
    config = EngineConfig(model=ModelConfig(model=str(path)), cache=CacheConfig(num_blocks=64))
    return build_core(config)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_a_decode_step_of_one_stream_calls_few_functions(
    core: EngineCore, temperature: float
) -> None:
    params = SamplingParams(max_tokens=400, temperature=temperature, seed=7, ignore_eos=True)
    core.add(Request(request_id="one", prompt_token_ids=(1, 2, 3), sampling_params=params))
    for _ in range(10):
        core.step()
    calls = _calls_of_steps(core)
    core.abort("one")
    core.step()
    listed = "\n".join(f"{number / NUM_STEPS:6.2f} {name}" for name, number in calls.most_common())
    assert calls.total() / NUM_STEPS <= MAX_CALLS, f"calls of a step:\n{listed}"


def _calls_of_steps(core: EngineCore) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        outputs = [core.step() for _ in range(NUM_STEPS)]
    finally:
        sys.setprofile(before)
    assert all(len(output.token_ids) == 1 for (output,) in outputs)
    return calls
