"""Drawing a token from each row of logits, in Triton: a program computes one row.

Truncation keeps the tokens from some logit upwards, so it only has to find a threshold. The tokens
that may reach it, usually few, are collected first, in a list per lane. The threshold is then found
among them by bisection in the order of floats; nothing is sorted. The draw inverts the cumulative
sum in vocabulary order: the sums of a few spans determine in which span it ends, and that one is
scanned. Weights are float32, every sum of them is float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.tuning import Config, tuned
from penstock.kernels.token_masks import TokenMasks

_MIN_TEMPERATURE = tl.constexpr(1e-30)  # smaller ones would vanish in float32
_MINUS_INFINITY = tl.constexpr(-0x7F800000)  # its place in the order of floats
# Low bits that are the same in all float32 values converted from the dtype.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def sample_tokens_kernel(
    token_ids_ptr,  # int64 [num_rows]
    is_valid_ptr,  # uint8 [num_rows]
    logits_ptr,  # [num_rows, size]
    lists_ptr,  # of the dtype of the logits: [num_rows, DEPTH, BLOCK]
    temperature_ptr,  # float64 [num_rows], as are the others
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    masked_ptr,  # [num_rows, size], where rows with a mask are copied; or null
    masks_ptr,  # int32 [num_masks, num_words]
    mask_indices_ptr,  # int64 [num_rows]
    num_words,
    size,
    SHIFT: tl.constexpr,  # unused bits of the logits
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,  # of the lists; if they overflow, the row itself is searched
    WAYS: tl.constexpr,  # pivots of a round of bisection
    NUM_SPANS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    if HAS_MASKS:
        mask = tl.load(mask_indices_ptr + row)
        if mask >= 0:
            masked_ptr += row * size
            _mask_row(masked_ptr, logits_ptr, masks_ptr + mask * num_words, size, BLOCK)
            logits_ptr = masked_ptr
    lists_ptr += row * DEPTH * BLOCK
    maxima, largest, token, is_valid = _find_largest(logits_ptr, size, BLOCK)
    tl.store(is_valid_ptr + row, is_valid.to(tl.uint8))
    tl.store(token_ids_ptr + row, token.to(tl.int64))
    temperature = tl.load(temperature_ptr + row)
    if (temperature == 0.0) | (is_valid == 0):
        return
    temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
    scale = (1.0 / temperature).to(tl.float32)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniforms_ptr + row)
    least = tl.full([], (_MINUS_INFINITY >> SHIFT) + 1, tl.int32)  # finite
    threshold, bound = least, least
    if (top_k > 0.0) & (top_k < size):
        if top_k <= BLOCK:  # as many lanes reach the k-th largest maximum, so many tokens do
            bound = _kth_largest(maxima, top_k, least, SHIFT)
        few = _collect(logits_ptr, size, bound, lists_ptr, SHIFT, BLOCK, DEPTH)
        threshold = _search(few, largest, scale, bound, top_k, False, SHIFT, BLOCK, WAYS)
    if top_p < 1.0:
        end = tl.cdiv(size, BLOCK)
        total = _weigh(logits_ptr, size, 0, end, largest, scale, threshold, SHIFT, BLOCK)
        # Tokens below (1 - top_p) / size of the total, even all together, are left out. Half of
        # that, for rounding.
        cut = largest + temperature * tl.log(0.5 * (1.0 - top_p) * total / size)
        bound = tl.maximum(_key_from(cut.to(tl.float32), SHIFT), threshold)
        few = _collect(logits_ptr, size, bound, lists_ptr, SHIFT, BLOCK, DEPTH)
        threshold = _search(few, largest, scale, bound, top_p * total, True, SHIFT, BLOCK, WAYS)
    if min_p > 0.0:
        cut = largest + temperature * tl.log(min_p)
        threshold = tl.maximum(threshold, _key_from(cut.to(tl.float32), SHIFT))
    drawn = _draw(logits_ptr, size, largest, scale, threshold, uniform, SHIFT, BLOCK, NUM_SPANS)
    if drawn < size:  # else rounding took it beyond the last one
        tl.store(token_ids_ptr + row, drawn.to(tl.int64))


@triton.jit
def _mask_row(masked_ptr, logits_ptr, mask_ptr, size, BLOCK: tl.constexpr):
    """Copy a row, with -inf for tokens whose bit is not set."""
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        tokens = start + lanes
        bits = tl.load(mask_ptr + tokens // 32, tokens < size, 0)
        is_allowed = ((bits >> (tokens % 32)) & 1) == 1
        x = tl.load(logits_ptr + tokens, is_allowed & (tokens < size), float("-inf"))
        tl.store(masked_ptr + tokens, x, tokens < size)
    tl.debug_barrier()  # other threads read it


@triton.jit
def _find_largest(logits_ptr, size, BLOCK: tl.constexpr):
    """The largest logit of every lane and of all, its first index, and whether the row is a
    distribution."""
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    places = tl.zeros([BLOCK], tl.int32)
    is_number = tl.full([BLOCK], 1, tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        tokens = start + lanes
        x = tl.load(logits_ptr + tokens, tokens < size, float("-inf")).to(tl.float32)
        places = tl.where(x > maxima, tokens, places)
        maxima = tl.where(x > maxima, x, maxima)
        is_number &= (x == x).to(tl.int32)
    largest = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == largest, places, size - 1), axis=0)
    is_finite = (largest > float("-inf")) & (largest < float("inf"))
    return maxima, largest, token, tl.min(is_number, axis=0) & is_finite.to(tl.int32)


# --- keys: logits as integers in the order of floats, without their unused bits -----------------


@triton.jit
def _order_of(x):
    """float32 → int32; both zeros are one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _key_of(x, SHIFT: tl.constexpr):
    return _order_of(x) >> SHIFT


