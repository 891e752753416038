"""Checks every kernel before anything is timed: a fast wrong answer is worth nothing.

Each runs on new random numbers of odd shapes, with NaN in all unwritten memory, and is compared
with the same in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, product

import torch
from torch import Tensor

from penstock.kernels.activation_reference import activate_and_mul_reference, activate_reference
from penstock.kernels.copy_blocks_reference import copy_blocks_reference
from penstock.kernels.draw_uniforms_reference import draw_uniforms_reference
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.layer_norm_reference import layer_norm_reference
from penstock.kernels.linear_reference import linear_reference
from penstock.kernels.move_blocks_reference import gather_blocks_reference, scatter_blocks_reference
from penstock.kernels.rms_norm_reference import add_rms_norm_reference, rms_norm_reference
from penstock.kernels.rotary_store_kv_reference import rotary_store_kv_reference
from penstock.kernels.sampling_reference import sample_tokens_reference
from penstock.kernels.token_logprobs_reference import token_logprobs_reference
from penstock.load.gpu.bench import AttentionSizes, Bench, Check
from penstock.load.gpu.inputs import (
    QUANTIZED,
    PagedKV,
    attend,
    attention_inputs,
    bound_of,
    contiguous,
    multiply,
    num_wrong_bytes,
    poison_unowned,
    poisoned,
    quantized_matrix,
    worst_row,
)

_MAX_CHUNK = 200  # new tokens of a sequence: the rest was computed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of attention. `is_contiguous`: sequences lie in neighbouring blocks, and no table
    is read."""

    name: str
    sizes: AttentionSizes
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False  # each head has a logit that no position stands for
    is_fp8: bool = False
    is_contiguous: bool = False
    split_len: int | None = None  # the length of the splits of decodes; None: the kernel's choice
    is_invariant: bool = False  # nothing is split, and every token goes the same way


def attention_checks(bench: Bench) -> Iterator[Check]:
    """Every case for decodes, whole prompts, and chunks beside decodes."""
    seq_lens = bench.sizes.check_lens
    chunks = [min(length, _MAX_CHUNK - index) for index, length in enumerate(seq_lens)]
    for case in _attention_cases(bench.sizes.attention):
        for kind, query_lens in (
            ("decode", [1] * len(seq_lens)),
            ("prefill", list(seq_lens)),
            ("mixed", [1 if index % 2 else chunk for index, chunk in enumerate(chunks)]),
        ):
            error = _attention_error(bench, case, list(seq_lens), query_lens)
            yield f"{kind} attention, {case.name}", error, bound_of(bench.sizes.dtype)


def _attention_cases(measured: AttentionSizes) -> list[Case]:
    odd = replace(measured, num_heads=6, num_kv_heads=2, head_dim=80, block_size=8)
    single = replace(measured, num_heads=5, num_kv_heads=5, head_dim=64, block_size=32)
    return [
        Case(name="as measured", sizes=measured),
        Case(name="contiguous", sizes=measured, is_contiguous=True),
        Case(name="fixed splits", sizes=measured, split_len=32),
        Case(name="invariant", sizes=measured, is_invariant=True),
        Case(name="FP8", sizes=measured, is_fp8=True),
        Case(name="odd heads, window", sizes=odd, window=19),
        Case(name="soft cap, sinks", sizes=single, soft_cap=3.0, has_sinks=True),
    ]


def _attention_error(bench: Bench, case: Case, seq_lens: list[int], query_lens: list[int]) -> float:
    sizes = case.sizes
    query, kv = attention_inputs(bench, sizes, seq_lens, query_lens, is_fp8=case.is_fp8)
    kv = contiguous(kv) if case.is_contiguous else kv
    poison_unowned(kv)
    sinks = bench.random(sizes.num_heads) if case.has_sinks else None
    names = ("window", "soft_cap", "split_len", "is_invariant", "is_contiguous")
    options = {name: getattr(case, name) for name in names}
    result = poisoned(lambda: attend(query, kv, sinks=sinks, **options))
    starts = kv.layout.query_start_loc.tolist()
    exact = [
        _exact(query[start:stop].double(), *_keys_and_values(kv, seq, seq_len), case, sinks)
        for seq, (seq_len, (start, stop)) in enumerate(zip(seq_lens, pairwise(starts), strict=True))
    ]
    return worst_row(result, torch.cat(exact))


