"""Products of quantized matrices: those of the reference in torch, for each dtype and set of
instructions.

Rows of bytes and their sums are compared bit by bit; products within what float32, or scales in
half precision, round differently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.cpu import isa
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.cpu.quantized import MAX_FEATURES, PackedCodes, _scales, can_pack
from penstock.kernels.quantized_codes import QuantizedCodes, scale_blocks
from penstock.kernels.reference.linear_quantized import (
    linear_quantized_reference,
    quantize_rows_reference,
)

from .operations import (
    embed_quantized,
    linear_quantized,
    permute_columns,
    quantize_blocks,
    scale_columns,
)

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# One library serves all examples of a test; examples do not change it. A dozen libraries each have
# as many.
SHARED = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KINDS = ("zero", "offsets", "integers", "fractions", "float8")
FRACTIONS = torch.linspace(-1, 1, 16) ** 3


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(kind: str, out: int, size: int, *, bits: int = 4, block: int = 32) -> QuantizedCodes:
    """Of numbers around 1."""
    generator = torch.Generator().manual_seed(out + size)
    codes = torch.randint(0, 1 << bits, (out, size), generator=generator).to(torch.uint8)
    num_blocks = -(-size // block)
    scales = (torch.rand(out, num_blocks, generator=generator) + 0.5) * 2.0 ** (2 - bits)
    others: dict[str, Any] = {}
    if kind == "zero":
        others["zero"] = 1 << (bits - 1)
    if kind == "offsets":
        others["offsets"] = torch.randn(out, num_blocks, generator=generator)
    if kind == "integers":
        others["table"] = torch.arange(16.0).square() / 2 - 50
    if kind == "fractions":
        others["table"] = FRACTIONS
    if kind == "float8":
        values = torch.randn(out, size, generator=generator)
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        others["is_float8"] = True
    return QuantizedCodes(codes=codes, bits=bits, scales=scales, columns_per_scale=block, **others)


def is_possible(kind: str, bits: int, *, in_bytes: bool) -> bool:
    if kind == "float8":
        return bits == 8 and not in_bytes
    return bits == 4 or kind in ("zero", "offsets")


VARIANTS = [
    (kind, bits, in_bytes)
    for kind in KINDS
    for bits in (4, 8)
    for in_bytes in (True, False)
    if is_possible(kind, bits, in_bytes=in_bytes)
]


def pack(library: CpuLibrary, codes: QuantizedCodes, *, in_bytes: bool) -> PackedCodes:
    if in_bytes:
        codes = codes.with_byte_levels()
    return PackedCodes(library, codes, in_bytes=in_bytes)


def as_packed(codes: QuantizedCodes, packed: PackedCodes) -> QuantizedCodes:
    """With scales and offsets rounded as the kernels store them."""
    factors, scales, offsets = _scales(codes, is_half=bool(packed.arguments()["is_half"]))
    scales, offsets = (
        None if each is None else each.float() * factors[:, None] for each in (scales, offsets)
    )
    return replace(codes, scales=scales, offsets=offsets)


def magnitudes(codes: QuantizedCodes) -> Tensor:
    """Of a number and its offset: what the kernels add before they cancel."""
    offsets = None if codes.offsets is None else -codes.offsets.abs()
    size = codes.columns_per_scale
    return scale_blocks(codes.levels().abs(), codes.scales.abs(), offsets, size, codes.order)


def assert_near(
    result: Tensor, expected: Tensor, dtype: torch.dtype, *, beside: float = 0.0
) -> None:
    bound = ROUNDING[dtype] * max(1.0, expected.abs().max().item()) + beside
    assert (result.float() - expected.float()).abs().max().item() <= bound


@SHARED
@given(
    num_rows=st.integers(1, 5),
    size=st.integers(1, 700),
    block=st.sampled_from([8, 16, 32, 64, 104]),
    bits=st.sampled_from([4, 8]),
    zero=st.sampled_from([0, 8, 128]),
    exponent=st.integers(-7, 4),
    seed=st.integers(0, 99),
)
def test_rows_of_bytes(library, num_rows, size, block, bits, zero, exponent, seed):
    x = (random(num_rows, size, seed=seed) * 10.0**exponent).to(library.dtype)
    rows, scales, sums, float_sums = quantize_blocks(
        library, x, columns_per_scale=block, code_bits=bits, zero=zero
    )
    if bits == 4:  # in the order of the nibbles of a line
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        lines = rows.unflatten(1, (-1, 8))
        rows = torch.empty_like(lines).index_copy_(2, order, lines).flatten(1)
    assert (rows[:, size:] == 0).all()
    parts = zip(x.split(block, 1), rows[:, :size].split(block, 1), strict=True)
    for index, (part, found) in enumerate(parts):
        values, expected_scales = quantize_rows_reference(part)
        assert torch.equal(found, values)
        assert torch.equal(scales[:, index], expected_scales)
        total = values.sum(1, dtype=torch.int32)
        assert torch.equal(sums[:, index], -zero * total)
        assert torch.equal(float_sums[:, index], expected_scales * total)


@pytest.mark.parametrize(("kind", "bits", "in_bytes"), VARIANTS)
@settings(SHARED, max_examples=8)
@given(
    num_rows=st.integers(1, 80),
    lines=st.integers(1, 40),
    block=st.sampled_from([8, 16, 32, 64, 128, 1 << 20]),
    out=st.integers(1, 150),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_products(
    library, kind, bits, in_bytes, num_rows, lines, block, out, has_bias, has_residual
):
    dtype, size = library.dtype, lines * 8
    x = random(num_rows, size, dtype=dtype)
    bias = random(out, seed=2, dtype=dtype) if has_bias else None
    residual = random(num_rows, out, seed=3, dtype=dtype) if has_residual else None
    codes = matrix(kind, out, size, bits=bits, block=block)
    packed = pack(library, codes, in_bytes=in_bytes)
    result = linear_quantized(library, x, packed, bias=bias, residual=residual)
    if in_bytes:
        codes = codes.with_byte_levels()
    codes = as_packed(codes, packed)
    expected = linear_quantized_reference(x.float(), codes, in_bytes=in_bytes)
    expected += sum(each.float() for each in (bias, residual) if each is not None)
    # What is summed may be far larger than the sum, so float32 rounds more than its last bit.
    terms = F.linear(x.float().abs(), magnitudes(codes)).max().item()
    assert_near(result, expected, dtype, beside=1e-6 * terms)


@pytest.mark.parametrize(("kind", "bits"), [each[:2] for each in VARIANTS if each[2]])
@pytest.mark.parametrize("num_outliers", [1, 4])
def test_columns_a_hundred_times_the_rest_cost_the_others_nothing(
    library, kind, bits, num_outliers
):
    """Nor do they move what the kernels and the reference agree on."""
    codes = matrix(kind, 70, 160, bits=bits).with_byte_levels()
    x, planted = random(41, 160), torch.zeros(160)
    planted[torch.randperm(32, generator=torch.Generator().manual_seed(5))[:num_outliers] + 64] = 1
    large = torch.where(planted > 0, 100 * (x.sign() + 0.1 * x), x).to(library.dtype)
    packed = pack(library, codes, in_bytes=True)
    codes = as_packed(codes, packed)
    result = linear_quantized(library, large, packed)
    expected = linear_quantized_reference(large.float(), codes, in_bytes=True)
    terms = F.linear(large.float().abs(), magnitudes(codes)).max().item()
    assert_near(result, expected, library.dtype, beside=1e-6 * terms)
    exact = F.linear(large.double(), codes.dequantize().double())
    rest = torch.where(planted > 0, 0.0, x).to(library.dtype)
    without = linear_quantized_reference(rest.float(), codes, in_bytes=True).double()
    usual = (without - F.linear(rest.double(), codes.dequantize().double())).norm()
    assert (expected.double() - exact).norm() < 1.5 * usual


@pytest.mark.parametrize(("kind", "bits", "in_bytes"), VARIANTS)
def test_products_are_those_of_the_numbers(library, kind, bits, in_bytes):
    """As they are within rounding; with rows in bytes, about a hundredth beside it."""
    codes = matrix(kind, 96, 896, bits=bits, block=64)
    x = random(64, 896, dtype=library.dtype)
    exact = F.linear(x.double(), codes.dequantize().double())
    result = linear_quantized(library, x, pack(library, codes, in_bytes=in_bytes)).double()
    error = ((result - exact).norm() / exact.norm()).item()
    bound = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[library.dtype]
    if in_bytes:
        assert 0.002 < error < 0.02
    else:
        assert error < bound


@pytest.mark.parametrize(("kind", "bits", "in_bytes"), VARIANTS)
def test_a_table_of_rows(library, kind, bits, in_bytes):
    codes = matrix(kind, 150, 104, bits=bits, block=32)
    token_ids = torch.tensor([0, 149, 7, 48, 47, 7])
    packed = pack(library, codes, in_bytes=in_bytes)
    expected = (codes.with_byte_levels() if in_bytes else codes).rows(token_ids)
    assert_near(embed_quantized(library, token_ids, packed), expected, library.dtype)


@pytest.mark.parametrize("in_bytes", [True, False])
@pytest.mark.parametrize(("block", "size"), [(32, 96), (64, 320), (1 << 20, 576)])
def test_a_row_does_not_depend_on_its_neighbours(library, in_bytes, block, size):
    """Nor on how many they are: few and many are multiplied by other instructions."""
    for kind, bits, is_in_bytes in VARIANTS:
        if is_in_bytes != in_bytes:
            continue
        codes = matrix(kind, 200, size, bits=bits, block=block)
        packed = pack(library, codes, in_bytes=in_bytes)
        x, bias = (random(*shape, dtype=library.dtype) for shape in ((75, size), (200,)))
        x[::9, 7] *= 100  # outliers
        together = linear_quantized(library, x, packed, bias=bias)
        for num in (1, 3, 9, 17):
            parts = [linear_quantized(library, part, packed, bias=bias) for part in x.split(num)]
            assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_at_the_limit_of_32_bits(library, bits):
    """All bytes at their largest, of one sign and of both: no step of the sum saturates."""
    ones = torch.ones(1, MAX_FEATURES, dtype=library.dtype)
    halves = torch.ones(1, MAX_FEATURES, dtype=library.dtype)
    halves[:, 1::2] = -1.0
    codes = torch.zeros(3, MAX_FEATURES, dtype=torch.uint8)
    codes[1] = codes[2, ::2] = (1 << bits) - 1
    codes = QuantizedCodes(
        codes=codes, bits=bits, scales=torch.full((3, 1), 1e-6), columns_per_scale=MAX_FEATURES,
        zero=1 << (bits - 1),
    )  # fmt: skip
    for x in (ones, -ones, halves):
        expected = linear_quantized_reference(x, codes, in_bytes=True)
        packed = pack(library, codes, in_bytes=True)
        assert_near(linear_quantized(library, x, packed), expected, library.dtype)


def test_more_features_are_refused(library):
    codes = matrix("zero", 1, MAX_FEATURES + 8)
    with pytest.raises(AssertionError, match="32 bits"):
        PackedCodes(library, codes, in_bytes=True)


def test_blocks_that_end_within_a_line_are_refused(library):
    assert can_pack(matrix("zero", 2, 95, block=96), in_bytes=True)
    assert not can_pack(matrix("zero", 2, 95, block=96), in_bytes=False)
    assert not can_pack(matrix("zero", 2, 96, block=12), in_bytes=True)
    assert can_pack(matrix("zero", 2, 96, block=12, bits=8), in_bytes=True)
    with pytest.raises(AssertionError, match="within a line"):
        PackedCodes(library, matrix("zero", 2, 96, block=12), in_bytes=True)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_and_column(library, poison):
    x, codes = random(6, 64, dtype=library.dtype), matrix("zero", 6, 64)
    packed = pack(library, codes, in_bytes=True)
    clean = linear_quantized(library, x, packed)
    x[4, 33] = poison
    codes = replace(codes, scales=codes.scales.clone())
    codes.scales[2, 1] = poison
    result = linear_quantized(library, x, pack(library, codes, in_bytes=True))
    touched = torch.zeros(6, 6, dtype=torch.bool)
    touched[4], touched[:, 2] = True, True
    assert not result[touched].isfinite().any()
    assert torch.equal(result[~touched], clean[~touched])


@pytest.mark.parametrize("in_bytes", [True, False])
def test_zeros_and_numbers_too_small_to_scale(library, in_bytes):
    x = torch.zeros(2, 24, dtype=library.dtype)
    x[1] = torch.finfo(torch.float32).tiny  # zero in float16
    codes = matrix("zero", 17, 24)
    packed = pack(library, codes, in_bytes=in_bytes)
    assert (linear_quantized(library, x, packed).abs().float() < 1e-35).all()
    empty = pack(library, replace(codes, scales=codes.scales * 0), in_bytes=in_bytes)
    x = random(3, 24, dtype=library.dtype)
    assert (linear_quantized(library, x, empty) == 0).all()


def test_scales_far_from_one(library):
    """Half precision has no room for them; a factor for each column has."""
    for exponent in (-30, -12, 20):
        codes = matrix("offsets", 33, 64)
        factor = 2.0**exponent
        scaled = replace(codes, scales=codes.scales * factor, offsets=codes.offsets * factor)
        x = (random(4, 64) / factor).to(library.dtype)
        if library.dtype == torch.float16 and exponent != -12:
            continue  # x itself has no room
        result = linear_quantized(library, x, pack(library, scaled, in_bytes=False))
        assert_near(result, F.linear(x.float(), scaled.dequantize()), library.dtype)


def test_the_order_of_columns(library):
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    x = random(3, 40, dtype=library.dtype)
    assert torch.equal(permute_columns(library, x, indices), x[:, indices])


def test_factors_of_columns(library):
    factors = torch.exp2(torch.randint(-9, 1, (41,), generator=torch.Generator().manual_seed(0)))
    x = random(3, 41, dtype=library.dtype)
    assert torch.equal(scale_columns(library, x, factors), x * factors.to(library.dtype))


@pytest.mark.exhaustive
def test_a_cpu_with_avx512_and_no_vnni(monkeypatch):
    features = isa._cpu_features() - {"avx512_vnni"}
    monkeypatch.setattr(isa, "_cpu_features", lambda: features)
    library = load_library(torch.float32)
    assert library is not None
    x, codes = random(9, 72), matrix("zero", 71, 72, bits=8)
    expected = linear_quantized_reference(x, codes, in_bytes=True)
    result = linear_quantized(library, x, pack(library, codes, in_bytes=True))
    assert_near(result, expected, torch.float32)
