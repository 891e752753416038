"""The demo model offline, for all tests of `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import LLM, SamplingParams

from ..text.conftest import byte_fallback

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
HOT = SamplingParams(temperature=1.5, max_tokens=24)
PROMPTS = ["What is paged attention?", "Tell me a story.", "Count to ten:"]
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(max_model_len=MAX_MODEL_LEN, num_blocks=160, swap_space=0) as llm:
        yield llm


@pytest.fixture
def llm(demo: LLM) -> Iterator[LLM]:
    """The demo model; whatever a test does to it, nothing may stay behind."""
    yield demo
    assert demo._core.scheduler.blocks.tiers.device.num_held == 0
    demo._core.scheduler.blocks.check_integrity()


@pytest.fixture
def tiny(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A random model with a tokenizer of SentencePiece's kind."""
    tokenizer = byte_fallback()
    for file in tiny_checkpoint(vocab_size=tokenizer.vocab_size).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def one(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    """The only output of one prompt."""
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    (output,) = result.outputs
    return output
