"""Any history of adds, aborts and steps: nothing leaks, nothing is shared wrongly, all ends well.

Every way of holding memory takes part: prefix cache, host tier, both kinds of preemption, samples,
beams, prompt log-probabilities, priorities, several steps in flight, microbatches. The device reads
every block back, and each stream must be what it would have been alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import BeamSearch, Request, Retention
from penstock.engine.scheduling.beam_search import BeamSearchState, Hypothesis

from .fake_device import VOCAB_SIZE, expected_output, row_of
from .stack import MAX_MODEL_LEN, Stack, make_request

TOKENS = st.integers(0, VOCAB_SIZE - 1)
# A few beginnings, so that prompts have prefixes in common.
STEMS = [[7] * 30, [7] * 13 + [8] * 20, list(range(24))]


def beams_alone(request: Request) -> tuple[Hypothesis, ...]:
    """What a beam search finds when nothing disturbs it."""
    params = request.sampling_params
    state = BeamSearchState(
        params,
        end_token_ids=frozenset(params.stop_token_ids),
        max_output_tokens=min(params.max_tokens, MAX_MODEL_LEN - len(request.prompt_token_ids)),
    )
    beams = [list(request.prompt_token_ids)]
    while beams:
        chosen = state.advance([row_of(beam, state.num_candidates) for beam in beams])
        beams = [[*beams[parent], token] for parent, token in chosen]
    return state.hypotheses


def check_stream(stack: Stack, request: Request, *, is_whole: bool) -> None:
    """Compare what came with what ought to, whole or up to where it was aborted."""
    name, params = request.request_id, request.sampling_params
    if params.beam_search is not None:
        if is_whole:
            for index, hypothesis in enumerate(beams_alone(request)):
                (output,) = [
                    each for each in stack.outputs[name, index] if each.finish_reason is not None
                ]
                assert output.token_ids == hypothesis.token_ids
                assert output.score == hypothesis.score
        return
    prompt = list(request.prompt_token_ids)
    for index in range(params.num_branches):
        got = stack.tokens(name, index)
        room = min(params.max_tokens, MAX_MODEL_LEN - len(prompt))
        expected = expected_output(prompt, room, index)
        assert got == (expected if is_whole else expected[: len(got)])
    if params.prompt_logprobs is not None:
        places = [-entry.logprob for entry in stack.prompt_logprobs(name)]
        assert places == [float(place) for place in range(1, len(places) + 1)]
        assert not is_whole or len(places) == len(prompt) - 1


@dataclass
class History:
    """Draws a stack and what happens to it."""

    data: Any

    def stack(self) -> Stack:
        draw = self.data.draw
        block_size = draw(st.sampled_from([1, 3, 4, 16]))
        smallest = -(-MAX_MODEL_LEN // block_size)
        num_steps = draw(st.integers(1, 3))
        stack = Stack(
            num_blocks=smallest + draw(st.integers(0, smallest)),
            block_size=block_size,
            num_host_blocks=draw(st.sampled_from([0, smallest // 3, 4 * smallest])),
            enable_prefix_caching=draw(st.booleans()),
            config=SchedulerConfig(
                max_num_seqs=draw(st.sampled_from([1, 2, 3, 5, 8])),  # of eight, one is kept
                max_num_batched_tokens=draw(st.integers(1, 40)),
                max_steps_in_flight=num_steps,
                scheduling_policy="priority",
                preemption=draw(st.sampled_from(["auto", "swap", "recompute"])),
                speculative_config=draw(
                    st.sampled_from(
                        [
                            None,
                            {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
                            {"num_speculative_tokens": 2},
                            {"method": "auto"},
                        ]
                    )
                ),
            ),
            num_microbatches=draw(st.sampled_from([1, num_steps])),
        )
        stack.device.guesses = draw(st.booleans())
        return stack

    def request(self, name: str) -> Request:
        draw = self.data.draw
        stem = draw(st.sampled_from([[], *STEMS]))
        prompt = stem[: draw(st.integers(0, 33))] + draw(st.lists(TOKENS, min_size=1, max_size=16))
        kind = draw(st.sampled_from(["one", "one", "samples", "beams", "prompt_logprobs", "warm"]))
        params: dict[str, Any] = {"max_tokens": draw(st.integers(1, 13))}
        if kind == "samples":
            params["n"] = draw(st.integers(2, 4))
        elif kind == "beams":
            width = draw(st.integers(1, 4))
            params |= {"n": width, "temperature": 0.0, "stop_token_ids": (3, 11)}
            params["beam_search"] = BeamSearch(
                width=width, early_stopping=draw(st.sampled_from([True, False, "never"]))
            )
        elif kind == "prompt_logprobs":
            params["prompt_logprobs"] = 0
        elif kind == "warm":
            params["max_tokens"] = 0
        return make_request(
            name,
            prompt,
            priority=draw(st.integers(-1, 1)),
            cache_salt=draw(st.sampled_from(["", "tenant"])),
            tenant=draw(st.sampled_from("ab")),
            weight=draw(st.sampled_from([1.0, 3.0])),
            retention=draw(st.sampled_from([None, Retention(duration_s=50.0)])),
            prediction=self.prediction(prompt),
            **params,
        )

    def prediction(self, prompt: list[int]) -> tuple[int, ...]:
        """None, or one that is right, but for some tokens."""
        draw = self.data.draw
        if not draw(st.booleans()):
            return ()
        prediction = expected_output(prompt, draw(st.integers(1, 13)))
        for place in draw(st.sets(st.integers(0, 12), max_size=3)):
            prediction[place : place + 1] = [draw(TOKENS)]
        return tuple(prediction)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_history_keeps_blocks_and_tokens_right(data: st.DataObject) -> None:
    history = History(data)
    stack = history.stack()
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort", "drop"]))
        stack.clock.now_s += 7.0
        if action == "add":
            request = history.request(f"r{number}")
            try:
                stack.core.add(request)
                requests[request.request_id] = request
            except InvalidRequestError:  # more branches than the pool or the places hold
                assert request.sampling_params.num_branches > 1
        elif action == "step":
            stack.step()
        elif requests:
            name = data.draw(st.sampled_from(sorted(requests)))
            if action == "abort":
                if name not in stack.ended:
                    aborted.add(name)
                stack.core.abort(name, index=data.draw(st.sampled_from([None, None, 1])))
            else:
                stack.core.drop_prefix(requests[name].prompt_token_ids)
            stack.check_blocks()
    stack.run()
    counters = stack.scheduler.drafting.counters
    if aborted:  # what the last step of an aborted sequence drafted is not counted
        assert counters.num_draft_tokens <= stack.device.num_drafts
        assert counters.num_accepted_tokens <= stack.device.num_right_drafts
    else:
        assert counters.num_draft_tokens == stack.device.num_drafts
        assert counters.num_accepted_tokens == stack.device.num_right_drafts
    assert counters.num_accepted_tokens == sum(counters.accepted_by_position)
    for name, request in requests.items():
        assert name in stack.ended or name in aborted
        check_stream(stack, request, is_whole=name not in aborted)
