"""Every kernel against its reference in torch, for each dtype and set of instructions.

The reference computes in float32 from the same rounded inputs. In float32 results agree to 1e-5 of
their size; narrower types are rounded once or twice more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.cpu import operations
from tests.kernels.paged_case import CaseShape, PagedCase
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.activation import Activation
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.int8_cache import SCALE_BYTES
from penstock.kernels.reference.activation import activate_and_mul_reference, activate_reference
from penstock.kernels.reference.layer_norm import layer_norm_reference
from penstock.kernels.reference.rms_norm import rms_norm_reference
from penstock.kernels.reference.rotary_store_kv import rotate
from penstock.kernels.reference.store_kv import store_kv_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# One library serves all examples of a test; examples do not change it. A dozen libraries each have
# as many.
SHARED = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Within the dtype's tolerance of the largest value."""
    bound = TOLERANCES[result.dtype] * max(1.0, expected.abs().max().item())
    assert (result.float() - expected.float()).abs().max().item() <= bound


@SHARED
@given(
    num_rows=st.integers(1, 40),
    size=st.integers(1, 40).map(lambda n: 2 * n),
    out=st.integers(1, 150),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_linear(library, num_rows, size, out, has_bias, has_residual):
    dtype = library.dtype
    x, weight = random(num_rows, size, dtype=dtype), random(out, size, seed=1, dtype=dtype)
    bias = random(out, seed=2, dtype=dtype) if has_bias else None
    residual = random(num_rows, out, seed=3, dtype=dtype) if has_residual else None
    expected = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    if has_residual:
        expected = expected + residual.float()
    assert_near(operations.linear(library, x, weight, bias, residual), expected)


def test_a_row_does_not_depend_on_its_neighbours(library):
    dtype = library.dtype
    x, weight = random(299, 106, dtype=dtype), random(200, 106, seed=1, dtype=dtype)
    together = operations.linear(library, x, weight)
    for size in (1, 3, 8, 9, 18, 150):
        parts = [operations.linear(library, part, weight) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@SHARED
@given(
    step=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 255, 256, 300]), st.integers(1, 20)),
        min_size=1,
        max_size=4,
    ),
    block_size=st.sampled_from([2, 6, 8, 16, 32, 128]),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1), (3, 3), (20, 1)]),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    window=st.sampled_from([None, 1, 5, 100, 1000]),
    scoring=st.sampled_from([{}, {"soft_cap": 5.0}, {"has_alibi": True}]),
    has_sinks=st.booleans(),
    kind=st.sampled_from([{}, {"is_fp8": True}, {"is_int8": True}]),
)
def test_attention(library, step, block_size, heads, head_dim, window, scoring, has_sinks, kind):
    case = PagedCase(
        CaseShape(
            step=step,
            block_size=block_size,
            heads=heads,
            head_dim=head_dim,
            dtype=library.dtype,
            window=window,
            has_sinks=has_sinks,
            num_shared=1,
            **scoring,
            **kind,
        )
    )
    result = operations.attention(library, *case.tensors, **case.arguments)
    assert_near(result, case.expected())


@pytest.mark.parametrize("kind", [{}, {"is_fp8": True}, {"is_int8": True}])
def test_attention_of_a_token_does_not_depend_on_its_chunk(library, kind):
    """All tokens at once, or the last ones with the same cache before them: the same bits."""
    case = PagedCase(
        CaseShape(
            step=[(0, 300)],
            heads=(6, 2),
            head_dim=64,
            dtype=library.dtype,
            window=70,
            has_sinks=True,
            has_alibi=True,
            **kind,
        )
    )
    whole = operations.attention(library, *case.tensors, **case.arguments)
    for num_tokens in (1, 2, 5, 44, 45, 299):
        part = operations.attention(library, *case.last(num_tokens).tensors, **case.arguments)
        assert torch.equal(part, whole[-num_tokens:]), num_tokens


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
def test_rms_norm(library, size, offset):
    x, weight = random(5, size, dtype=library.dtype), random(size, seed=1, dtype=library.dtype)
    expected = rms_norm_reference(x.float(), weight.float(), 1e-5, offset)
    assert_near(operations.rms_norm(library, x, weight, 1e-5, offset=offset), expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("size", "num_groups"), [(1, 1), (17, 1), (100, 1), (96, 6), (85, 5)])
