"""JSON documents on one line, as answers: so that a schema's outputs are closed again.

Half of them answer a question that asks for no JSON. There, as under a grammar, the beginning is
given and not learned: the model does not begin JSON unasked, but knows how to go on with it.
"""

import json
import random
import uuid
from typing import Any

from penstock.engine.demo.corpus_answers import sample_question
from penstock.engine.demo.corpus_turns import State, Turn, type_out
from penstock.engine.demo.corpus_words import (
    COLOURS,
    FOODS,
    JOBS,
    WORDS,
    invented_word,
    proper_name,
)

REQUESTS = (
    "Answer in JSON",
    "Give me JSON",
    "As JSON, please",
    "Write a JSON object",
    "Describe {v} as JSON",
    "Extract the fields of {v} as JSON",
    "Return a JSON document about {v}",
    "Make up a record of {v}",
)
KNOWN_KEYS = (
    "id", "name", "type", "title", "description", "url", "email", "date", "age", "city", "price",
    "count", "tags", "items", "status", "version", "value", "key", "enabled", "address", "country",
    "language", "unit", "width", "height", "createdAt", "updated_at", "user", "data", "metadata",
    "options", "config", "path", "label", "comment", "latitude", "longitude", "quantity",
    "currency", "author", "kind", "spec", "ports", "host", "amount", "phone", "score", "level",
    "message",
)  # fmt: skip
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))
_SEPARATOR_WEIGHTS = (0.6, 0.3, 0.05, 0.05)


def write_json(rng: random.Random, state: State) -> Turn:
    """Answer with a document, asked for or imposed."""
    del state
    separators = rng.choices(_SEPARATORS, _SEPARATOR_WEIGHTS)[0]
    if rng.random() < 0.25:
        given, rest = _out_of_a_loop(rng, *separators)
    else:
        ensure_ascii = rng.random() < 0.2
        text = json.dumps(_document(rng), separators=separators, ensure_ascii=ensure_ascii)
        given, rest = text[:1], text[1:]
    if given[1:] or rng.random() < 0.5:
        question, _ = sample_question(rng)
        return Turn(type_out(rng, question, "?"), given + rest, num_given=len(given))
    return Turn(type_out(rng, rng.choice(REQUESTS), ".", v=invented_word(rng)), given + rest)


def _out_of_a_loop(rng: random.Random, comma: str, colon: str) -> tuple[str, str]:
    """Return a document that begins to repeat itself, and how it ends all the same.

    Small models like to repeat what they just wrote, for ever. Only the end is learned.
    """

    def member(value: str) -> str:
        return json.dumps(_key(rng)) + colon + value

    num_times = rng.choice((2, 2, 3, 3, 4, 5, 6, 8, 12, 20))
    word, scalar = _word(rng), json.dumps(_scalar(rng))
    kind = rng.random()
    if kind < 0.3:
        loop, end = '"' + rng.choice((" ", "", "", "_", ", ")).join([word] * num_times), '"'
    elif kind < 0.5:
        digits = str(rng.randrange(10 ** rng.choice((1, 1, 2))))
        loop, end = digits.lstrip("0") + digits * num_times, ""
    elif kind < 0.7:
        loop, end = "[" + comma.join([scalar] * num_times), "]"
    elif kind < 0.85:
        loop, end = "{" + comma.join([member(scalar)] * num_times), "}"
    else:
        label, key = json.dumps(_key(rng)) + colon, member("")
        is_labelled, has_lists = rng.random() < 0.6, rng.random() < 0.3
        loop = ""
        for _ in range(num_times):  # a chain whose nodes differ
            node = label + json.dumps(_scalar(rng)) + comma if is_labelled else ""
            loop += "{" + node + key + ("[" if has_lists else "")
        last = rng.choice(("null", "null", "null", "{}", "[]", scalar))
        end = "]}" * num_times if has_lists else last + "}" * num_times
    if loop.endswith('"'):  # the end of a text is part of what has to be found
        loop, end = loop[:-1], '"' + end
    before = [member(json.dumps(_scalar(rng))) for _ in range(_count(rng))]
    after = [member(json.dumps(_scalar(rng))) for _ in range(_count(rng))]
    begin = "{" + comma.join([*before, member(loop)])
    return begin, comma.join([end, *after]) + "}"


def _count(rng: random.Random, minimum: int = 0) -> int:
    """Return a number of things of which, after each, an end is likelier than another one."""
    while rng.random() < 0.42:
        minimum += 1
    return minimum


def _document(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.8:
        return _object(rng, 0)
    return _array(rng, 0) if kind < 0.9 else _scalar(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    num_keys = _count(rng, rng.choice((0, 1, 1, 1)) if depth else rng.choice((1, 1, 2, 3, 5)))
    return {_key(rng): _value(rng, depth + 1) for _ in range(num_keys)}


def _array(rng: random.Random, depth: int) -> list[Any]:
    num_items = _count(rng, rng.choice((0, 1, 1, 1)))
    kind = rng.random()
    if kind < 0.4:
        return [_text(rng) for _ in range(num_items)]
    if kind < 0.7:
        return [_scalar(rng) for _ in range(num_items)]
    return [_value(rng, depth + 1) for _ in range(num_items)]


def _value(rng: random.Random, depth: int) -> Any:
    kind, share = rng.random(), 0.22 * 0.5**depth  # what is deep is seldom deeper
    if kind < share:
        return _object(rng, depth)
    return _array(rng, depth) if kind < 2 * share else _scalar(rng)


def _scalar(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return _text(rng)
    if kind < 0.7:
        number = rng.randrange(10 ** _count(rng, 1))
        return -number if rng.random() < 0.1 else number
    if kind < 0.82:
        return round(rng.uniform(-10, 200), _count(rng, 1))
    return rng.choice((True, False)) if kind < 0.9 else None


def _text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return " ".join(_word(rng) for _ in range(_count(rng, 1)))
    if kind < 0.7:
        return proper_name(rng)
    if kind < 0.75:
        return f"20{rng.randrange(100):02}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if kind < 0.8:
        return f"{invented_word(rng)}@{invented_word(rng)}.com"
    if kind < 0.85:
        return f"https://{invented_word(rng)}.org/{invented_word(rng)}"
    if kind < 0.88:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind < 0.95:
        return f"{invented_word(rng)}{rng.choice('-_.:/')}{rng.randrange(1000)}"
    return ""


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    if kind < 0.7:
        return rng.choice(rng.choice((COLOURS, FOODS, JOBS)))
    word = invented_word(rng)
    return word.capitalize() if kind > 0.9 else word


def _key(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(KNOWN_KEYS)
    words = [rng.choice(WORDS) if rng.random() < 0.6 else invented_word(rng)]
    words += [rng.choice(WORDS) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    if kind < 0.6:
        return "_".join(words)
    if kind < 0.95:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return rng.choice(("-", ".", " ")).join(words)
