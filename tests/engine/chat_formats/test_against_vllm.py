"""The same calls and text as vLLM's own parsers, however the text arrives.

`tests.support.vllm_parsers` has written what vLLM 0.33 finds in the corpus' texts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.chat_formats import OutputParser, OutputSyntax, Tool, items_of
from tests.support.tiers import tiered
from tests.support.tool_texts import TOOLS, texts

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())
NUM_SPLITS = 25
OFFERED = tuple(Tool(name=each["name"], parameters=each["parameters"]) for each in TOOLS)
# What is special about a text, and formats in which ours differs from vLLM's on purpose:
DIFFERENCES = {
    # A stream has shown the call when the text breaks off. vLLM's non-streaming parsers drop it,
    # or give the markup as text; its streaming ones show it too.
    "truncated": set(dict.fromkeys(row[0] for row in CORPUS)),
    # vLLM's regular expression wants the list to be the whole output; text after it makes the
    # calls text.
    "followed": {"pythonic", "deepseek_v3"},
    # vLLM 0.33 reads Mistral's newer form only, and takes the older one's list for a function `[`.
    "listed": {"mistral"},
    # vLLM drops a call of a tool that was not offered. A client is told of it in all formats.
    "unknown": {"glm45"},
}
Found = tuple[str, list[tuple[str, Any]]]


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read(name: str, text: str, cuts: Sequence[int] = ()) -> Found:
    """The text, without white space around it, and the calls."""
    parser = OutputParser(OutputSyntax(name), OFFERED)
    pieces = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        pieces += parser.push(text[begin:end])
    items = items_of([*pieces, *parser.end()])
    said = "".join(item.text for item in items if item.kind == "message")
    calls = [(item.name, _value(item.text)) for item in items if item.kind == "function_call"]
    return said.strip(), calls


def test_the_corpus_is_that_of_the_script() -> None:
    assert [tuple(row[:3]) for row in CORPUS] == [row for row in texts() if row[0] != "openai"]
    assert len(CORPUS) >= 500


@pytest.mark.parametrize("name", sorted({row[0] for row in CORPUS}))
def test_calls_and_text_are_vllms(name: str) -> None:
    different: Counter[str] = Counter()
    for _, text, special, said, calls in (row for row in CORPUS if row[0] == name):
        ours = read(name, text)
        theirs = said.strip(), [(each, _value(arguments)) for each, arguments in calls]
        reasons = {special} | ({"listed"} if "[TOOL_CALLS][" in text else set())
        if ours != theirs:
            known = [each for each in reasons if name in DIFFERENCES.get(each, ())]
            assert known, (text, ours, theirs)
            different[known[0]] += 1
    print(name, dict(different))


NAMES = sorted({row[0] for row in texts()})


@pytest.mark.parametrize("name", tiered(NAMES, NAMES[::3]))
def test_the_same_in_any_split(name: str) -> None:
    rng = random.Random(name)
    for text in {row[1] for row in texts() if row[0] == name}:
        whole = read(name, text)
        for _ in range(NUM_SPLITS):
            num_cuts = rng.choice((1, 2, 5, len(text) - 1))
            cuts = sorted(rng.sample(range(1, len(text)), min(num_cuts, len(text) - 1)))
            assert read(name, text, cuts) == whole, (text, cuts)
