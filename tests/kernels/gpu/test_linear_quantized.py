"""Products with quantized weights, and lookups, against the reference and the dequantized numbers;
and that a row's bits depend on nothing else where they must not."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import tiered
from torch import Tensor

from penstock.kernels.gpu.linear_quantized import (
    embed_quantized_triton,
    levels_config,
    linear_quantized_triton,
    quantize_rows_triton,
    row_class,
    takes_bytes,
)
from penstock.kernels.gpu.quantized import FLOAT8, GpuCodes, pack_codes
from penstock.kernels.quantized_codes import QuantizedCodes
from penstock.kernels.reference.linear_quantized import (
    linear_quantized_reference,
    quantize_rows_reference,
)

from .tensors import DTYPES, normal, poisoned_memory

KINDS = {
    "zero": (4, 8),
    "own zero": (4, 8),
    "offsets": (4, 8),
    "table": (4,),
    "float8": (8,),
    "half scales": (4, 8),
    "order": (4, 8),
}
VARIANTS = [(kind, bits) for kind, all_bits in KINDS.items() for bits in all_bits]
BLOCKS = [12, 16, 32, 64, 100, 128, 1 << 20]


def matrix(kind: str, out: int, size: int, *, bits: int, block: int, device: str) -> QuantizedCodes:
    """Of numbers around 1."""
    generator = torch.Generator().manual_seed(out + size)
    codes = torch.randint(0, 1 << bits, (out, size), generator=generator).to(torch.uint8)
    num_blocks = -(-size // block)
    scales = (torch.rand(out, num_blocks, generator=generator) + 0.5) * 2.0 ** (2 - bits)
    others: dict[str, Any] = {"zero": 1 << (bits - 1)}
    if kind == "own zero":
        others["zero"] = 5
    if kind == "offsets":
        others = {"offsets": torch.randn(out, num_blocks, generator=generator)}
    if kind == "table":
        others = {"table": torch.linspace(-1, 1, 16) ** 3}
    if kind == "float8":
        codes = torch.randn(out, size, generator=generator).to(FLOAT8).view(torch.uint8)
        others = {"is_float8": True}
    if kind == "half scales":
        scales = scales.half().float()
    if kind == "order":
        others["order"] = torch.randperm(size, generator=generator)
    made = QuantizedCodes(codes=codes, bits=bits, scales=scales, columns_per_scale=block, **others)
    names = ("codes", "scales", "offsets", "table", "order")
    tensors = {name: getattr(made, name) for name in names}
    return replace(made, **{k: each.to(device) for k, each in tensors.items() if each is not None})


def pack(codes: QuantizedCodes, dtype: torch.dtype) -> GpuCodes:
    return pack_codes(codes, codes.scales.new_empty(0, dtype=dtype))


def assert_near(result: Tensor, exact: Tensor, dtype: torch.dtype, size: int) -> None:
    """Within two roundings of numbers of the weights' size to the dtype."""
    assert result.dtype == dtype
    assert result.shape == exact.shape
    bound = 2 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item()) + 1e-5 * size**0.5
    assert (result.double() - exact.double()).abs().max().item() <= bound


@pytest.mark.parametrize(("kind", "bits"), tiered(VARIANTS, VARIANTS[::2]))
@settings(max_examples=6, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    size=st.sampled_from([1, 37, 64, 100, 192, 260]),
    out=st.sampled_from([1, 33, 64, 131]),
    block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    in_bytes=st.booleans(),
    is_invariant=st.booleans(),
)
def test_products(
    device, kind, bits, num_rows, size, out, block, dtype, has_bias, in_bytes, is_invariant
):
    codes = matrix(kind, out, size, bits=bits, block=block, device=device)
    packed = replace(pack(codes, dtype), has_library=False)
    x = normal(num_rows, size, seed=size, dtype=dtype, device=device)
    bias = normal(out, seed=2, dtype=dtype, device=device) if has_bias else None
    with poisoned_memory():
        result = linear_quantized_triton(
            x, packed, bias, in_bytes=in_bytes, is_invariant=is_invariant
        )
    rounds = in_bytes and takes_bytes(packed)
    expected = linear_quantized_reference(x.float(), codes, None, in_bytes=rounds)
    if not rounds:
        exact = x.double() @ codes.dequantize().double().T
        torch.testing.assert_close(expected.double(), exact, rtol=1e-4, atol=1e-4)
    assert_near(result, expected if bias is None else expected + bias.float(), dtype, size)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("kind", "bits"), VARIANTS)
