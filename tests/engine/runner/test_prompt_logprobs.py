"""Log-probabilities of prompt tokens against transformers' logits, in chunks of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling import logprobs as module

from .test_model_runner import prompt

DEVICES: list[Any] = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
CHUNKS = [(150,), (1,) * 150, (64, 64, 22), (1, 148, 1), (7, 100, 43)]


def collect(
    drive: Any, shares: list[dict[int, int]]
) -> tuple[dict[int, list[TokenLogprobs]], dict[int, list[int]]]:
    """What each sequence was told, which must come in order and without gaps."""
    entries: dict[int, list[TokenLogprobs]] = {}
    positions: dict[int, list[int]] = {}
    for share in shares:
        for seq_id, (position, found) in drive.step(share).prompt_logprobs.items():
            known = entries.setdefault(seq_id, [])
            assert position == 1 + len(known)
            assert found
            known += found
            positions.setdefault(seq_id, []).append(position)
    return entries, positions


def check(entries: list[TokenLogprobs], token_ids: list[int], model: Any, num_top: int) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    assert [entry.token_id for entry in entries] == token_ids[1:]
    for entry, row in zip(entries, expected[:-1], strict=True):
        chosen = float(row[entry.token_id])
        assert entry.logprob == pytest.approx(chosen, abs=1e-4)
        assert (row > chosen + 1e-4).sum() < entry.rank <= (row > chosen - 1e-4).sum() + 1
        assert len(entry.top) == num_top
        for token_id, value in entry.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_equal_transformers_in_any_chunks(architecture, chunks, tiny_checkpoint, reference, driver):
    path = tiny_checkpoint(architecture)
    drive = driver(path, max_model_len=200)
    drive.add(1, prompt(150), prompt_logprobs=3)
    entries, positions = collect(drive, [{1: chunk} for chunk in chunks])
    check(entries[1], prompt(150), reference(path), 3)
    starts = [sum(chunks[:i]) + 1 for i in range(len(chunks))]
    assert positions[1] == [start for start in starts if start < 150]
    assert drive.step({1: 1}).prompt_logprobs == {}


@pytest.mark.parametrize("device", DEVICES)
def test_only_those_who_ask_and_each_what_it_asks(device, tiny_checkpoint, reference, driver):
    path = tiny_checkpoint()
    drive = driver(path, device=device)
    asked = {1: 0, 2: None, 3: 20, 4: 2, 5: 1}
    lengths = {1: 30, 2: 25, 3: 9, 4: 1, 5: 2}
    for seq_id, length in lengths.items():
        drive.add(seq_id, prompt(length, seq_id), prompt_logprobs=asked[seq_id], logprobs=1)
    shares = [{1: 9, 2: 5, 3: -1, 4: -1}, {3: 1, 2: 20, 5: -1, 4: 1, 1: 21}]
    entries, _ = collect(drive, shares)
    assert set(entries) == {1, 3, 5}  # a prompt of one token has nothing to tell
    for seq_id, found in entries.items():
        check(found, prompt(lengths[seq_id], seq_id), reference(path), asked[seq_id] or 0)


def test_a_recomputed_sequence_tells_of_its_prompt_alone(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(12), prompt_logprobs=1)
    entries, _ = collect(drive, [{1: -1}, {1: 1}, {1: 1}])
    drive.preempt(1)
    again, positions = collect(drive, [{1: 10}, {1: 4}])
    assert positions == {1: [1, 11]}
    assert again.keys() == entries.keys()
    for one, other in zip(again[1], entries[1], strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_logits_are_computed_a_few_rows_at_a_time(tiny_checkpoint, driver):
    """A long prompt's would not fit beside a large vocabulary."""
    drive = driver(tiny_checkpoint())
    head, sizes = drive.runner._model.logits, []
    drive.runner._model.logits = lambda hidden: sizes.append(len(hidden)) or head(hidden)
    drive.add(1, prompt(128), prompt_logprobs=1)
    drive.step({1: -1})
    assert max(sizes) <= module._MAX_ROWS < 127


def test_a_batch_calls_extensions_only_while_a_sequence_has_them(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    assert drive.runner._planners == []
    drive.add(1, prompt(8), prompt_logprobs=1)
    drive.add(2, prompt(8))
    drive.step({1: -1, 2: -1})
    assert list(drive.runner._batch._num_with.values()) == [1]
    drive.leave(1)
    drive.step({2: 1})
    assert drive.runner._batch._num_with == {}