def _exact(query: Tensor, keys: Tensor, values: Tensor, case: Case, sinks: Tensor | None) -> Tensor:
    """One sequence in float64. query [query_len, num_heads, head_dim], of the last positions;
    keys and values [seq_len, num_kv_heads, head_dim]; sinks [num_heads]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    if case.soft_cap is not None:
        scores = case.soft_cap * (scores / case.soft_cap).tanh()
    positions = torch.arange(len(keys), device=query.device)
    distances = positions[-len(query) :, None] - positions  # [query_len, seq_len]
    is_visible = (distances >= 0) & (distances < (case.window or len(keys)))
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], 2)
    weights = scores.softmax(2)[:, :, : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def _keys_and_values(kv: PagedKV, seq: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one sequence: float64 [seq_len, num_kv_heads, head_dim]."""
    blocks = kv.layout.block_tables[seq].long()

    def numbers(cache: Tensor, scale: Tensor | None) -> Tensor:
        found = cache[blocks].double().flatten(0, 1)[:seq_len]
        return found if scale is None else found * scale.double()[:, None]

    return numbers(kv.key_cache, kv.key_scale), numbers(kv.value_cache, kv.value_scale)


_EPS = 1e-5
_NUM_ROUNDINGS = 100  # of float32 in a sum over a vocabulary, and then some
_NUM_ROWS, _SIZE, _NUM_OUTPUTS = 7, 1000, 200
_HEADS, _KV_HEADS, _HEAD_DIM = 6, 2, 80
_NUM_BLOCKS, _BLOCK_SIZE = 3, 8
_VOCAB_SIZE = 5003


def operation_checks(bench: Bench) -> Iterator[Check]:
    yield from _rows(bench)
    yield from _quantized_products(bench)
    yield from _stores(bench)
    yield from _moves(bench)
    yield from _sampling(bench)


def _rows(bench: Bench) -> Iterator[Check]:
    x, residual = bench.random(_NUM_ROWS, _SIZE), bench.random(_NUM_ROWS, _SIZE)
    weight, bound = bench.random(_SIZE), bound_of(bench.sizes.dtype)
    normed = poisoned(lambda: gpu_operation("rms_norm")(x, weight, _EPS))
    exact = rms_norm_reference(x.double(), weight.double(), _EPS)
    yield "rms_norm", worst_row(normed, exact), bound
    add_norm = gpu_operation("add_rms_norm", "rms_norm")
    normed, total = poisoned(lambda: add_norm(x, residual, weight, _EPS))
    exact, exact_total = add_rms_norm_reference(
        x.double(), residual.double(), weight.double(), _EPS
    )
    yield "add_rms_norm", worst_row(normed, exact), bound
    yield "add_rms_norm, the sum", worst_row(total, exact_total), bound
    weights, biases = bench.random(_NUM_OUTPUTS, _SIZE), bench.random(_NUM_OUTPUTS)
    product = poisoned(lambda: gpu_operation("linear")(x, weights, biases))
    exact = linear_reference(x.double(), weights.double(), biases.double())
    yield "linear", worst_row(product, exact), bound
    alone = gpu_operation("linear")(x[-1:], weights, biases)
    yield "linear, a row alone, bytes", num_wrong_bytes(alone, product[-1:]), 0.0
    bias = bench.random(_SIZE)
    normed = poisoned(lambda: gpu_operation("layer_norm")(x, weight, bias, _EPS))
    exact = layer_norm_reference(x.double(), weight.double(), bias.double(), _EPS)
    yield "layer_norm", worst_row(normed, exact), bound
    gated_kernel = gpu_operation("activate_and_mul", "activation")
    plain_kernel = gpu_operation("activate", "activation")
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        gated = poisoned(lambda kind=kind: gated_kernel(x, kind))  # type: ignore[misc]
        exact = activate_and_mul_reference(x.double(), kind)
        yield f"activate_and_mul, {kind}", worst_row(gated, exact), bound
        active = poisoned(lambda kind=kind: plain_kernel(x, kind))  # type: ignore[misc]
        yield f"activate, {kind}", worst_row(active, activate_reference(x.double(), kind)), bound