def test_packing_loses_nothing(device, kind, bits, block):
    codes = matrix(kind, 33, 260, bits=bits, block=block, device=device)
    packed = pack(codes, torch.float16)
    torch.testing.assert_close(packed.dequantize(), codes.dequantize(), rtol=1e-6, atol=1e-6)
    num_blocks = codes.scales.shape[1]
    is_narrow = kind == "half scales" and num_blocks > 1
    assert (packed.scales.dtype == torch.float16) == is_narrow
    padded = 384 // 2 if bits == 4 else 260
    scale_bytes = (2 if is_narrow else 4) * 33 * num_blocks * (1 + (packed.offsets is not None))
    assert packed.nbytes == 33 * padded + scale_bytes + (64 if kind == "table" else 0) + (
        8 * 260 if kind == "order" else 0
    )


@pytest.mark.parametrize(("kind", "bits"), VARIANTS)
@pytest.mark.parametrize(("size", "block"), [(37, 12), (130, 32), (600, 1 << 20)])
def test_lookups(device, kind, bits, size, block):
    codes = matrix(kind, 50, size, bits=bits, block=block, device=device)
    token_ids = torch.tensor([0, 49, 7, 48, 7], device=device)
    for dtype in DTYPES:
        with poisoned_memory():
            result = embed_quantized_triton(token_ids, pack(codes, dtype), dtype)
        assert_near(result, codes.rows(token_ids), dtype, 1)
    assert embed_quantized_triton(token_ids[:0], pack(codes, dtype), dtype).shape == (0, size)


@pytest.mark.parametrize(
    ("kind", "bits", "in_bytes"),
    tiered(
        # In bytes, or not, in turns.
        [(*variant, in_bytes) for variant, in_bytes in zip(VARIANTS, cycle((False, True)))],
        [("zero", 8, True), ("offsets", 4, False)],
    ),
)
@pytest.mark.exhaustive
def test_a_row_does_not_depend_on_its_batch(device, kind, bits, in_bytes):
    dtype = torch.float16
    codes = matrix(kind, 72, 200, bits=bits, block=64, device=device)
    packed = pack(codes, dtype)
    num_rows = 2 * levels_config(dtype, "some")["BLOCK_M"] + 3
    x = normal(num_rows, 200, seed=0, dtype=dtype, device=device)

    def product(rows: Tensor) -> Tensor:
        return linear_quantized_triton(rows, packed, in_bytes=in_bytes, is_invariant=True)

    together = product(x)
    for count in (1, 2, 17, num_rows - 1):
        assert torch.equal(product(x[-count:]), together[-count:])
    x[3] = torch.nan
    broken = product(x)
    assert broken[3].isnan().all()
    others = torch.arange(num_rows, device=device) != 3
    assert torch.equal(broken[others], together[others])


@pytest.mark.parametrize("block", [8, 12, 32, 100, 200])
@pytest.mark.parametrize("exponent", [-7, 0, 4])
def test_rows_of_bytes(device, exponent, block):
    """Those of the reference, to the bit."""
    x = normal(6, 200, seed=1, dtype=torch.float32, device=device) * 10.0**exponent
    x[1], x[2, 3], x[3, 4], x[4] = 0, torch.nan, -torch.inf, 1e-40
    with np.errstate(all="ignore"):  # of numpy, which interprets
        values, scales = quantize_rows_triton(x, block)
    for index, (part, found) in enumerate(
        zip(x.split(block, 1), values.split(block, 1), strict=True)
    ):
        expected, expected_scales = quantize_rows_reference(part)
        assert torch.equal(found, expected)
        torch.testing.assert_close(
            scales[:, index], expected_scales, rtol=1e-6, atol=1e-38, equal_nan=True
        )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("in_bytes", [False, True])
