"""Replayed steps against the same steps run eagerly: padding, sizes, and memory that stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.config import ModelConfig, SchedulerConfig
from penstock.engine.layers.attention import ForwardContext, StepImages
from penstock.engine.lora.adapted_model import attach_lora_slots
from penstock.engine.lora.layer_adapters import LoraWeights
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.language_model import ImageEncoder
from penstock.engine.models.loader import load_model
from penstock.engine.models.names import LLAMA_NAMES
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.runner.cuda_graphs import (
    GraphedModel,
    GraphSizes,
    decode_sizes,
    graphs_num_bytes,
    piece_sizes,
)
from penstock.engine.runner.kv_cache import KVShape
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.reference.lora import LoraRows
from tests.support.tiers import tiered

from .recorded_graphs import RecordedGraphMaker

BLOCK_SIZE, MAX_BLOCKS, NUM_BLOCKS = 4, 12, 90
SIZES = GraphSizes(decodes=(1, 2, 4, 8), pieces=(16, 32))
DRAFTS = GraphSizes(decodes=(4,), verifications=(1, 2, 4), num_drafts=3, pieces=(16, 32))
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "windows": ("MistralForCausalLM", {"sliding_window": 7}),
    "columns": ("MptForCausalLM", {"attn_config": {"clip_qkv": 0.5}}),
    "norms over heads": ("Olmo2ForCausalLM", {}),
    "caps": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "experts": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "sinks": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "prompt lengths": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}


@dataclass(frozen=True)
class Step:
    """Sequences as (tokens before, new tokens), and their ids."""

    shares: list[tuple[int, int]]
    input_ids: Tensor
    tables: Tensor

    def context(self, pool: Tensor) -> ForwardContext:
        positions = torch.cat([torch.arange(old, old + new) for old, new in self.shares])
        seqs = torch.arange(len(self.shares)).repeat_interleave(
            torch.tensor([new for _, new in self.shares])
        )
        slots = self.tables[seqs, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        lens = [old + new for old, new in self.shares]
        num_columns = -(-max(lens) // BLOCK_SIZE)
        layout = PagedLayout(
            query_start_loc=torch.tensor(
                [0, *accumulate(new for _, new in self.shares)], dtype=torch.int32
            ),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=self.tables[:, :num_columns],
            slot_mapping=slots + positions % BLOCK_SIZE,
            max_query_len=max(new for _, new in self.shares),
            max_seq_len=max(lens),
        )
        return ForwardContext(
            kv_pool=pool, layout=layout, positions=positions,
            prompt_lens=torch.full_like(positions, 20),
        )  # fmt: skip


def step(rng: random.Random, shares: list[tuple[int, int]]) -> Step:
    blocks = rng.sample(range(NUM_BLOCKS), len(shares) * 9)
    num_tokens = sum(new for _, new in shares)
    return Step(
        shares,
        torch.tensor([rng.randrange(160) for _ in range(num_tokens)]),
        torch.tensor(blocks, dtype=torch.int32).view(len(shares), 9),
    )


def steps() -> list[Step]:
    rng = random.Random(3)
    decodes = [[(rng.randint(0, 30), 1) for _ in range(n)] for n in (5, 1, 8, 3, 9, 2, 4, 8)]
    lens = ([12], [1, 9], [3, 20, 1, 1], [31, 1], [16], [2, 30, 1], [2])
    lens += ([4] * 4, [4] * 3, [4], [1, 3], [4, 4], [2, 1, 4], [4, 1, 1, 1, 2], [5, 4], [3])
    others = [[(rng.randint(0, 3), new) for new in each] for each in lens]
    found = [step(rng, shares) for shares in (*decodes, *others)]
    rng.shuffle(found)
    return found


@pytest.fixture
def decoder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Decoder:
    architecture, overrides = MODELS[getattr(request, "param", "llama")]
    path = tiny_checkpoint(architecture, **overrides)
    return load_model(ModelConfig(model=str(path)), path, torch.device("cpu"))


def full_pool(decoder: Decoder) -> Tensor:
    """Numbers in every slot, as if all sequences had been computed before."""
    shape = KVShape.of(decoder.state_spec, BLOCK_SIZE)
    pool = shape.allocate(NUM_BLOCKS, torch.device("cpu"))
    return pool.normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "decoder", tiered(MODELS, ["llama", "windows", "prompt lengths"]), indirect=True
)
@pytest.mark.parametrize(
    "sizes",
    [SIZES, DRAFTS, GraphSizes(pieces=(1, 8, 32)), GraphSizes(decodes=(3, 8))],
    ids=["full", "full with drafts", "piecewise", "decodes alone"],
)
@torch.inference_mode()
def test_a_replayed_step_equals_an_eager_one(decoder: Decoder, sizes: GraphSizes) -> None:
    """In hidden states, and in every slot of the pool: padding stores nothing."""
    pool = full_pool(decoder)
    eager_pool = pool.clone()
    maker = RecordedGraphMaker()
    model = TorchModel(decoder)
    graphed = GraphedModel(model, pool, sizes, maker, max_blocks=MAX_BLOCKS)
    assert torch.equal(pool, eager_pool)  # nor does capturing
    num_replayed = 0
    for each in steps():
        before = maker.num_replays
        hidden = graphed(each.input_ids, each.context(pool))
        expected = model(each.input_ids, each.context(eager_pool))
        assert hidden.shape == expected.shape
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool, eager_pool, rtol=1e-4, atol=1e-4)
        num_tokens, most_new = len(each.input_ids), max(new for _, new in each.shares)
        of_kind = sizes.decodes if most_new == 1 else sizes.verifications
        if most_new <= 1 + sizes.num_drafts and len(each.shares) <= max(of_kind, default=0):
            assert maker.num_replays == before + 1
        elif sizes.pieces and num_tokens <= sizes.pieces[-1]:
            assert maker.num_replays == before + decoder.config.num_layers + 1
        else:
            assert maker.num_replays == before
        num_replayed += maker.num_replays > before
    assert num_replayed >= 7


@pytest.mark.parametrize(
    "sizes", tiered([SIZES, DRAFTS], [DRAFTS]), ids=["full", "full with drafts"]
)
@torch.inference_mode()
def test_rows_take_their_own_adapters(decoder: Decoder, sizes: GraphSizes) -> None:
    """In each replay those of its step; a step without any has graphs without their launches. What
    EAGLE reads of a step comes with it."""
    decoder.feature_layers = (1,)
    room = attach_lora_slots(decoder, LLAMA_NAMES, num_slots=3, max_rank=4, library=None)
    generator = torch.Generator().manual_seed(2)
    for slot, layer in product(range(3), room.layers.values()):
        matrices = [
            [torch.randn(shape, generator=generator) for shape in ((4, layer.in_features), (n, 4))]
            for n in layer.part_sizes
        ]
        updates = [LoraWeights(a, b, 0.1 * (1 + slot)) for a, b in matrices]
        layer.adapters.install(slot, layer.adapters.pack(updates, WeightMemory()))
    pool, maker, model = full_pool(decoder), RecordedGraphMaker(), TorchModel(decoder)
    eager_pool, bare_pool = pool.clone(), pool.clone()
    graphed = GraphedModel(model, pool, sizes, maker, max_blocks=MAX_BLOCKS)
    rng, num_replayed = random.Random(4), 0
    for number, each in enumerate(steps()):
        slots = [-1 if number % 4 == 0 else rng.randint(-1, 2) for _ in each.input_ids]
        rows = LoraRows.of(np.array(slots)) if max(slots) >= 0 else None
        room.rows.set(rows)
        room.sampled_rows.set(rows)
        before = maker.num_replays
        found = graphed.step(each.input_ids, each.context(pool))
        num_replayed += maker.num_replays > before
        expected = model.step(each.input_ids, each.context(eager_pool))
        for one, other in (
            (found.hidden, expected.hidden), (found.logits, expected.logits),
            (found.features, expected.features), (pool, eager_pool),
        ):  # fmt: skip
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        room.rows.set(None)
        bare = model(each.input_ids, each.context(bare_pool))
        assert (bare - expected.hidden).abs().max() > 0.1 or rows is None
        bare_pool.copy_(eager_pool)
    assert num_replayed >= 18


@pytest.mark.parametrize("sizes", [SIZES, GraphSizes(pieces=(16, 32))], ids=["full", "piecewise"])
@torch.inference_mode()
def test_features_of_images_are_no_part_of_graphs(decoder: Decoder, sizes: GraphSizes) -> None:
    """A step with some runs as it is; one without is replayed."""
    decoder.images = cast("ImageEncoder", object())
    pool, maker, model = full_pool(decoder), RecordedGraphMaker(), TorchModel(decoder)
    graphed = GraphedModel(model, pool, sizes, maker, max_blocks=MAX_BLOCKS)
    each = step(random.Random(1), [(0, 9)])
    features = torch.ones(2, decoder.config.hidden_size)
    with_image = StepImages(rows=torch.tensor([3, 5]), features=features, offsets=None)
    found = {}
    for images in (None, with_image):
        before = maker.num_replays
        found[images is None] = graphed(
            each.input_ids, replace(each.context(pool), images=images)
        ).clone()
        assert (maker.num_replays > before) == (images is None)
        expected = model(each.input_ids, replace(each.context(pool.clone()), images=images))
        torch.testing.assert_close(found[images is None], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[True][:3], found[False][:3])
    assert not torch.isclose(found[True][3:], found[False][3:]).all(dim=1).any()


@torch.inference_mode()
def test_nan_of_padding_stays_there(decoder: Decoder) -> None:
    """A padded row may hold anything: here what a broken sequence left there."""
    pool = full_pool(decoder)
    model = TorchModel(decoder)
    graphed = GraphedModel(model, pool, SIZES, RecordedGraphMaker(), max_blocks=MAX_BLOCKS)
    rng = random.Random(0)
    healthy = step(rng, [(3, 1), (8, 1), (2, 1)])
    expected = model(healthy.input_ids, healthy.context(pool.clone()))
    decoder.embed_tokens.weight.data[150] = torch.nan
    spoilt = step(rng, [(0, 1)] * 4)
    ids = torch.tensor([1, 2, 3, 150])
    assert graphed(ids, spoilt.context(pool))[3].isnan().all()
    found = graphed(healthy.input_ids, healthy.context(pool))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 13, 128, 256, 300, 1000])
def test_sizes_follow_from_the_number_of_sequences(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == min(max_num_seqs, 512)
    assert all(b - a <= 16 for a, b in pairwise(sizes))
    for max_tokens in (1, 20, 64, 2048):
        pieces = piece_sizes(max_num_seqs, max_tokens)
        assert list(pieces) == sorted(set(pieces))
        assert pieces[-1] == min(max(2 * max_num_seqs, 64), max_tokens, 512)
        scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
        assert GraphSizes.of("none", scheduler) == GraphSizes()
        assert GraphSizes.of("full", scheduler) == GraphSizes(decodes=sizes, pieces=pieces)
        drafts = {"method": "ngram", "num_speculative_tokens": 7}
        with_drafts = GraphSizes.of("full", replace(scheduler, speculative_config=drafts))
        verified = tuple(size for size in sizes if size <= 4)  # of 8 tokens each
        assert with_drafts == GraphSizes(
            decodes=sizes, verifications=verified, num_drafts=7, pieces=pieces
        )
        piecewise = GraphSizes.of("piecewise", scheduler)
        assert piecewise.decodes == ()
        assert piecewise.pieces[0] == 1
        assert list(piecewise.pieces) == sorted(set(piecewise.pieces))


def test_memory_is_known_from_the_two_largest() -> None:
    """A graph takes what all share, 100 a token, and 7 for itself."""
    used = [0]
    sizes = GraphSizes(decodes=(1, 2, 4, 8), verifications=(1, 2), num_drafts=5, pieces=(16,))

    class Captured:
        def __init__(self, some: GraphSizes) -> None:
            verified = tuple(size * (1 + some.num_drafts) for size in some.verifications)
            every = some.decodes + verified + some.pieces
            self.taken = 100 * max(every) + 7 * len(every)
            used[0] += self.taken

        def __del__(self) -> None:
            used[0] -= self.taken

    found = graphs_num_bytes(sizes, Captured, lambda: used[0])
    assert found == (800 + 4 * 7) + (1200 + 2 * 7) + (1600 + 7)
    assert graphs_num_bytes(GraphSizes(), Captured, lambda: used[0]) == 0
    assert used == [0]
