"""The runner through hand-made batches, against transformers' `generate`."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.batch import Batch
from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.executor.in_process import InProcessExecutor
from penstock.engine.request import FinishReason
from penstock.engine.runner.model_runner import ModelRunner

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 12}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "dynamic": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}
CLOSE = 1e-4  # of two logits that rounding may put in either order


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 160, (length,), generator=generator).tolist()


def generate(model: Any, token_ids: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers and the logits behind them."""
    output = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(token_ids) :].tolist(), torch.cat(output.logits)


def assert_same_tokens(ours: list[int], theirs: list[int], logits: torch.Tensor) -> None:
    """Equal up to a first divergence where the reference itself had a tie."""
    assert len(ours) == len(theirs)
    for our_id, their_id, row in zip(ours, theirs, logits, strict=True):
        if our_id != their_id:
            best, second = row.topk(2).values.tolist()
            assert best - second < CLOSE, f"{our_id} instead of {their_id}"
            return


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_greedy_tokens_equal_generate(model, tiny_checkpoint, reference, driver):
    """Prompts of several lengths in chunks of several sizes, joining one batch at a time."""
    architecture, overrides = model
    path = tiny_checkpoint(architecture, **overrides)
    drive = driver(path)
    lengths = {0: 1, 1: 4, 2: 23, 3: 41}
    for seq_id, length in lengths.items():
        drive.add(seq_id, prompt(length, seq_id), min_tokens=30)
    drive.step({0: 1, 2: 9})
    drive.step({0: 1, 1: 3, 2: 1, 3: 17})
    drive.step({1: 1, 2: 13, 3: 24})
    while len(drive.output(3)) < 30:
        drive.step({seq_id: 1 for seq_id in (2, 0, 3, 1) if len(drive.output(seq_id)) < 30})
    for seq_id, length in lengths.items():
        # A new model each: dynamic rotary positions remember the longest sequence so far.
        theirs, logits = generate(reference(path), prompt(length, seq_id), 30)
        logits[:, 2] = -torch.inf  # EOS, which transformers masks after recording
        assert_same_tokens(drive.output(seq_id), theirs, logits)


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(tiny_checkpoint, driver):
    path = tiny_checkpoint()
    params = {"temperature": 1.0, "seed": 11}
    straight, broken = driver(path), driver(path)
    for drive in (straight, broken):
        drive.add(1, prompt(10), **params)
        drive.step({1: -1})
    for _ in range(20):
        straight.step({1: 1})
    broken.step({1: 1})
    broken.preempt(1)
    broken.add(2, prompt(30, 5), temperature=1.0)
    broken.step({2: -1})  # overwrites the blocks it gave up
    broken.step({1: 7, 2: 1})
    broken.step({2: 1, 1: -1})
    broken.leave(2)
    while len(broken.output(1)) < 21:
        broken.step({1: 1})
    assert broken.output(1) == straight.output(1)


def test_a_seeded_stream_does_not_depend_on_its_batch(tiny_checkpoint, driver):
    path = tiny_checkpoint()
    alone, crowd = driver(path), driver(path)
    alone.add(9, prompt(12), temperature=0.8, top_p=0.9, seed=4)
    for seq_id in range(6):
        crowd.add(seq_id, prompt(5 + seq_id, seq_id), temperature=1.0, seed=seq_id, top_k=7)
    crowd.add(9, prompt(12), temperature=0.8, top_p=0.9, seed=4)
    alone.step({9: -1})
    crowd.step(dict.fromkeys(range(6), -1) | {9: -1})
    for _ in range(15):
        alone.step({9: 1})
        crowd.step(dict.fromkeys(range(6), 1) | {9: 1})
    assert crowd.output(9) == alone.output(9)


def test_only_the_last_known_token_is_followed_by_another(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(10))
    assert drive.step({1: 4}).token_ids == {}
    assert drive.step({1: 5}).token_ids == {}
    assert set(drive.step({1: 1}).token_ids) == {1}


def test_a_sampled_token_is_used_before_policy_has_seen_it(tiny_checkpoint, driver):
    """The second step is planned without the first one's result."""
    ahead, behind = driver(tiny_checkpoint()), driver(tiny_checkpoint())
    for drive in (ahead, behind):
        drive.add(1, prompt(6))
        drive.step({1: -1})
    behind.step({1: 1})
    known = len(ahead.tokens[1])
    del ahead.tokens[1][known - 1 :]
    ahead.step({1: 1})
    assert ahead.tokens[1][-1] == behind.tokens[1][-1]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_known_sequence_may_enter_anew(leaves, tiny_checkpoint, driver):
    """With other tokens and other blocks, whether or not the same batch says that it left."""
    drive, fresh = driver(tiny_checkpoint()), driver(tiny_checkpoint())
    drive.add(1, prompt(20))
    drive.add(2, prompt(5, 2))
    drive.step({1: -1, 2: -1})
    drive.step({1: 1, 2: 1})
    drive.leave(1)
    if not leaves:
        drive._left.clear()
    drive.add(1, prompt(11, 4))
    fresh.add(1, prompt(11, 4))
    fresh.step({1: -1})
    drive.step({1: -1, 2: 1})
    for _ in range(6):
        fresh.step({1: 1})
        drive.step({1: 1, 2: 1})
    assert drive.output(1) == fresh.output(1)
    for seq_id in (1, 2):
        drive.leave(seq_id)
    drive.step({})
    rows = drive.runner._batch._free_rows
    assert sorted(rows) == list(range(len(rows))) == list(range(128))


