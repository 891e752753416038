"""A step in one call gives the bits of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.engine.config import ModelConfig
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.loader import load_model
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.runner.kv_cache import KVShape
from penstock.kernels.draw_uniforms import draw_uniforms
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.sampling import sample_tokens

BLOCK_SIZE, NUM_SEQS, LENGTH = 4, 3, 5
IDS = torch.arange(7, 7 + NUM_SEQS * LENGTH)
LAST = torch.arange(NUM_SEQS) * LENGTH + LENGTH - 1


@pytest.fixture
def model(tiny_checkpoint) -> CpuModel:
    decoder = load_model(ModelConfig(), tiny_checkpoint(), torch.device("cpu"))
    library = cpu_kernels(decoder, BLOCK_SIZE, num_threads=2)
    model = fastest(decoder, BLOCK_SIZE, library)
    assert isinstance(model, CpuModel)
    return model


@pytest.fixture
def context(model: CpuModel) -> ForwardContext:
    """Three prompts of five tokens, two blocks each."""
    tables = torch.arange(2 * NUM_SEQS, dtype=torch.int32).view(NUM_SEQS, 2)
    positions = torch.arange(LENGTH).repeat(NUM_SEQS)
    blocks = tables.long().repeat_interleave(LENGTH, 0)
    slots = blocks.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE
    shape = KVShape.of(model.state_spec, BLOCK_SIZE)
    return ForwardContext(
        kv_pool=shape.allocate(2 * NUM_SEQS, torch.device("cpu")),
        layout=PagedLayout(
            query_start_loc=torch.arange(NUM_SEQS + 1, dtype=torch.int32) * LENGTH,
            seq_lens=torch.full((NUM_SEQS,), LENGTH, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=slots + positions % BLOCK_SIZE,
            max_query_len=LENGTH,
            max_seq_len=LENGTH,
        ),
        positions=positions,
    )


def parameters(num_rows: int) -> torch.Tensor:
    rows = torch.tensor([[0.0, 0, 1, 0], [1.0, 0, 1, 0], [0.8, 9, 0.9, 0]], dtype=torch.float64)
    return rows.repeat(num_rows // 3, 1).T.contiguous()


@pytest.mark.parametrize("sampled_tokens", [None, LAST], ids=["all tokens", "the last ones"])
def test_a_step_equals_its_parts(model, context, sampled_tokens):
    num_rows = len(IDS if sampled_tokens is None else sampled_tokens)
    columns, draws = parameters(num_rows), torch.arange(3 * num_rows).view(3, num_rows)
    output = model.step(IDS, context, sampled_tokens, columns, draws)
    assert output.drawn is not None
    token_ids, is_valid = output.drawn.read()
    hidden, logits = output.hidden.clone(), output.logits.clone()
    assert torch.equal(model(IDS, context), hidden)
    assert output.drawn.read() == (token_ids, is_valid)  # a forward pass alone draws nothing
    rows = hidden if sampled_tokens is None else hidden[sampled_tokens]
    assert torch.equal(model.logits(rows), logits)
    expected = sample_tokens(logits, *columns, draw_uniforms(draws))
    assert (token_ids, is_valid) == tuple(each.tolist() for each in expected)


def test_of_two_threads_one_may_compute_a_step_alone(model, context, monkeypatch):
    monkeypatch.setattr(model, "_is_worth_sharing", lambda _: True)
    run, shared, found = model._run, [], []

    def noted(*, is_shared):
        shared.append(is_shared)
        run(is_shared=is_shared)

    monkeypatch.setattr(model, "_run", noted)
    for model.num_threads, model.spares_core in [(2, False), (2, True), (2, False), (4, True)]:
        found.append(model.step(IDS, context).logits.clone())
    assert shared == [True, False, True, True]
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_what_is_not_asked_for_is_not_drawn(model, context):
    greedy = torch.zeros(4, NUM_SEQS, dtype=torch.float64)
    output = model.step(IDS, context, LAST, greedy, None)
    assert output.drawn is not None
    assert output.drawn.read()[0] == output.logits.argmax(1).tolist()
    assert model.step(IDS, replaced(context), LAST, None, None).drawn is None


def test_the_same_context_stands_for_the_same_tensors(model, context):
    """Values that changed in place are read; nothing else has to be said."""
    ids, greedy = IDS.clone(), torch.zeros(4, NUM_SEQS, dtype=torch.float64)
    model.step(ids, context, LAST, greedy, None)
    ids += 40
    again = model.step(ids, context, LAST, greedy, None).logits.clone()
    fresh = model.step(ids, replaced(context), LAST, greedy, None).logits
    assert torch.equal(again, fresh)
    assert not torch.equal(again, model.step(IDS, replaced(context), LAST, greedy, None).logits)


def replaced(context: ForwardContext) -> ForwardContext:
    """Another context of the same content."""
    return ForwardContext(
        kv_pool=context.kv_pool, layout=context.layout, positions=context.positions
    )


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "torch"])
@torch.inference_mode()
def test_a_pool_may_have_the_address_of_an_earlier_one(tiny_checkpoint, model, context, in_c):
    """Their layers begin elsewhere."""
    if not in_c:
        decoder = load_model(ModelConfig(), tiny_checkpoint(), torch.device("cpu"))
        model = TorchModel(decoder)
    shape = KVShape.of(model.state_spec, BLOCK_SIZE)
    smaller = context.kv_pool
    larger = shape.allocate(4 * NUM_SEQS, torch.device("cpu"))
    same_place = larger.view(-1)[: smaller.numel()].view(smaller.shape)
    assert same_place.data_ptr() == larger.data_ptr()
    model(IDS, replace(context, kv_pool=larger))
    for pool in (larger, smaller):
        pool.zero_()
    model(IDS, replace(context, kv_pool=same_place))
    model(IDS, context)
    assert torch.equal(same_place, context.kv_pool)