def _stores(bench: Bench) -> Iterator[Check]:
    """Into caches of NaN, which must stay where nothing is stored."""
    slots = bench.permutation(_NUM_BLOCKS * _BLOCK_SIZE)[:_NUM_ROWS]
    key = bench.random(_NUM_ROWS, _KV_HEADS, _HEAD_DIM)
    qkv = bench.random(_NUM_ROWS, _HEADS + 2 * _KV_HEADS, _HEAD_DIM)
    angles = bench.random(_NUM_ROWS, 1, _HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    keys, values = _nan_caches(key, 2)
    exact_keys, exact_values = _nan_caches(key.double(), 2)
    turn = gpu_operation("rotary_store_kv")
    query = poisoned(lambda: turn(qkv, (cos, sin), keys, values, slots))
    exact = rotary_store_kv_reference(
        qkv.double(), (cos.double(), sin.double()), exact_keys, exact_values, slots
    )
    bound = bound_of(bench.sizes.dtype)
    yield "rotary_store_kv, queries", worst_row(query, exact), bound
    for name, cache, exact_cache in (("keys", keys, exact_keys), ("values", values, exact_values)):
        stored, exact_stored = cache.flatten(0, 1)[slots], exact_cache.flatten(0, 1)[slots]
        yield f"rotary_store_kv, {name}", worst_row(stored, exact_stored), bound
        unwritten = cache.isnan() != exact_cache.isnan()
        yield f"rotary_store_kv, {name} beside its slots", float(unwritten.sum()), 0.0


def _moves(bench: Bench) -> Iterator[Check]:
    """With blocks of NaN, and a chain: blocks are copied before they are overwritten."""
    plane = (_BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
    pool = bench.random(3, 2, 5, *plane)
    pool[:, :, 1] = torch.nan
    ids = torch.tensor([4, 1, 2], device=bench.device)
    staging, expected = (pool.new_full((3, 3, 2, *plane), torch.inf) for _ in range(2))
    gpu_operation("gather_blocks", "move_blocks")(pool, ids, staging)
    gather_blocks_reference(pool, ids, expected)
    yield "gather_blocks, bytes", num_wrong_bytes(staging, expected), 0.0
    moved, expected = bench.random(3, 3, 2, *plane), pool.clone()
    gpu_operation("scatter_blocks", "move_blocks")(moved, ids, pool)
    scatter_blocks_reference(moved, ids, expected)
    yield "scatter_blocks, bytes", num_wrong_bytes(pool, expected), 0.0
    copies = ((0, 3), (3, 2), (4, 1))
    gpu_operation("copy_blocks")(pool, copies)
    copy_blocks_reference(expected, copies)
    yield "copy_blocks, bytes", num_wrong_bytes(pool, expected), 0.0


def _sampling(bench: Bench) -> Iterator[Check]:
    """Rows with and without each truncation, and greedy ones: exactly the same tokens."""
    rows = torch.arange(16, device=bench.device)

    def where(bit: int, value: float, otherwise: float) -> Tensor:
        return torch.where(rows // bit % 2 == 1, value, otherwise).double()

    draws = torch.stack([rows - 8, rows, 1 << rows])
    uniforms = poisoned(lambda: gpu_operation("draw_uniforms")(draws))
    exact_uniforms = draw_uniforms_reference(draws)
    yield "draw_uniforms, bytes", num_wrong_bytes(uniforms, exact_uniforms), 0.0

    logits = 3 * bench.random(len(rows), _VOCAB_SIZE)
    parameters = (
        where(1, 0.7, 1.0) * (rows > 1),  # temperature; 0 is greedy
        where(2, 50.0, 0.0),  # top_k
        where(4, 0.9, 1.0),  # top_p
        where(8, 0.02, 0.0),  # min_p
        exact_uniforms,
    )
    run = gpu_operation("sample_tokens", "sampling")
    token_ids, is_valid = poisoned(lambda: run(logits, *parameters))
    exact, exact_valid = sample_tokens_reference(logits, *parameters)
    yield "sample_tokens, rows", _num_unlike((token_ids, exact), (is_valid, exact_valid)), 0.0

    describe = gpu_operation("token_logprobs")
    logprobs, ranks, top_logprobs, top_ids = poisoned(lambda: describe(logits, exact, 5))
    _, exact_ranks, _, _ = token_logprobs_reference(logits, exact, 5)
    wide = logits.double().log_softmax(1)
    yield "token_logprobs, ranks", _num_unlike((ranks, exact_ranks)), 0.0
    for name, found, ids in (("token", logprobs[:, None], exact[:, None]),
                             ("top", top_logprobs, top_ids)):  # fmt: skip
        error = worst_row(found, wide.gather(1, ids))
        yield f"token_logprobs, {name}", error, bound_of(torch.float32) * _NUM_ROUNDINGS


# Of a product of rounded inputs. The interpreter does not round to FP8 as a GPU does.
_ROUNDED_ERROR = {"int4": 0.0, "int8": 0.02, "fp8": 0.05}


def _quantized_products(bench: Bench) -> Iterator[Check]:
    """With few and many rows; and lookups."""
    embed = gpu_operation("embed_quantized", "linear_quantized")
    is_interpreted = bench.device.type == "cpu"
    for kind in QUANTIZED:
        rounded_error = _ROUNDED_ERROR[kind] * (4 if is_interpreted and kind == "fp8" else 1)
        # Multiples of 16, so that torch's products of bytes take part.
        matrix = quantized_matrix(bench, kind, _NUM_OUTPUTS + 8, _SIZE + 24)
        numbers = matrix.dequantize().double()
        for num_rows, in_bytes in product((_NUM_ROWS, 11 * _NUM_ROWS), (False, True)):
            x = bench.random(num_rows, matrix.in_features)
            found = poisoned(partial(multiply, x, matrix, in_bytes=in_bytes))
            name = f"linear, {kind}{', rounded inputs' * in_bytes}, {num_rows} rows"
            bound = bound_of(bench.sizes.dtype) + in_bytes * rounded_error
            yield name, worst_row(found, x.double() @ numbers.T), bound
        rows = torch.arange(matrix.out_features, device=bench.device).flip(0)
        found = poisoned(partial(embed, rows, matrix, bench.sizes.dtype))
        yield f"embedding, {kind}", worst_row(found, numbers[rows]), bound_of(bench.sizes.dtype)


def _nan_caches(like: Tensor, count: int) -> list[Tensor]:
    shape = (_NUM_BLOCKS, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM)
    return [like.new_full(shape, torch.nan) for _ in range(count)]


def _num_unlike(*pairs: tuple[Tensor, Tensor]) -> float:
    """Rows in which any result is wrong."""
    unlike = [result != exact for result, exact in pairs]
    return float(torch.stack(unlike).any(0).sum())


def run(bench: Bench) -> bool:
    """Whether all kernels are right; each check is in the results."""
    print("checks", flush=True)
    is_right = True
    for name, error, bound in chain(operation_checks(bench), attention_checks(bench)):
        is_right &= bench.results.add_check(name, error=error, bound=bound)
    return is_right
