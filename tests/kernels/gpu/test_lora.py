"""Updates by adapters in Triton against their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.lora import lora_expand_triton, lora_shrink_triton
from penstock.kernels.reference.lora import (
    LoraRows,
    lora_expand_reference,
    lora_shrink_reference,
)

from .tensors import DTYPES, normal, poisoned_memory


def updated(x, y, slots, a, b, scales, *, is_reference=False, room=None):
    """room: memory that a captured step reads, for more rows than there are."""
    rows = LoraRows.of(np.array(slots)).to(x.device)
    if room is not None:
        room.fill(rows)
        rows = room
    result = y.clone()
    shrink = lora_shrink_reference if is_reference else lora_shrink_triton
    expand = lora_expand_reference if is_reference else lora_expand_triton
    with poisoned_memory():
        hidden = shrink(x, rows, a)
        expand(result[:, 4:], hidden, rows, b, scales)
    return result


@settings(max_examples=8, deadline=None)
@given(
    slots=st.lists(st.integers(-1, 2), max_size=40),
    size=st.sampled_from([1, 64, 130]),
    rank=st.sampled_from([1, 16, 24]),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_its_reference(device, slots, size, rank, dtype):
    x = normal(len(slots), size, seed=0, dtype=dtype, device=device)
    y = normal(len(slots), 74, seed=1, dtype=dtype, device=device)
    a = normal(3, rank, size, seed=2, dtype=dtype, device=device)
    b = normal(3, 70, rank, seed=3, dtype=dtype, device=device)
    scales = torch.tensor([0.5, 1.0, 2.0], device=device)
    result = updated(x, y, slots, a, b, scales)
    expected = updated(x, y, slots, a, b, scales, is_reference=True)
    # Of the size of what is added up, which may be far larger than the sum.
    terms = [each.abs() for each in (x, y)], [each.abs() for each in (a, b, scales)]
    sums = updated(*terms[0], slots, *terms[1], is_reference=True).float()
    assert ((result - expected).float().abs() <= 8 * torch.finfo(dtype).eps * sums).all()
    bare = torch.tensor(slots, device=device) == -1
    assert torch.equal(result[bare], y[bare])
    room = LoraRows.room_for(len(slots) + 20, 3, device)
    room.fill(LoraRows.of(np.array([2] * (len(slots) + 20))).to(device))  # of another step
    assert torch.equal(updated(x, y, slots, a, b, scales, room=room), result)


@given(st.lists(st.integers(-1, 5), max_size=120))
def test_room_holds_the_groups_of_any_step(slots):
    rows = LoraRows.of(np.array(slots, dtype=np.int64))
    assert len(rows.groups) <= len(LoraRows.room_for(len(slots), 6, "cpu").groups)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(device, dtype):
    slots = [row % 2 for row in range(40)]
    x = normal(40, 100, seed=0, dtype=dtype, device=device)
    y = normal(40, 74, seed=1, dtype=dtype, device=device)
    a = normal(2, 16, 100, seed=2, dtype=dtype, device=device)
    b = normal(2, 70, 16, seed=3, dtype=dtype, device=device)
    scales = torch.tensor([0.5, 2.0], device=device)
    together = updated(x, y, slots, a, b, scales)
    for count in (1, 3, 17):
        alone = updated(x[-count:], y[-count:], slots[-count:], a, b, scales)
        assert torch.equal(alone, together[-count:])
