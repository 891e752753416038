"""Stored token ids against the real engine: the second turn's prompt finds all KV of the first."""

from __future__ import annotations

from penstock.engine import LLM, SamplingParams

from ...generation.test_prompt_ids import DEMO, DEMO_FOLDER, fresh

_BLOCK = 16
_ONE = SamplingParams(temperature=0.0, max_tokens=1)


def test_a_second_turn_finds_the_first_to_its_last_full_block() -> None:
    dialogue = fresh(DEMO)
    spoken = dialogue.say("What is a penstock?", dialogue.spelt("A pipe that feeds a turbine."))
    reusing = dialogue.token_ids("And then?")
    anew = dialogue.tokenizer.encode(dialogue.prompt("And then?"), add_special_tokens=False)
    with LLM(str(DEMO_FOLDER), num_blocks=200, block_size=_BLOCK) as llm:

        def num_cached(token_ids: list[int]) -> int:
            (output,) = llm.generate([token_ids], _ONE, use_tqdm=False)
            return output.num_cached_tokens

        assert num_cached(spoken) == 0
        num_found_anew = num_cached(anew)
        assert num_cached(reusing) >= len(spoken) // _BLOCK * _BLOCK > num_found_anew
