"""Masks of grammars, word by word."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.config import ModelConfig
from penstock.engine.model_files import resolve_model
from penstock.engine.request import FinishReason, StructuredOutputs
from penstock.engine.sampling.grammars import GrammarMasks, SequenceGrammar
from penstock.engine.structured_outputs.compiler import GrammarCompiler

EOS = 4


@pytest.mark.parametrize("banned", [31, 32, 63, 1023])
def test_any_token_can_be_banned(banned: int) -> None:
    """The last of a word's is its sign."""
    path = resolve_model(ModelConfig(), weights=False)
    grammars = GrammarCompiler(path, vocab_size=1024, eos_token_ids=(EOS,))
    token_ids = [7, 8]
    grammar = SequenceGrammar(
        grammars,
        StructuredOutputs("lark", "start: <[*]>"),
        token_ids,
        num_prompt=2,
        min_tokens=1,
        end_token_ids=(banned,),
        never_token_ids=(),
        is_beam=False,
    )
    memory = GrammarMasks(1, 1024, torch.device("cpu"))
    assert memory.write(0, grammar) is None
    words = memory.on_device[0]
    assert not words[banned // 32] >> banned % 32 & 1
    assert words[banned // 32] != 0
    token_ids.append(banned)
    assert memory.write(0, grammar) is None  # the end
    token_ids.append(EOS)
    assert memory.write(0, grammar) in {FinishReason.STOP, None}
