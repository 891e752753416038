"""What is sent: lengths, what dialogues share, and files that are read or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue
from penstock.load.workloads.datasets import (
    Conversations,
    Dataset,
    Jsonl,
    Lengths,
    RandomLengths,
    ShareGpt,
    TokenIds,
    Words,
)


def write_lines(path: Path, items: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(item) for item in items))
    return path


def prompt_lengths(dialogues: Sequence[Dialogue]) -> list[int]:
    """In words, or token ids."""
    texts = [turn.text for dialogue in dialogues for turn in dialogue.turns]
    return [len(text.split() if isinstance(text, str) else text) for text in texts]


def output_lengths(dialogues: Sequence[Dialogue]) -> list[int]:
    return [turn.max_tokens for dialogue in dialogues for turn in dialogue.turns]


# -- drawn datasets ---------------------------------------------------------------------------

SHORT, LONG = Lengths(2, 5), Lengths(10, 12)
DRAWN: dict[str, Dataset] = {
    "random": RandomLengths(num_dialogues=40, input_len=SHORT, output_len=LONG),
    "sharegpt": ShareGpt(num_dialogues=40),
    "conversations": Conversations(
        num_dialogues=40, num_turns=3, system_len=30, input_len=SHORT, output_len=LONG
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_seed_says_all(name: str) -> None:
    dataset = DRAWN[name]
    assert dataset.make(Words()) == dataset.make(Words())
    other = type(dataset)(
        **{field: getattr(dataset, field) for field in dataset.__slots__} | {"seed": 1}
    )
    assert other.make(Words()) != dataset.make(Words())
    assert len(other.make(Words())) == 40


def test_sharegpts_means_are_those_of_its_paper() -> None:
    dialogues = ShareGpt(num_dialogues=4000, max_input_tokens=1 << 20, max_output_tokens=1 << 20)
    made = dialogues.make(TokenIds())
    assert fmean(prompt_lengths(made)) == pytest.approx(161, rel=0.1)
    assert fmean(output_lengths(made)) == pytest.approx(338, rel=0.1)


def test_conversations_share_a_system_prompt() -> None:
    dialogues = DRAWN["conversations"].make(Words())
    [system] = {dialogue.system for dialogue in dialogues}
    assert len(system.split()) == 30
    assert {len(dialogue.turns) for dialogue in dialogues} == {3}


# -- files ------------------------------------------------------------------------------------


def test_a_file_is_read_as_far_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"prompt": "one"}\n\n{"prompt": "two"}\nbroken')
    dialogues = Jsonl(path=path, num_dialogues=2, max_tokens=5).make(Words())
    assert [dialogue.turns[0].text for dialogue in dialogues] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 5: JSON: "):
        Jsonl(path=path, num_dialogues=3, max_tokens=5).make(Words())


def test_own_prompts_are_texts_ids_or_messages(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
    ]
    items = [
        {"prompt": "Once", "max_tokens": 7},
        {"prompt": [5, 6], "output_tokens": 8},
        {"messages": messages},
    ]
    path = write_lines(tmp_path / "own.jsonl", items)
    text, ids, chat = Jsonl(path=path, num_dialogues=9, max_tokens=64).make(Words())
    assert [(turn.text, turn.max_tokens) for turn in text.turns] == [("Once", 7)]
    assert [(turn.text, turn.max_tokens) for turn in ids.turns] == [((5, 6), 8)]
    assert [(turn.text, turn.max_tokens) for turn in chat.turns] == [("Hello", 64), ("Why?", 64)]
    assert chat.system == "Be brief."


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[1]", "Object|object"),
        ("{}", "needs a prompt, or messages"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": ["a"]}', "prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": "7"}', "max_tokens"),
        ('{"messages": {}}', "messages"),
        ('{"messages": [{"role": "poet", "content": "a"}]}', "messages.0.role"),
        ('{"messages": [{"role": "user", "content": 1}]}', "messages.0.content"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "needs a prompt, or messages"),
    ],
)
def test_a_line_of_own_prompts_without_sense_is_named(
    tmp_path: Path, line: str, fault: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=f"line 2: .*{fault}"):
        Jsonl(path=path, num_dialogues=9, max_tokens=5).make(Words())


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none"):
        Jsonl(path=tmp_path / "none", num_dialogues=1, max_tokens=1).make(Words())
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="empty is empty"):
        Jsonl(path=tmp_path / "empty", num_dialogues=1, max_tokens=1).make(Words())
