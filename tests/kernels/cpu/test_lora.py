"""Updates by adapters against their reference, for each dtype and set of instructions."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cpu import operations
from tests.kernels.cpu.test_kernels import SHARED, assert_near, random
from torch import Tensor

from penstock.kernels.cpu.lora import CHUNK, pack_pair, set_pair, table_of_pairs
from penstock.kernels.reference.lora import (
    LoraRows,
    lora_expand_reference,
    lora_shrink_reference,
)

Pair = tuple[Tensor, Tensor, float]


def pair(in_features: int, out_features: int, rank: int, seed: int, dtype: torch.dtype) -> Pair:
    a = random(rank, in_features, seed=seed, dtype=torch.float32) / in_features**0.5
    b = random(out_features, rank, seed=seed + 1, dtype=torch.float32) / rank**0.5
    return a.to(dtype), b.to(dtype), 0.5 + seed


def expected(
    y: Tensor, x: Tensor, slots: list[int], adapters: list[list[Pair | None]], sizes: list[int]
) -> Tensor:
    result = y.float()
    for slot, adapter in enumerate(adapters):
        rows = LoraRows.of(np.where(np.array(slots) == slot, 0, -1))
        for part, columns in zip(adapter, result.split(sizes, dim=1), strict=True):
            if part is not None:
                a, b, scale = part
                hidden = lora_shrink_reference(x.float(), rows, a.float()[None])
                hidden = hidden.to(x.dtype).float()
                lora_expand_reference(columns, hidden, rows, b.float()[None], torch.tensor([scale]))
    return result


@SHARED
@given(
    slots=st.lists(st.integers(-1, 2), min_size=1, max_size=40),
    in_features=st.sampled_from([2, 30, CHUNK, CHUNK + 6, 3 * CHUNK]),
    sizes=st.lists(st.sampled_from([1, 16, 50, 256, 300]), min_size=1, max_size=3),
    ranks=st.tuples(*[st.sampled_from([1, 8, 16, 17, 64])] * 3),
    missing=st.integers(0, 8),
)
def test_updates_are_those_of_each_rows_adapter(library, slots, in_features, sizes, ranks, missing):
    dtype = library.dtype
    x, y = (random(len(slots), size, seed=7, dtype=dtype) for size in (in_features, sum(sizes)))
    adapters: list[list[Pair | None]] = [
        [
            None
            if 3 * slot + part == missing
            else pair(in_features, size, rank, slot + part, dtype)
            for part, size in enumerate(sizes)
        ]
        for slot, rank in enumerate(ranks)
    ]
    adapters.append([pair(in_features, size, 1, 0, dtype) for size in sizes])  # nobody's
    result = operations.add_lora(library, y, x, slots, adapters, sizes)
    assert_near(result, expected(y, x, slots, adapters, sizes))
    bare = torch.tensor(slots) == -1
    assert torch.equal(result[bare], y[bare])


def test_a_row_does_not_depend_on_its_neighbours(library):
    dtype, slots = library.dtype, [row % 3 - 1 for row in range(60)]
    x, y = random(60, 1500, dtype=dtype), random(60, 300, seed=1, dtype=dtype)
    adapters = [[pair(1500, 100, 16, slot, dtype), pair(1500, 200, 8, 5, dtype)] for slot in (0, 1)]
    together = operations.add_lora(library, y, x, slots, adapters, [100, 200])
    for count in (1, 2, 7, 31):
        parts = [
            operations.add_lora(
                library, y[at : at + count], x[at : at + count], slots[at : at + count],
                adapters, [100, 200],
            )
            for at in range(0, 60, count)
        ]  # fmt: skip
        assert torch.equal(torch.cat(parts), together)


def test_an_embedding_looks_up_what_its_adapters_add(library):
    dtype, ids, slots = library.dtype, torch.tensor([3, 40, 3, 0, 7]), [1, 0, 0, -1, 1]
    adapters = [pair(41, 20, rank, rank, dtype) for rank in (5, 16)]
    rows = LoraRows.of(np.array(slots))
    groups = library.structure(
        "lora_rows", num_groups=len(rows.groups), order=rows.order, groups=rows.groups
    )
    packed = [pack_pair(*each, memory=library.memory, is_lookup=True) for each in adapters]
    table, hidden = table_of_pairs(2, 1), torch.full((5, 1, 1, 16), torch.nan)
    for slot, each in enumerate(packed):
        set_pair(table, slot, 0, each)
    y, sizes = random(5, 20, dtype=dtype), torch.tensor([20])
    step = library.structure("step", num_tokens=5, token_ids=ids)
    shared = {"h": hidden, "pairs": table, "rows": groups, "max_rank": 16}
    library.run("lora_lookup", step=step, **shared)
    result = y.clone()
    num_rows = ctypes.c_int64(5)
    product = library.structure("linear_args", y=result, num_rows=num_rows)
    library.run(
        "lora_expand",
        product=product,
        part_sizes=sizes,
        num_parts=1,
        num_chunks=1,
        stride=20,
        **shared,
    )
    one_hot = torch.nn.functional.one_hot(ids, 41).to(dtype)
    assert_near(result, expected(y, one_hot, slots, [[each] for each in adapters], [20]))