def test_layer_norm(library, size, num_groups, has_bias):
    dtype = library.dtype
    x = (10 + random(5, size, dtype=torch.float32)).to(dtype)
    weight, bias = (random(size, seed=seed, dtype=dtype) for seed in (1, 2))
    expected = layer_norm_reference(
        x.float(), weight.float(), bias.float() if has_bias else None, 1e-5, num_groups
    )
    found = operations.layer_norm(
        library, x, weight, bias if has_bias else None, 1e-5, num_groups=num_groups
    )
    assert_near(found, expected)


def test_norms_of_a_part_of_each_row(library):
    x, weight = random(3, 100, dtype=library.dtype), random(34, seed=1, dtype=library.dtype)
    for norm, groups in ((operations.rms_norm, {}), (operations.layer_norm, {"num_groups": 2})):
        arguments = (weight,) if norm is operations.rms_norm else (weight, None)
        found = norm(library, x, *arguments, 1e-5, stride=100, **groups)
        alone = norm(library, x[:, :34].contiguous(), *arguments, 1e-5, **groups)
        assert torch.equal(found[:, :34], alone)
        assert found[:, 34:].isnan().all()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
def test_silu_mul(library, size):
    x = 4 * random(5, 2 * size, dtype=library.dtype)
    x[0, 0], x[1, 0] = 90.0, -90.0  # where e^x runs out
    gate, up = x.float().chunk(2, dim=1)
    assert_near(operations.silu_mul(library, x), F.silu(gate) * up)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("size", [1, 16, 100])
def test_activate(library, size, activation):
    x = 4 * random(5, 2 * size, dtype=library.dtype)
    # Where e^x runs out; float16 holds no larger square.
    x[:3, 0] = torch.tensor((30.0, -90.0, 60.0) if activation == "relu2" else (90.0, -90.0, 900.0))
    wide = x.float()
    gated = operations.activate(library, x, activation, is_gated=True)
    assert_near(gated, activate_and_mul_reference(wide, activation))
    plain = operations.activate(library, x, activation, is_gated=False)
    assert_near(plain, activate_reference(wide, activation))
    # Small numbers of negative ones keep digits, which 1 + erf would not have.
    tail = torch.linspace(-5, 0, 64).to(library.dtype)[None]
    found = operations.activate(library, tail, activation, is_gated=False)
    exact = activate_reference(tail.double(), activation)
    rtol = 2 * torch.finfo(library.dtype).eps + 4e-3
    torch.testing.assert_close(found.double(), exact, atol=6e-8, rtol=rtol)


@pytest.mark.parametrize("size", [1, 17, 100])
def test_what_is_scaled_and_added(library, size):
    dtype = library.dtype
    x, residual = random(5, size, dtype=dtype), random(5, size, seed=1, dtype=dtype)
    assert torch.equal(operations.scale_add(library, x, None, 0.3), x * 0.3)
    assert torch.equal(operations.scale_add(library, x, residual, 0.3), x * 0.3 + residual)
    assert torch.equal(operations.clamp(library, x, 0.3), x.clamp(-0.3, 0.3))
    table, positions = random(9, size, seed=2, dtype=dtype), torch.tensor([8, 0, 3, 3, 5])
    found = operations.add_positions(library, x, table, positions)
    assert torch.equal(found, x + table[positions])


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_cap_logits(library, soft_cap):
    x = 4 * random(3, 8200, dtype=library.dtype)
    scaled = (x * 0.7).float()
    expected = soft_cap * (scaled / soft_cap).tanh() if soft_cap else scaled
    assert_near(operations.cap_logits(library, x, 0.7, soft_cap), expected)


@pytest.mark.parametrize("is_packed", [False, True])
def test_embed(library, is_packed):
    weight = random(50, 34, dtype=library.dtype)
    token_ids = torch.tensor([0, 49, 15, 16, 16])
    result = operations.embed(library, token_ids, weight, is_packed=is_packed)
    assert torch.equal(result, weight[token_ids])


