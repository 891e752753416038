"""Prompts tokenised lately: the ids are those of the whole text, and tenants do not meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import DEMO_MODEL, ModelConfig
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.gateway.generation import prompt_memory
from penstock.gateway.generation.prompt_memory import PromptMemory

PATH: Path = resolve_model(ModelConfig(model=DEMO_MODEL), weights=False)
TOKENIZER = Tokenizer.from_directory(PATH)
TEMPLATE = ChatTemplate.from_directory(PATH)
LONG = "All of this was said before, and it was said at length. " * 30


def rendered(*contents: str) -> str:
    roles = ("user", "assistant")
    return TEMPLATE.render(
        [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    )


def tokenised(memory: PromptMemory, text: str, tenant: str = "") -> tuple[list[int], int]:
    """As the generator does it; and how many ids were known."""
    reused = memory.search(tenant)(text)
    rest = TOKENIZER.encode(reused.rest, add_special_tokens=False)
    token_ids = [*reused.token_ids, *rest]
    memory.remember(tenant, text, token_ids)
    return token_ids, len(reused.token_ids)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=7))
def test_ids_are_those_of_the_whole_text(said: list[str]) -> None:
    memory = PromptMemory(TOKENIZER)
    for end in range(0, len(said) + 1, 2):  # each turn adds an answer and a question
        text = rendered(LONG, *said[:end])
        token_ids, _ = tokenised(memory, text)
        assert token_ids == TOKENIZER.encode(text, add_special_tokens=False)


def test_a_later_turn_has_only_its_new_part_tokenised() -> None:
    memory = PromptMemory(TOKENIZER)
    first, num_known = tokenised(memory, rendered(LONG))
    assert num_known == 0
    later, num_known = tokenised(memory, rendered(LONG, "I see.", "And now?"))
    assert num_known >= len(first) - 8  # all but what asks for the answer
    assert later == TOKENIZER.encode(rendered(LONG, "I see.", "And now?"), add_special_tokens=False)
    _, of_another = tokenised(memory, rendered(LONG, "I see.", "And now?"), tenant="other")
    assert of_another == 0
    assert memory.search("")(rendered("short")).token_ids == ()


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "_MAX_PROMPTS", 3)
    monkeypatch.setattr(prompt_memory, "_MAX_TENANTS", 2)
    memory = PromptMemory(TOKENIZER)
    texts = [rendered(f"{number} {LONG}") for number in range(5)]
    for text in texts:
        tokenised(memory, text)
    known = [len(memory.search("")(text).token_ids) > 0 for text in texts]
    assert known == [False, False, True, True, True]
    for tenant in ("a", "b"):
        tokenised(memory, texts[0], tenant)
    assert not memory.search("")(texts[4]).token_ids  # of three tenants the oldest went
    num_tokens = len(TOKENIZER.encode(texts[0], add_special_tokens=False))
    assert memory.num_tokens == 2 * num_tokens
    monkeypatch.setattr(prompt_memory, "_MAX_TOKENS", 4 * num_tokens)
    for text in texts:
        tokenised(memory, text, "b")
    assert memory.num_tokens <= 4 * num_tokens