@triton.jit
def _key_from(x, SHIFT: tl.constexpr):
    """The smallest key of a logit that is at least x."""
    return (_order_of(x) + ((1 << SHIFT) - 1)) >> SHIFT


@triton.jit
def _kth_largest(x, k, least, SHIFT: tl.constexpr):
    """The largest key that k of x [BLOCK] reach, or the least."""
    keys = _key_of(x, SHIFT)
    low, high = least.to(tl.int64), tl.max(keys, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        is_reached = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return low.to(tl.int32)


# --- weights, and where they add up to something --------------------------------------------------


@triton.jit
def _load_block(logits_ptr, size, block, BLOCK: tl.constexpr):
    """The logits of a block, float32; -inf past the last one."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + tokens, tokens < size, float("-inf")).to(tl.float32)


@triton.jit
def _collect(
    logits_ptr, size, bound, lists_ptr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The tokens whose key reaches the bound: a pointer to their logits, each lane's count and
    its maximum. They are in the lanes' lists, or in the whole row if the lists overflow."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    num_blocks = tl.cdiv(size, BLOCK)
    tl.debug_barrier()  # other threads may still read the old contents
    for block in tl.range(0, num_blocks, num_stages=4):
        x = _load_block(logits_ptr, size, block, BLOCK)
        is_kept = _key_of(x, SHIFT) >= bound
        pointers = lists_ptr + counts * BLOCK + lanes
        tl.store(pointers, x.to(lists_ptr.dtype.element_ty), is_kept & (counts < DEPTH))
        counts += is_kept.to(tl.int32)
    tl.debug_barrier()  # lists may be read by other threads than wrote them
    found_ptr, depth = lists_ptr, tl.max(counts, axis=0)
    if depth > DEPTH:
        found_ptr, depth = logits_ptr, num_blocks
        counts = tl.cdiv(tl.maximum(size - lanes, 0), BLOCK)
    return found_ptr, counts, depth


@triton.jit
def _weights_of(x, largest, scale):
    """float64, relative to the largest."""
    return tl.exp((x - largest) * scale).to(tl.float64)


@triton.jit
def _weigh(
    logits_ptr, size, first, end, largest, scale, threshold,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Total weight of the tokens of blocks `first` … `end` - 1 whose key reaches the threshold."""
    weights = tl.zeros([BLOCK], tl.float64)
    for block in tl.range(first, end, num_stages=4):
        x = _load_block(logits_ptr, size, block, BLOCK)
        is_kept = _key_of(x, SHIFT) >= threshold
        weights += tl.where(is_kept, _weights_of(x, largest, scale), 0.0)
    return tl.sum(weights, axis=0)


@triton.jit
def _search(
    tokens, largest, scale, low, target,
    HAS_WEIGHTS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens that reach it weigh `target` together, each by its
    weight or as 1; `low` if there is none above it."""
    logits_ptr, counts, depth = tokens
    lanes = tl.arange(0, BLOCK)
    low, high = low.to(tl.int64), _key_of(largest, SHIFT).to(tl.int64) + 1
    ways = 1 + tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS) // (WAYS + 1)
        pivots = tl.minimum(low + step * ways, high).to(tl.int32)  # nothing reaches `high`
        weights = tl.zeros([BLOCK, WAYS], tl.float64)
        for i in tl.range(0, depth):
            pointers = logits_ptr + i * BLOCK + lanes
            x = tl.load(pointers, i < counts, float("-inf")).to(tl.float32)
            weight = tl.full([BLOCK], 1.0, tl.float64)
            if HAS_WEIGHTS:
                weight = _weights_of(x, largest, scale)
            is_above = _key_of(x, SHIFT)[:, None] >= pivots[None, :]
            weights += tl.where(is_above, weight[:, None], 0.0)
        is_reached = tl.sum(weights, axis=0) >= target
        low += step * tl.sum(is_reached.to(tl.int64), axis=0)
        high = tl.minimum(low + step, high)
    return low.to(tl.int32)


@triton.jit
def _draw(
    logits_ptr, size, largest, scale, threshold, uniform,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, NUM_SPANS: tl.constexpr,
):  # fmt: skip
    """The first token at which the cumulative weights of the kept tokens exceed `uniform` of their
    sum; `size` if rounding prevents that."""
    num_blocks = tl.cdiv(size, BLOCK)
    span_blocks = tl.cdiv(num_blocks, NUM_SPANS)
    spans = tl.arange(0, NUM_SPANS)
    weights = tl.zeros([NUM_SPANS], tl.float64)
    for span in tl.range(0, tl.cdiv(num_blocks, span_blocks)):
        first = span * span_blocks
        end = tl.minimum(first + span_blocks, num_blocks)
        weight = _weigh(logits_ptr, size, first, end, largest, scale, threshold, SHIFT, BLOCK)
        weights = tl.where(spans == span, weight, weights)
    target = uniform * tl.sum(weights, axis=0)
    is_beyond = tl.cumsum(weights, axis=0) > target
    span = tl.min(tl.where(is_beyond, spans, NUM_SPANS - 1), axis=0)
    reached = tl.sum(tl.where(spans < span, weights, 0.0), axis=0)

    block, end = span * span_blocks, (span + 1) * span_blocks
    token = size
    while (token == size) & (block < tl.minimum(end, num_blocks)):
        x = _load_block(logits_ptr, size, block, BLOCK)
        is_kept = _key_of(x, SHIFT) >= threshold
        weight = tl.where(is_kept, _weights_of(x, largest, scale), 0.0)
        is_here = (weight > 0.0) & (reached + tl.cumsum(weight, axis=0) > target)
        token = tl.min(tl.where(is_here, block * BLOCK + tl.arange(0, BLOCK), size), axis=0)
        reached += tl.sum(weight, axis=0)
        block += 1
    return token


def config_for(size: int) -> Config:
    """For a vocabulary of so many tokens."""
    block = min(2048, max(128, triton.next_power_of_2(size)))
    heuristic = {
        "BLOCK": block,
        "DEPTH": 16,
        "WAYS": 4,
        "NUM_SPANS": 16,
        "num_warps": max(4, block // 128),
    }
    return tuned("sample_tokens", str(size)) or heuristic


def sample_tokens_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    masks: TokenMasks | None = None,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    num_rows, size = logits.shape
    config = config or config_for(size)
    parameters = (temperature, top_k, top_p, min_p, uniforms)
    assert all(each.is_contiguous() for each in (logits, *parameters))
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_valid = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    lists = logits.new_empty(num_rows, config["DEPTH"], config["BLOCK"])
    masked, num_words = None, 0
    bits, indices = masks or (None, None)
    if bits is not None:
        masked, num_words = torch.empty_like(logits), bits.shape[1]
    if num_rows:
        sample_tokens_kernel[(num_rows,)](
            token_ids, is_valid, logits, lists, *parameters, masked, bits, indices, num_words, size,
            SHIFT=_UNUSED_BITS[logits.dtype], HAS_MASKS=masks is not None, **config,
        )  # fmt: skip
    return token_ids, is_valid.bool()