def test_whoever_left_may_never_have_been_here(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    assert drive.runner.execute(Batch(step=0, scheduled=(), left_seq_ids=(5, 6))).token_ids == {}
    drive.add(1, prompt(4))
    drive._left += [8, 1]
    assert set(drive.step({1: -1}).token_ids) == {1}


def test_logprobs_and_min_tokens_reach_the_recipe(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(8), logprobs=2, min_tokens=5, logit_bias={2: 100.0})
    drive.add(2, prompt(8))
    result = drive.step({1: -1, 2: -1})
    assert set(result.logprobs) == {1}
    (entry,) = result.logprobs[1]
    assert entry.token_id == result.token_ids[1][0]
    assert len(entry.top) == 2
    for _ in range(5):
        drive.step({1: 1})
    assert drive.output(1).index(2) == 5  # EOS as soon as it is allowed


def test_broken_logits_leave_the_neighbours_alone(tiny_checkpoint, driver, tmp_path):
    path = shutil.copytree(tiny_checkpoint(), tmp_path / "broken")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][150] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    healthy, broken = driver(tiny_checkpoint()), driver(path)
    for drive in (healthy, broken):
        drive.add(1, [9, 8, 7])
        drive.add(2, [150, 8, 7])
        result = drive.step({1: -1, 2: -1})
        assert result.ended_seq_ids == ({2: FinishReason.ERROR} if drive is broken else {})
        assert set(result.token_ids) == ({1} if drive is broken else {1, 2})
        drive.leave(2)
        drive.add(3, [4, 5, 6])  # gets the broken sequence's blocks
        for _ in range(5):
            drive.step({1: 1, 3: -1 if not drive.output(3) else 1})
    assert broken.output(1) == healthy.output(1)
    assert broken.output(3) == healthy.output(3)


def test_an_empty_batch_only_forgets(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(8))
    drive.step({1: -1})
    drive.leave(1)
    assert drive.step({}).token_ids == {}
    assert len(drive.runner._batch._sequences) == 0


def test_in_process_executor(tiny_checkpoint):
    runner = ModelRunner(EngineConfig(cache=CacheConfig(num_blocks=16)), tiny_checkpoint())
    executor = InProcessExecutor(runner)
    assert executor.submit(Batch(step=7, scheduled=())).result().step == 7
    assert executor.info == runner.info
    executor.close()


@pytest.mark.parametrize("head_dim", [16, 8], ids=["by the kernels", "by torch"])
def test_a_step_shows_that_it_gets_on(head_dim, tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint(head_dim=head_dim))
    progress = drive.runner.progress
    before = progress.num_parts_done()
    drive.add(1, prompt(10))
    drive.step({1: -1})
    assert progress.num_parts_done() >= before + 2, "once a layer"
    assert "thread 0: free" in progress.describe()


def test_info(tiny_checkpoint):
    config = EngineConfig(
        model=ModelConfig(max_model_len=100, dtype="bfloat16"),
        cache=CacheConfig(num_blocks=20, block_size=8),
        device=DeviceConfig(device="cpu", num_threads=1),
    )
    info = ModelRunner(config, tiny_checkpoint()).info
    assert (info.max_model_len, info.vocab_size) == (100, 160)
    assert (info.num_blocks, info.block_size) == (20, 8)
    assert (info.dtype, info.device) == ("bfloat16", "cpu")


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_context_of_scaled_rotary_positions(rope, context, tiny_checkpoint):
    path = tiny_checkpoint(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4} | rope)
    assert ModelRunner(EngineConfig(), path).info.max_model_len == context
    too_long = EngineConfig(model=ModelConfig(max_model_len=context + 1))
    with pytest.raises(ConfigError, match=f"--max-model-len {context + 1}.*{context} positions"):
        ModelRunner(too_long, path)


def test_settings_that_cannot_work(tiny_checkpoint):
    with pytest.raises(ConfigError, match="--num-threads must be a whole number from 1 to"):
        ModelRunner(EngineConfig(device=DeviceConfig(num_threads=0)), tiny_checkpoint())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device cuda"):
            ModelRunner(EngineConfig(device=DeviceConfig(device="cuda")), tiny_checkpoint())
