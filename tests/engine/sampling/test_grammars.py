"""Masks of grammars, word by word."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.config import ModelConfig
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.request import FinishReason, StructuredOutputs
from penstock.engine.sampling.grammars import GrammarMasks, SequenceGrammar
from penstock.engine.structured_outputs.compiler import GrammarCompiler

EOS = 4


def compiler() -> GrammarCompiler:
    path = resolve_model(ModelConfig(), weights=False)
    return GrammarCompiler(path, vocab_size=1024, eos_token_ids=(EOS,))


def grammar_of(
    grammars: GrammarCompiler, source: StructuredOutputs, token_ids: list[int], **settings: Any
) -> SequenceGrammar:
    """Of a sequence whose prompt has two tokens."""
    defaults: dict[str, Any] = {
        "min_tokens": 0,
        "end_token_ids": (),
        "never_token_ids": (),
        "is_beam": False,
    }
    return SequenceGrammar(grammars, source, token_ids, 2, **defaults | settings)


@pytest.mark.parametrize("banned", [31, 32, 63, 1023])
def test_any_token_can_be_banned(banned: int) -> None:
    """The last of a word's is its sign."""
    token_ids = [7, 8]
    source = StructuredOutputs("lark", "start: <[*]>")
    grammar = grammar_of(compiler(), source, token_ids, min_tokens=1, end_token_ids=(banned,))
    memory = GrammarMasks(1, 1024, torch.device("cpu"))
    assert memory.write(0, grammar) is None
    words = memory.on_device[0]
    assert not words[banned // 32] >> banned % 32 & 1
    assert words[banned // 32] != 0
    token_ids.append(banned)
    assert memory.write(0, grammar) is None  # the end
    token_ids.append(EOS)
    assert memory.write(0, grammar) in {FinishReason.STOP, None}


@pytest.mark.parametrize(
    "source",
    [
        StructuredOutputs("regex", "[ab]{1,12}(cd|ef)*"),
        StructuredOutputs("lark", 'start: ("a"|"b")* "end"'),
        StructuredOutputs("json_schema", '{"properties": {"age": {"type": "integer"}}}'),
        StructuredOutputs("regex", "(.|\\n)*"),
    ],
    ids=lambda source: source.text[:8],
)
def test_masks_after_drafts(source: StructuredOutputs) -> None:
    """They are those of a sequence that has the drafts, and leave no trace."""
    grammars, rng = compiler(), random.Random(1)
    memory, other = (GrammarMasks(6, 1024, torch.device("cpu")) for _ in range(2))
    settings = {"min_tokens": 4, "end_token_ids": (EOS,)}
    num_right = 0
    for _ in range(40):
        token_ids = [7, 8]
        grammar = grammar_of(grammars, source, token_ids, **settings)
        while len(token_ids) < 20:
            known = list(token_ids)
            whole = grammar_of(grammars, source, list(token_ids), **settings)
            end = other.write(0, whole)
            expected = [other.on_device[0].clone()]
            for _ in range(rng.randrange(6)):
                allowed = allowed_in(expected[-1])
                is_right = bool(allowed) and rng.random() < 0.8
                token_ids.append(rng.choice(allowed) if is_right else rng.randrange(1024))
                is_right = token_ids[-1] in allowed and token_ids[-1] != EOS
                num_right += is_right
                if is_right:
                    longer = grammar_of(grammars, source, list(token_ids), **settings)
                    other.write(0, longer)
                expected.append(other.on_device[0].clone() if is_right else torch.zeros(32))
            num_drafts = len(token_ids) - len(known)
            assert memory.write(0, grammar, 1 + num_drafts) == end
            for number, mask in enumerate(expected):
                if number and EOS in token_ids[len(known) : len(known) + number]:
                    break  # nothing is drawn after the end
                assert torch.equal(memory.on_device[number], mask.int()), (known, token_ids)
            token_ids[:] = known
            choices = [each for each in allowed_in(expected[0]) if each != EOS]
            if not choices:
                break
            token_ids.append(rng.choice(choices))
    assert num_right > 100


def allowed_in(mask: torch.Tensor) -> list[int]:
    words = mask.numpy().view(np.uint32)
    return [each for each in range(1024) if words[each // 32] >> each % 32 & 1]
