"""What the terminal chat prints, by itself: Markdown as it grows, and no character that hides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.clients.python.terminal_screen import (
    Answer,
    Cleaner,
    MarkdownAnswer,
    Screen,
    Timing,
    clean,
    split_blocks,
)

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


CLEANED = {
    "pay\u202elap": "pay<U+202E>lap",
    "\u202a\u202b\u202c\u202d\u2066\u2067\u2068\u2069": (
        "<U+202A><U+202B><U+202C><U+202D><U+2066><U+2067><U+2068><U+2069>"
    ),
    "a\u200eb\u200f\u061c": "a<U+200E>b<U+200F><U+061C>",
    "pay\u200bpal \ufeff\u2060": "pay<U+200B>pal <U+FEFF><U+2060>",
    "pay\u200dpal\u200c": "pay<U+200D>pal<U+200C>",
    "\u200d": "<U+200D>",
    "a\u00ad\u2028\U000e0041": "a<U+00AD><U+2028><U+E0041>",
    "half \ud83d": "half \ufffd",
    "\x1b]8;;https://a.b\x1b\\x\r\x08\x9b2J\x85": "]8;;https://a.b\\x2J",
    # Needed: Persian, Hindi, Khmer, Hebrew with points, emoji, a flag of tags, combining marks.
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645": None,
    "\u0915\u094d\u200d\u0937 \u0915\u094d\u200c\u0937": None,
    "\u1781\u17d2\u1798\u17c2\u179a\u200b\u179a": None,
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd": None,
    "👨\u200d👩\u200d👧 ❤\ufe0f\u200d🔥 👩🏽\u200d💻 🏳\ufe0f\u200d🌈": None,
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f": None,
    "e\u0301 日本\ufe00 \tZoë\n": None,
}


@pytest.mark.parametrize("text", CLEANED)
def test_what_hides_is_shown_and_what_writing_needs_stays(text: str) -> None:
    wanted = text if CLEANED[text] is None else CLEANED[text]
    assert clean(text) == wanted
    cleaner = Cleaner()
    assert "".join(map(cleaner.feed, text)) == wanted  # in pieces of one character


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[bank](https://evil.example/x)", "bank (https://evil.example/x)"),
        ("[bank](https://b\u0430nk.example)", "bank (https://xn--bnk-6cd.example)"),
        ("[x](javascript:alert(1))", "[x](javascript:alert(1))"),
        ("a &#x202e; b &lrm; &#x200b; c", "a <U+202E> b <U+200E> <U+200B> c"),
        ("a&#13;b &#27;[31m", "ab �[31m"),
        ("| a&#x202e; |\n|---|\n| b |", "a<U+202E>"),
        ("`a\u202e`", "a<U+202E>"),
        ("a \x1b[31mb \x1b]0;t\x07", "a [31mb ]0;t"),
    ],
)
def test_an_answer_as_markdown_hides_nothing(text: str, wanted: str) -> None:
    for pieces in ([text], list(text)):
        shown = printed(pieces)
        assert wanted in shown
        assert not {"\u202e", "\u200e", "\u200b", "\r", "\x07"} & set(shown)
        assert "\x1b]" not in shown  # no hyperlink, whose destination nobody sees


def test_notes_names_and_errors_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.complain("cannot write a\u202etxt.exe\x1b[2J\udc80: denied")
    screen.show("  1  title\u202e\x1b[31m")
    assert capsys.readouterr() == (
        "  1  title<U+202E>[31m\n",
        "penstock chat: cannot write a<U+202E>txt.exe[2J\ufffd: denied\n",
    )
    console = Console(width=60, height=40, force_terminal=True, color_system=None)
    with console.capture() as capture:
        answer = MarkdownAnswer(console)
        answer.note("[refused\u202e\x1b]0;title\x07; reconnecting]")
        answer.end()
    assert "[refused<U+202E>]0;title; reconnecting]" in capture.get()
    assert "\x1b]" not in capture.get()


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
