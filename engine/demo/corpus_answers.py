"""Questions with one right answer: reads the tables and varies how a question is put.

Knows which phrasings are held out from training; knows nothing of conversations.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache

from penstock.engine.demo.corpus_models import MODELS
from penstock.engine.demo.corpus_penstock import PENSTOCK
from penstock.engine.demo.corpus_serving import SERVING

FORMS = {
    "what": (
        "what is {}", "what's {}", "explain {}", "tell me about {}", "can you explain {}", "{}",
        "what does {} mean", "what do you know about {}", "describe {}", "how does {} work",
        "what exactly is {}", "please explain {} to me", "define {}", "i don't understand {}",
        "give me a short explanation of {}", "what is meant by {}", "do you know what {} is",
        "could you tell me what {} is", "i want to know about {}", "what is {} in llm serving",
        "explain {} in simple words", "tell me what {} is", "what is {} all about",
        "help me understand {}", "so what is {}", "i have a question about {}",
        "how would you explain {}",
    ),
    "are": (
        "what are {}", "explain {}", "tell me about {}", "can you explain {}", "{}", "what is {}",
        "what do you know about {}", "describe {}", "what exactly are {}", "define {}",
        "do you know what {} are", "what is meant by {}", "tell me what {} are",
        "help me understand {}", "explain {} in simple words", "how do {} work",
        "how would you explain {}",
    ),
    "why": (
        "why {}", "why is {} useful", "why do we need {}", "what is {} good for", "why use {}",
        "what are the benefits of {}", "what problem does {} solve", "advantages of {}",
        "why does one need {}", "what is the point of {}", "why is {} important",
        "what is the advantage of {}", "what does {} improve", "why would i use {}",
        "why do you use {}",
        "what is {} for",
    ),
}  # fmt: skip
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
    """Read one block of a table."""
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
    """Return every topic of both tables, questions without their question marks."""
    blocks = "\n".join((PENSTOCK, SERVING, MODELS)).strip().split("\n\n")
    return tuple(parse(block) for block in blocks)


def sample_question(rng: random.Random) -> tuple[str, str]:
    """Return a plain question that training may see, and its answer."""
    topic = rng.choice(topics())
    return rng.choice(topic.questions), topic.answer
