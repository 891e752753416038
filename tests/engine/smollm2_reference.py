"""What `transformers` answers with SmolLM2 in fp32, kept in `smollm2_greedy.json`, since that takes
minutes: `python -m tests.engine.smollm2_reference` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.real_models import smollm2_file

from .greedy_parity import gguf_read_once

FILE = Path(__file__).with_name("smollm2_greedy.json")
NUM_NEW = 24
CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three fruits.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "Übersetze »Guten Morgen« ins Englische, bitte! 🙂",
    "List the days of the week.",
    "Why do leaves fall in autumn?",
    "What is the largest ocean?",
    "Give me advice on learning to swim.",
)
TEXTS = (
    "The",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    'Licensed under the Apache License, Version 2.0 (the "License");\nyou may not use this file '
    "except in compliance with the License.\nYou may obtain a copy of the License at\n\n   ",
    "In the beginning the house on the hill was empty. Then a family came, and with them a dog, a "
    "cat, and a parrot that knew all the names of the ships in the harbour. " * 4 + "Every morning",
)


class Answer(NamedTuple):
    """One prompt's.

    Attributes:
        text: a question, or the beginning of a text.
        gaps: between the two greatest logits, one for each token.
    """

    text: str
    is_chat: bool
    prompt_token_ids: list[int]
    token_ids: list[int]
    gaps: list[float]


def answers() -> list[Answer]:
    """Those that are kept."""
    return [Answer(**each) for each in json.loads(FILE.read_text("utf-8"))]


def computed(texts: Sequence[tuple[str, bool]]) -> Iterator[Answer]:
    """Those of `transformers`, now.

    Args:
        texts: each with whether it is a question.
    """
    file = smollm2_file()
    source: dict[str, Any] = {"gguf_file": file.name}
    with gguf_read_once():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    for text, is_chat in texts:
        prompt = tokenizer.encode(text, add_special_tokens=False)
        if is_chat:
            messages = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.cat(found.logits).topk(2).values
        yield Answer(
            text=text,
            is_chat=is_chat,
            prompt_token_ids=prompt,
            token_ids=found.sequences[0, len(prompt) :].tolist(),
            gaps=[round(float(gap), 6) for gap in top[:, 0] - top[:, 1]],
        )


if __name__ == "__main__":
    asked = [(text, True) for text in CHATS] + [(text, False) for text in TEXTS]
    lines = [json.dumps(answer._asdict(), ensure_ascii=False) for answer in computed(asked)]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