@pytest.mark.parametrize("rows", [[], [7], [0, 3, 4, 8]])
def test_gather_rows(library, rows):
    x, index = random(9, 34, dtype=library.dtype), torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(operations.gather_rows(library, x, index), x[index])
    features = random(len(rows), 34, seed=1, dtype=library.dtype)
    placed = operations.place_features(library, x, index, features)
    assert torch.equal(placed, x.index_copy(0, index, features))


@pytest.mark.parametrize("head_dim", [16, 32, 48, 80])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_store(library: CpuLibrary, head_dim: int, has_norm: bool):
    dtype, num_heads, num_kv_heads = library.dtype, 5, 2
    qkv = random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    caches = tuple(torch.full((3, 8, num_kv_heads, head_dim), torch.nan).to(dtype) for _ in "kv")
    slots, rows = torch.tensor([23, 0, 9, 1]), torch.tensor([6, 2, 0, 2])
    angles = random(7, head_dim // 2, seed=4, dtype=torch.float32)
    norms = tuple(random(head_dim, seed=seed, dtype=dtype) for seed in (5, 6)) if has_norm else None
    query = operations.rope_store(
        library, qkv, caches, slots, (angles.cos(), angles.sin(), rows), norms, eps=1e-6
    )
    heads = qkv.float()
    queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        queries = F.rms_norm(queries, (head_dim,), norms[0].float(), 1e-6)
        keys = F.rms_norm(keys, (head_dim,), norms[1].float(), 1e-6)
    turn = (angles.cos()[rows][:, None], angles.sin()[rows][:, None])
    assert_near(query, rotate(queries, *turn))
    assert_near(caches[0].flatten(0, 1)[slots], rotate(keys, *turn))
    assert torch.equal(caches[1].flatten(0, 1)[slots].float(), values)
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots] = False
    assert caches[0].flatten(0, 1)[untouched].isnan().all()


