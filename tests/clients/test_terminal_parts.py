"""The terminal chat's parts by themselves: Markdown as it grows, the transcript."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.clients.python.terminal_screen import (
    Answer,
    MarkdownAnswer,
    Timing,
    clean,
    split_blocks,
)
from penstock.clients.python.transcript import Transcript

TEXT = (
    "Some **bold** text.\n\n1. one\n2. two\n\n```python\nprint('<b>')\n\nx = 1\n```\n\nThe end.\n\n"
    "- a\n- b"
)


def printed(pieces: list[str], *, height: int = 40) -> str:
    """What is on the screen in the end, as far as it was printed for good."""
    console = Console(
        width=60, height=height, force_terminal=True, color_system=None, legacy_windows=False
    )
    with console.capture() as capture:
        answer = MarkdownAnswer(console)
        for piece in pieces:
            answer.write(piece)
        answer.end()
    shown = capture.get().rpartition("\x1b[2K")[2]
    return "\n".join(line.rstrip() for line in shown.splitlines())


@given(st.lists(st.integers(0, len(TEXT)), max_size=6))
def test_blocks_part_only_where_they_are_over(cuts: list[int]) -> None:
    """However the text comes, it is whole, and no block of code is torn."""
    tail, blocks = "", []
    places = sorted(cuts)
    for begin, end in zip([0, *places], [*places, len(TEXT)], strict=True):
        done, tail = split_blocks(tail + TEXT[begin:end])
        blocks += [done] if done else []
    assert "".join([*blocks, tail]) == TEXT
    assert all(block.count("```") in (0, 2) for block in blocks)
    assert all(block.endswith("\n\n") for block in blocks)


def test_an_answer_is_drawn_as_markdown() -> None:
    shown = printed([TEXT[n : n + 7] for n in range(0, len(TEXT), 7)])
    assert "**" not in shown
    assert shown.endswith(" • b") or "• b" in shown


def test_a_model_does_not_steer_the_terminal() -> None:
    text = "\x1b[31mred\x1b[0m \x9b5n\x07 \x1b]0;title\x07 end\ttab\n"
    assert clean(text) == "[31mred[0m 5n ]0;title end\ttab\n"
    assert "\x1b[31m" not in printed([text])


def test_a_plain_answer_is_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer()
    answer.note("[waiting]")
    for piece in ("Zoë ", "👋🏽", " 日本\x07"):
        answer.write(piece)
    answer.end()
    assert capsys.readouterr().out == "Zoë 👋🏽 日本\n"


def test_timing() -> None:
    assert Timing(0.0).summary(0) == "0 tokens"
    assert Timing(1.0, 1.5, 3.5).summary(21) == (
        "10.0 tokens/s · first token after 0.50 s · 21 tokens"
    )


def test_a_transcript_is_a_tree() -> None:
    told = Transcript()
    told.add("one", "1", response_id="a", parent=None)
    told.add("two", "2", response_id="b", parent=told.head)
    told.go_to(1)
    told.add("two again", "2'", response_id="c", parent=told.head)
    assert [turn.response_id for turn in told.path()] == ["a", "c"]
    told.go_to(0)
    assert told.path() == []
    assert list(told.outline()) == ["   1  one", "   2  two", "   3  two again (after 1)"]
