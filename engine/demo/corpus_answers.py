"""Questions with one right answer: reads the tables and varies the phrasing of a question.

Decides which phrasings are held out from training.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache

from penstock.engine.demo.corpus_texts import phrases, read_text

FORMS = {kind: phrases("questions", kind) for kind in ("what", "are", "why")}
HELD_OUT_SHARE = 0.12


@dataclass(frozen=True, slots=True)
class Topic:
    """One answer and all the ways to ask for it."""

    answer: str
    questions: tuple[str, ...]
    held_out_questions: tuple[str, ...]


def is_held_out(key: str) -> bool:
    """Choose the held-out share by a stable hash, so that it never moves between runs."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def parse(block: str) -> Topic:
    """Read one block of a table; its form is in `corpus_texts`."""
    head, _, answer = block.partition("\n=")
    kind, _, rest = head.strip().partition(":")
    subjects, _, questions = rest.partition("?")
    asked = [q.strip() for q in questions.replace("\n", " ").split("|") if q.strip()]
    for subject in subjects.split("|"):
        if subject.strip():
            asked += [form.format(subject.strip()) for form in FORMS[kind]]
    asked = list(dict.fromkeys(asked))
    held_out = [q for q in asked[1:] if is_held_out(q)]
    return Topic(
        answer=" ".join(answer.split()),
        questions=tuple(q for q in asked if q not in held_out),
        held_out_questions=tuple(held_out),
    )


@cache
def topics() -> tuple[Topic, ...]:
    """Return every topic of the tables, questions without their question marks."""
    tables = (read_text(name) for name in ("penstock", "serving", "models"))
    blocks = "\n".join(tables).strip().split("\n\n")
    return tuple(parse(block) for block in blocks)


def sample_question(rng: random.Random) -> tuple[str, str]:
    """Return a plain question that training may see, and its answer."""
    topic = rng.choice(topics())
    return rng.choice(topic.questions), topic.answer