def test_rope_store_with_other_tables_norms_and_values(library: CpuLibrary):
    dtype, head_dim, rows = library.dtype, 48, torch.tensor([6, 2, 0, 2])
    qkv, others = (random(4, 9, head_dim, seed=seed, dtype=dtype) for seed in (0, 1))
    caches = tuple(torch.full((3, 8, 2, head_dim), torch.nan).to(dtype) for _ in "kv")
    slots = torch.tensor([23, 0, 9, 1])
    angles = random(2, 7, head_dim // 2, seed=4, dtype=torch.float32)
    norms = tuple(random(head_dim, seed=seed, dtype=dtype) for seed in (5, 6))
    query = operations.rope_store(
        library, qkv, caches, slots, (angles.cos(), angles.sin(), rows), norms,
        eps=1e-6, offset=1.0, values=others, rope=1,
    )  # fmt: skip
    queries, keys, _ = qkv.float().split((5, 2, 2), dim=1)
    turn = (angles[1].cos()[rows][:, None], angles[1].sin()[rows][:, None])
    for found, heads, norm in ((query, queries, norms[0]),
                               (caches[0].flatten(0, 1)[slots], keys, norms[1])):  # fmt: skip
        normed = rms_norm_reference(heads, norm.float(), 1e-6, 1.0)
        assert_near(found, rotate(normed, *turn))
    assert torch.equal(caches[1].flatten(0, 1)[slots], others[:, 7:])


def test_a_cache_in_fp8(library: CpuLibrary) -> None:
    """Every number that E4M3 has, those between, those beyond its range, and NaN."""
    heads, head_dim = (5, 2), 64
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[:126] + every[1:127]) / 2
    others = torch.tensor([448.0, 460, 1e4, torch.inf, -torch.inf, 2**-10, 2**-11, 1e-9, -0.0])
    numbers = torch.cat([every, between, between * 1.001, -between * 0.999, others])
    values = numbers[torch.arange(8 * 2 * head_dim) % len(numbers)].view(8, 2, head_dim)
    qkv = random(8, heads[0] + 2 * heads[1], head_dim, dtype=torch.float32)
    qkv[:, -2:] = values
    qkv = qkv.to(library.dtype)
    caches = tuple(torch.zeros(3, 8, 2, head_dim).to(torch.float8_e4m3fn) for _ in "kv")
    expected = tuple(each.clone() for each in caches)
    scales = (torch.tensor([0.01, 0.02]), torch.tensor([1.0, 2.0]))
    slots = torch.tensor([23, 0, 9, 1, 2, 3, 4, 5])
    still = torch.zeros(1, head_dim // 2)
    angles = (still.cos(), still, torch.zeros(8, dtype=torch.int64))
    operations.rope_store(library, qkv, caches, slots, angles, None, eps=1e-6, scales=scales)
    _, keys, values = qkv.split((heads[0], *heads[1:], heads[1]), dim=1)
    store_kv_reference(keys, values, *expected, slots, key_scale=scales[0], value_scale=scales[1])
    for found, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def store_without_rotation(
    library: CpuLibrary, qkv: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """qkv [num_tokens, num_heads + 2 · num_kv_heads, head_dim]"""
    still = torch.zeros(1, qkv.shape[2] // 2)
    angles = (still.cos(), still, torch.zeros(len(qkv), dtype=torch.int64))
    operations.rope_store(library, qkv, caches, slots, angles, None, eps=1e-6)


@pytest.mark.parametrize("block_size", [2, 6, 16])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_a_cache_in_int8(library: CpuLibrary, block_size: int, head_dim: int) -> None:
    """The same codes and scales as the reference's, and nothing beside them."""
    num_tokens, num_kv_heads = 7, 3
    qkv = random(num_tokens, 5 * num_kv_heads, head_dim, dtype=torch.float32)
    values = qkv[:, -num_kv_heads:]
    values[0, 0] = 0.0
    values[1, 1] *= 1e-39
    values[2, 2, 3] = torch.inf
    values[3, 0, 1] = torch.nan
    values[4] *= 300
    values[5, 1] = 0.0
    values[5, 1, 0] = -2.5  # a code of −127
    qkv = qkv.to(library.dtype)
    shape = (9, block_size, num_kv_heads, head_dim + SCALE_BYTES)
    caches = tuple(torch.full(shape, 77, dtype=torch.int8) for _ in "kv")
    expected = tuple(each.clone() for each in caches)
    slots = torch.tensor([17, 0, 9, 1, 2, 3, 4])
    store_without_rotation(library, qkv, caches, slots)
    keys, values = qkv.split(num_kv_heads, dim=1)[-2:]
    store_kv_reference(keys, values, *expected, slots)
    for found, wanted in zip(caches, expected, strict=True):
        assert torch.equal(found[..., :head_dim], wanted[..., :head_dim])
        numbers = (int8_cache.decode(each) for each in (found, wanted))
        torch.testing.assert_close(*numbers, rtol=0, atol=0, equal_nan=True)


def test_a_token_that_is_not_finite_spoils_no_other(library: CpuLibrary) -> None:
    """Tokens before it, although the same item computes them, and other sequences."""
    shape = CaseShape(
        step=[(0, 20), (33, 1)], heads=(4, 2), head_dim=32, dtype=library.dtype, is_int8=True
    )
    case = PagedCase(shape)
    expected = case.expected()
    slot = case.layout.slot_mapping[10]
    for cache, number in ((case.key_cache, torch.inf), (case.value_cache, torch.nan)):
        rows = torch.full((1, 2, 32), number)
        cache.flatten(0, 1)[slot] = int8_cache.encode(rows)[0]
    result = operations.attention(library, *case.tensors, **case.arguments)
    assert result[10:20].isnan().all()
    others = [*range(10), 20]
    assert_near(result[others], expected[others])


def test_small_values_of_an_int8_cache(library: CpuLibrary) -> None:
    """Of many positions, each with little weight: no dtype runs out of range."""
    shape = CaseShape(step=[(2000, 1)], heads=(4, 2), head_dim=32, dtype=library.dtype)
    case = PagedCase(replace(shape, is_int8=True))
    values = int8_cache.decode(case.value_cache) * 1e-2
    case.value_cache = int8_cache.encode(values)
    result, expected = (
        operations.attention(library, *case.tensors, **case.arguments),
        case.expected(),
    )
    error = float((result.double() - expected).norm() / expected.norm())
    assert error < TOLERANCES[library.dtype]