def test_what_is_not_finite_stays_so_in_its_row_and_column(device, in_bytes, bits):
    codes = matrix("zero", 6, 200, bits=bits, block=64, device=device)
    x = normal(6, 200, seed=0, dtype=torch.float32, device=device)
    clean = linear_quantized_triton(x, pack(codes, x.dtype), in_bytes=in_bytes)
    x[4, 33] = torch.inf
    codes.scales[2, 3] = torch.nan
    with np.errstate(all="ignore"):
        result = linear_quantized_triton(x, pack(codes, x.dtype), in_bytes=in_bytes)
    touched = torch.zeros(6, 6, dtype=torch.bool, device=device)
    touched[4], touched[:, 2] = True, True
    assert not result[touched].isfinite().any()
    assert torch.equal(result[~touched], clean[~touched])


def test_every_float8_number(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    made = QuantizedCodes(
        codes=codes, bits=8, scales=torch.ones(256, 1, device=device), columns_per_scale=1,
        is_float8=True,
    )  # fmt: skip
    x = torch.ones(1, 1, device=device)
    result = linear_quantized_triton(x, pack(made, x.dtype), in_bytes=False)
    exact = codes.view(FLOAT8).float().T
    torch.testing.assert_close(result, exact, rtol=0, atol=0, equal_nan=True)


def test_the_sums_of_bytes_by_torch_are_the_same(device):
    """Where it takes them; a version or a card that refuses leaves them to Triton."""
    codes = matrix("zero", 48, 208, bits=8, block=1 << 20, device=device)
    packed = pack(codes, torch.float16)
    for out, size in ((47, 208), (48, 207)):
        odd = matrix("zero", out, size, bits=8, block=1 << 20, device=device)
        assert not pack(odd, torch.float16).has_library
    x = normal(40, 208, seed=0, dtype=torch.float16, device=device)
    bias = normal(48, seed=1, dtype=torch.float16, device=device)
    found = linear_quantized_triton(x, packed, bias, in_bytes=True)
    by_triton = linear_quantized_triton(x, replace(packed, has_library=False), bias, in_bytes=True)
    torch.testing.assert_close(found, by_triton, rtol=1e-3, atol=1e-3)
    assert packed.has_library


def test_the_product_of_float8_rows_by_torch(device):
    """The rows rounded to E4M3 by a scale each, and their product in float32."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    codes = matrix("float8", 512, 256, bits=8, block=1 << 20, device=device)
    packed = pack(codes, dtype)
    if device == "cuda":
        assert packed.has_library == (torch.cuda.get_device_capability() >= (8, 9))
    x = normal(40, 256, seed=0, dtype=dtype, device=device)
    values, scales = quantize_rows_triton(x, 256, dtype=FLOAT8)
    rounded = values.double() * scales.double()
    error = (rounded - x.double()).norm() / x.double().norm()
    assert 0.01 < error < (0.04 if device == "cuda" else 0.08)  # the interpreter truncates
    largest = x.float().abs().amax(1, keepdim=True) / torch.finfo(FLOAT8).max
    difference = (values.float() - (x.float() / largest).to(FLOAT8).float()).abs()
    assert device == "cpu" or (difference > 0).float().mean() < 0.01  # ties, by a scale's last bit
    exact = (rounded if packed.has_library else x.double()) @ codes.dequantize().double().T
    result = linear_quantized_triton(x, packed, in_bytes=True)
    assert ((result.double() - exact).norm() / exact.norm()).item() < 0.005


@pytest.mark.parametrize("name", ["_int_mm", "_scaled_mm"])
@pytest.mark.parametrize("error", [RuntimeError, AttributeError, NotImplementedError])
def test_a_product_that_torch_refuses(device, name, error, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> Tensor:
        raise error("not on this card")

    monkeypatch.setattr(torch, name, refuse)
    kind = "zero" if name == "_int_mm" else "float8"
    codes = matrix(kind, 48, 208, bits=8, block=1 << 20, device=device)
    packed = pack(codes, torch.float16)
    assert not packed.has_library
    x = normal(40, 208, seed=0, dtype=torch.float16, device=device)
    expected = linear_quantized_reference(x, codes, in_bytes=kind == "zero")
    result = linear_quantized_triton(x, packed, in_bytes=True)
    assert_near(result, expected, torch.float16, 208)


def test_no_rows(device):
    packed = pack(matrix("zero", 5, 40, bits=4, block=8, device=device), torch.float32)
    x = torch.zeros(0, 40, device=device)
    assert linear_quantized_triton(x, packed, in_bytes=True).shape == (0, 5)
    assert [row_class(count) for count in (1, 16, 17, 64, 65)] == [
        "few", "few", "some", "some", "many"
    ]  # fmt: skip


# -- on a card --------------------------------------------------------------------------------

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def gpu(*marks: Any) -> Any:
    def mark(test: Any) -> Any:
        for each in (*on_gpu, *marks):
            test = each(test)
        return test

    return mark


@gpu(
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("num_rows", [1, 16, 31, 257, 2048]),
    pytest.mark.parametrize(("kind", "bits", "block"), [
        ("zero", 4, 128), ("offsets", 4, 64), ("table", 4, 16), ("order", 4, 32),
        ("zero", 8, 128), ("zero", 8, 1 << 20), ("offsets", 8, 32), ("float8", 8, 1 << 20),
    ]),
)  # fmt: skip
def test_the_sizes_of_real_models(num_rows, dtype, kind, bits, block):
    codes = matrix(kind, 6144, 4096, bits=bits, block=block, device="cuda")
    packed = pack(codes, dtype)
    x = normal(num_rows, 4096, seed=3, dtype=dtype, device="cuda")
    exact = x.double() @ codes.dequantize().double().T
    for in_bytes in (False, True):
        result = linear_quantized_triton(x, packed, in_bytes=in_bytes).double()
        error = ((result - exact).norm() / exact.norm()).item()
        is_float8 = in_bytes and packed.is_float8 and packed.has_library
        is_rounded = in_bytes and takes_bytes(packed)
        most = 0.05 if is_float8 else 0.02 if is_rounded else 2 * torch.finfo(dtype).eps
        assert error < most + 1e-5
        alone, together = (
            linear_quantized_triton(each, packed, in_bytes=in_bytes, is_invariant=True)
            for each in (x[-1:], x)
        )
        assert torch.equal(alone, together[-1:])


@gpu(
    pytest.mark.parametrize("num_rows", [1, 24, 300]),
    pytest.mark.parametrize(("kind", "bits", "block"), [
        ("order", 4, 128), ("zero", 8, 128), ("zero", 8, 1 << 20), ("float8", 8, 1 << 20),
    ]),
)  # fmt: skip
def test_a_captured_graph_gives_the_same(kind, bits, block, num_rows):
    """With other rows than it was captured with; nothing waits for the device."""
    dtype = torch.bfloat16
    packed = pack(matrix(kind, 1024, 512, bits=bits, block=block, device="cuda"), dtype)
    token_ids = torch.arange(num_rows, device="cuda")
    x = normal(num_rows, 512, seed=0, dtype=dtype, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        embedded = embed_quantized_triton(token_ids, packed, dtype)
        return linear_quantized_triton(x, packed, in_bytes=True), embedded

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(normal(num_rows, 512, seed=1, dtype=dtype, device="cuda"))
    token_ids.copy_(token_ids.flip(0))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)
