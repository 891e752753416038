"""Look-around is rewritten exactly, or not at all."""

from __future__ import annotations

import random
import re

import pytest

from penstock.engine.structured_outputs.look_around import (
    has_look_around,
    look_around_in,
    rewritten,
)

# A pattern, and texts of which some are found and some are not.
_EXPRESSIONS = {
    "zod's email": (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
        r"[A-Za-z]{2,}$",
        ["a.b@c.de", ".a@b.cd", "a..b@c.de", "a@b-c.d.ef", "a@b"],
    ),
    "zod's duration": (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
        r"(\d+([.,]\d+)?S)?)?)$",
        ["P1W", "P1Y2M", "P1YT2H3.5S", "P", "PT", "P1YT", "P1W2D", "PT5M"],
    ),
    "pydantic's Decimal": (
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        ["1.5", "-0", ".", "+", "", "-.5"],
    ),
    "a domain": (
        r"^(?=.{1,9}$)(?!-)[a-z0-9-]{1,8}(?<!-)(\.[a-z]+)?$",
        ["ab-c.de", "-ab", "ab-", "abcdefghij", "a"],
    ),
    "a password": (r"^(?=.*[A-Z])(?=.*\d).{4,}$", ["aB3d", "ab3d", "aBcd", "A1b", "A1bc"]),
    "no word": (r"^((?!ab).)*$", ["xx", "xaby", "ba", "", "ab"]),
    "reserved words": (r"^(?!(?:foo|bar)$)\w+$", ["foo", "foox", "bar", "x", ""]),
    "behind": (r"(?<=a)b", ["ab", "b", "xab", "bb"]),
    "not behind": (r"(?<![a-z])ab", ["ab", "xab", "1ab", "xab ab"]),
    "ahead": (r"a(?!b)", ["a", "ab", "aba", "b"]),
    "words": (r"\bab\b(?=,|$)", ["ab", "xab", "ab,", "ab x", "(ab, c"]),
    "empty turns": (r"^(?:(?:a|(?=b))*b)$", ["b", "aab", "a", "ab"]),
    "a named group": (r"^(?<year>\d{2})(?!00)\d\d$", ["1999", "1900", "2101"]),
}


def _as_python(pattern: str) -> re.Pattern[str]:
    """Ours of llguidance's syntax; `$` is the end, also before a line's."""
    text = re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    return re.compile(text.replace("(?<year>", "(?P<year>").replace("$", r"\Z"), re.ASCII)


@pytest.mark.parametrize(
    ("pattern", "mark"),
    [
        (r"^(?!a)b", "(?!"), (r"\bab\b", r"\b"), (r"(a)\1", r"\1"), (r"\\b(?<=x)", "(?<="),
        (r"\\bab", None), (r"\(?=a", None), ("(?:a)(?<y>b)", None), (r"a\d", None),
    ],
)  # fmt: skip
def test_what_counts_as_look_around(pattern: str, mark: str | None) -> None:
    assert look_around_in(pattern) == mark
    assert has_look_around(pattern) == bool(mark)


@pytest.mark.parametrize("name", _EXPRESSIONS)
def test_the_same_texts_match(name: str) -> None:
    pattern, texts = _EXPRESSIONS[name]
    rng = random.Random(1)
    letters = sorted({letter for text in texts for letter in text} | set("a.-\n"))
    for text in texts * 40:  # and texts that are almost the same
        chars = list(text)
        for _ in range(rng.randint(1, 2)):
            at = rng.randint(0, len(chars))
            chars[at : at + rng.randint(0, 1)] = rng.choices(letters, k=rng.randint(0, 1))
        texts.append("".join(chars))
    wanted = [bool(_as_python(pattern).search(text)) for text in texts]
    assert {True, False} == set(wanted)
    parts = rewritten(pattern).patterns
    assert parts is not None
    assert not any(map(has_look_around, parts))
    compiled = [_as_python(each) for each in parts]
    assert [all(each.search(text) for each in compiled) for text in texts] == wanted
    if name != "a password":  # some 70 states: as one expression it is too long
        whole = rewritten(pattern, is_whole=True).patterns
        assert whole is not None
        (one,) = map(_as_python, whole)
        assert [bool(one.search(text)) for text in texts] == wanted


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)(?!\1)",
        r"(?i)a(?!b)",
        r"\p{L}(?!b)",
        "(?=",
        "a(?=b)" * 400,
        r"^(?!a{300}b{300}c).*d(?=.*e.{20}$)",
        r"x(?<=a(?=b))",
        r"^(?=a)b$(?!c)" + "(?:a|b){1,90}(?!c)" * 6,
    ],
)
def test_what_cannot_be_rewritten(pattern: str) -> None:
    assert rewritten(pattern, is_whole=True).patterns is None
