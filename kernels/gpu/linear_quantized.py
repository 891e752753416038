"""Products with quantized weights in Triton.

`linear_levels_kernel` multiplies rows as they are: it dequantizes a tile of weights in registers
and multiplies it in the rows' dtype, as in Frantar et al., "MARLIN" (2024), section 3. The weights
are the left operand of the tensor cores' product: that one may come from registers, and few rows
then fill the narrow side of the tile. `linear_bytes_kernel` multiplies rows that were rounded to
bytes: exact sums of integers within a block, then a scale of either side.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.quantized import FLOAT8, WIDTH, GpuCodes, product_in_torch
from penstock.kernels.gpu.tuning import Config, tuned
from penstock.kernels.quantized_codes import BYTE

_ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and subtracted, it rounds halves to even
_MIN_DOT = 32  # columns of the smallest product of bytes
_MAX_BLOCK = 128  # columns that a product of bytes takes at once
_MAX_FEATURES = 1 << 17  # 127 · 128 · so many stays below 2³¹
_MAX_TORCH_SKIPS = 16  # rows up to which `torch._int_mm` refuses
_QUANTIZED_AT_ONCE = 1024  # numbers of short blocks


@triton.jit
def _levels(codes, table_ptr, ZERO: tl.constexpr, IS_FLOAT8: tl.constexpr):
    """What codes stand for, before scale and offset: float32."""
    if IS_FLOAT8:
        # The bits of a float16 number that is 2⁸ times smaller: exponents are biased by 15 there,
        # and by 7 here. Unlike a conversion, it compiles for every card.
        bits = codes.to(tl.uint16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        levels = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), levels)
    elif table_ptr is not None:  # noqa: RET505  (other branches would be compiled too)
        if len(codes.shape) == 1:
            return tl.load(table_ptr + codes.to(tl.int32))
        else:  # noqa: RET505
            # Between threads, in registers: loads in a loop would be staged in shared memory.
            table = tl.load(table_ptr + tl.arange(0, 16))[None, :]
            return tl.gather(tl.broadcast_to(table, [codes.shape[0], 16]), codes.to(tl.int32), 1)
    else:
        return codes.to(tl.float32) - ZERO


@triton.jit
def _of_columns(
    values_ptr,  # scales or offsets [num_blocks, num_outputs]
    outputs,  # [BLOCK_N]
    start,
    num_outputs,
    SIZE: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The values of columns start … start + COLUMNS - 1, of which SPAN neighbours share one:
    float32 [BLOCK_N, COLUMNS], or [BLOCK_N, 1] if all do."""
    COUNT: tl.constexpr = COLUMNS // SPAN
    columns = start + tl.arange(0, COUNT) * SPAN
    blocks = columns // COLUMNS_PER_SCALE
    pointers = values_ptr + blocks.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    is_inside = (outputs < num_outputs)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(pointers, is_inside, other=0.0).to(tl.float32)
    if COUNT == 1:
        return values
    else:  # noqa: RET505
        spread = tl.broadcast_to(values[:, :, None], [values.shape[0], COUNT, SPAN])
        return tl.reshape(spread, [values.shape[0], COLUMNS])


@triton.jit
def _product_tile(
    x_rows,  # pointers [BLOCK_M, 1] to rows of [SIZE]
    code_rows,  # pointers [BLOCK_N, 1] to rows of [ROW_BYTES]
    weights,  # int [BLOCK_N]: the columns of the scales
    is_row,
    is_output,
    scales_ptr,  # [num_blocks, num_weights]
    offsets_ptr,
    table_ptr,
    num_weights,
    SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The product of rows and of weights that are codes, transposed: float32 [BLOCK_N, BLOCK_M]."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, SIZE, CODES_PER_BYTE * COLUMNS):
        bytes_at = start // CODES_PER_BYTE + tl.arange(0, COLUMNS)
        is_code = is_output[:, None] & (bytes_at < ROW_BYTES)[None, :]
        codes = tl.load(code_rows + bytes_at[None, :], is_code, other=0)
        for part in tl.static_range(CODES_PER_BYTE):
            first = start + part * COLUMNS
            columns = first + tl.arange(0, COLUMNS)
            x = tl.load(
                x_rows + columns[None, :], is_row[:, None] & (columns < SIZE)[None, :], other=0.0
            )
            own = codes if CODES_PER_BYTE == 1 else (codes >> (4 * part)) & 15
            weight = _levels(own, table_ptr, ZERO, IS_FLOAT8) * _of_columns(
                scales_ptr, weights, first, num_weights, SIZE, COLUMNS_PER_SCALE, SPAN, COLUMNS
            )
            if offsets_ptr is not None:
                weight -= _of_columns(
                    offsets_ptr, weights, first, num_weights, SIZE, COLUMNS_PER_SCALE, SPAN, COLUMNS
                )
            total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def linear_levels_kernel(
    output_ptr,  # [num_rows, num_outputs]
    x_ptr,  # [num_rows, SIZE]
    codes_ptr,  # uint8 or int8 [num_outputs, ROW_BYTES]
    scales_ptr,  # [num_blocks, num_outputs]
    offsets_ptr,  # of the same shape, or None
    table_ptr,  # float32 [16], or None
    bias_ptr,  # [num_outputs], or None
    num_rows,
    num_outputs,
    SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (m, n): a tile of rows by a tile of outputs; programs of one tile of weights are
    consecutive, so that it is read from memory once."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * SIZE
    code_rows = codes_ptr + outputs.to(tl.int64)[:, None] * ROW_BYTES
    total = _product_tile(
        x_rows, code_rows, outputs, is_row, is_output, scales_ptr, offsets_ptr, table_ptr,
        num_outputs, SIZE, ROW_BYTES, COLUMNS_PER_SCALE, SPAN, CODES_PER_BYTE, ZERO, IS_FLOAT8,
        BLOCK_M, BLOCK_N, COLUMNS,
    )  # fmt: skip
    _store(output_ptr, bias_ptr, total, rows, outputs, num_rows, num_outputs)


@triton.jit
def _store(output_ptr, bias_ptr, total, rows, outputs, num_rows, num_outputs):
    """Write a tile [BLOCK_N, BLOCK_M] of the transposed result, with its bias."""
    is_output = outputs < num_outputs
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, is_output, other=0.0).to(tl.float32)[:, None]
    pointers = output_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    is_inside = (rows < num_rows)[:, None] & is_output[None, :]
    tl.store(pointers, tl.trans(total).to(output_ptr.dtype.element_ty), is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def linear_bytes_kernel(
    output_ptr,  # [num_rows, num_outputs]
    x_ptr,  # int8 [num_rows, SIZE]
    x_scales_ptr,  # float32 [num_rows, NUM_BLOCKS]
    codes_ptr,  # int8 [num_outputs, SIZE]
    scales_ptr,  # [NUM_BLOCKS, num_outputs]
    offsets_ptr,  # of the same shape, or None
    bias_ptr,  # [num_outputs], or None
    num_rows,
    num_outputs,
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (m, n), as in `linear_levels_kernel`. A step of COLUMNS lies within one block."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * SIZE
    code_rows = codes_ptr + outputs.to(tl.int64)[:, None] * SIZE
    scale_rows = x_scales_ptr + rows.to(tl.int64) * NUM_BLOCKS
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    x_sums = tl.zeros([BLOCK_M], tl.int32)
    for start in tl.range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = (columns < SIZE)[None, :]
        x = tl.load(x_rows + columns[None, :], is_row[:, None] & is_column, other=0)
        codes = tl.load(code_rows + columns[None, :], is_output[:, None] & is_column, other=0)
        if NUM_BLOCKS == 1:
            sums = tl.dot(codes, tl.trans(x), sums, out_dtype=tl.int32)
            if offsets_ptr is not None:
                x_sums += tl.sum(x.to(tl.int32), 1)
        else:
            block = start // COLUMNS_PER_SCALE
            own = tl.dot(codes, tl.trans(x), out_dtype=tl.int32)
            x_scales = tl.load(scale_rows + block, is_row, other=0.0)
            total += _scaled(own, x_scales, scales_ptr, block, outputs, num_outputs)
            if offsets_ptr is not None:
                own_sums = tl.sum(x.to(tl.int32), 1)[None, :]
                total -= _scaled(own_sums, x_scales, offsets_ptr, block, outputs, num_outputs)
    if NUM_BLOCKS == 1:
        x_scales = tl.load(scale_rows, is_row, other=0.0)
        total = _scaled(sums, x_scales, scales_ptr, 0, outputs, num_outputs)
        if offsets_ptr is not None:
            total -= _scaled(x_sums[None, :], x_scales, offsets_ptr, 0, outputs, num_outputs)
    _store(output_ptr, bias_ptr, total, rows, outputs, num_rows, num_outputs)


@triton.jit
def _scaled(sums, x_scales, scales_ptr, block, outputs, num_outputs):
    """sums int32 [BLOCK_N or 1, BLOCK_M] · both scales of a block, float32 [BLOCK_N, BLOCK_M]"""
    pointers = scales_ptr + (outputs + tl.cast(block, tl.int64) * num_outputs)
    scales = tl.load(pointers, outputs < num_outputs, other=0.0).to(tl.float32)
    return sums.to(tl.float32) * x_scales[None, :] * scales[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def scale_sums_kernel(
    output_ptr,  # [num_rows, num_outputs]
    sums_ptr,  # int32 [num_rows, num_outputs]
    x_scales_ptr,  # float32 [num_rows]
    scales_ptr,  # [1, num_outputs]
    bias_ptr,  # [num_outputs], or None
    num_rows,
    num_outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The end of a product whose integers torch has summed up."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    is_inside = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    sums = tl.load(sums_ptr + places, is_inside, other=0).to(tl.float32)
    scales = tl.load(scales_ptr + outputs, outputs < num_outputs, other=0.0).to(tl.float32)
    total = sums * tl.load(x_scales_ptr + rows, rows < num_rows, other=0.0)[:, None]
    total *= scales[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, outputs < num_outputs, other=0.0).to(tl.float32)
    tl.store(output_ptr + places, total.to(output_ptr.dtype.element_ty), is_inside)


@triton.jit
def quantize_rows_kernel(
    values_ptr,  # int8 or float8_e4m3fn [num_rows, SIZE]
    scales_ptr,  # float32 [num_rows, NUM_BLOCKS]
    x_ptr,  # [num_rows, SIZE]
    SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,  # what the largest magnitude of a block becomes
    IS_FLOAT8: tl.constexpr,
    BLOCKS: tl.constexpr,  # at once
    COLUMNS: tl.constexpr,  # COLUMNS_PER_SCALE, padded to a power of two
):
    """Program (m, b): some blocks of a row, as `quantize_rows_reference` does."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, COLUMNS)
    columns = blocks[:, None] * COLUMNS_PER_SCALE + within[None, :]
    is_inside = (within < COLUMNS_PER_SCALE)[None, :] & (columns < SIZE)
    x = tl.load(x_ptr + row * SIZE + columns, is_inside, other=0.0).to(tl.float32)
    magnitudes = tl.abs(x)
    # A maximum may lose NaN; a sum does not.
    lost = tl.sum(tl.where(x == x, 0.0, x), 1)
    largest = tl.max(tl.where(x == x, magnitudes, 0.0), 1) + lost
    whole = tl.full(largest.shape, LARGEST, tl.float32)
    # Divided exactly, so that every device rounds alike.
    inverse = tl.div_rn(whole, tl.where(largest > 0, largest, 1.0))
    is_finite = (largest > 0) & (inverse < float("inf")) & (largest < float("inf"))
    scaled = tl.where(is_finite[:, None], x * tl.where(is_finite, inverse, 0.0)[:, None], 0.0)
    if not IS_FLOAT8:
        scaled = (scaled + _ROUNDER) - _ROUNDER
    tl.store(values_ptr + row * SIZE + columns, scaled.to(values_ptr.dtype.element_ty), is_inside)
    scales = tl.div_rn(largest, whole)
    tl.store(scales_ptr + row * NUM_BLOCKS + blocks, scales, blocks < NUM_BLOCKS)


@triton.jit
def embed_quantized_kernel(
    output_ptr,  # [num_tokens, SIZE]
    token_ids_ptr,  # int64 [num_tokens]
    codes_ptr,  # uint8 or int8 [num_outputs, ROW_BYTES]
    scales_ptr,  # [num_blocks, num_outputs]
    offsets_ptr,  # of the same shape, or None
    table_ptr,  # float32 [16], or None
    order_ptr,  # int64 [SIZE], or None
    num_outputs,
    SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr,
    PART: tl.constexpr,  # columns whose codes are in the same half of neighbouring bytes
    ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, c): some columns of a token's row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    index = tl.load(token_ids_ptr + token)
    if CODES_PER_BYTE == 1:
        codes = tl.load(codes_ptr + index * ROW_BYTES + columns, is_inside, other=0)
    else:
        places = columns // (2 * PART) * PART + columns % PART
        pairs = tl.load(codes_ptr + index * ROW_BYTES + places, is_inside, other=0)
        codes = (pairs.to(tl.int32) >> (columns // PART % 2 * 4)) & 15
    of_blocks = (columns // COLUMNS_PER_SCALE).to(tl.int64) * num_outputs + index
    numbers = _levels(codes, table_ptr, ZERO, IS_FLOAT8)
    numbers *= tl.load(scales_ptr + of_blocks, is_inside, other=0.0).to(tl.float32)
    if offsets_ptr is not None:
        numbers -= tl.load(offsets_ptr + of_blocks, is_inside, other=0.0).to(tl.float32)
    places = columns if order_ptr is None else tl.load(order_ptr + columns, is_inside, other=0)
    output = output_ptr + token * SIZE + places
    tl.store(output, numbers.to(output_ptr.dtype.element_ty), is_inside)


# -- launchers --------------------------------------------------------------------------------

_FEW_ROWS, _SOME_ROWS = 16, 64


def row_class(num_rows: int) -> str:
    """The class of batches that have one configuration."""
    return "few" if num_rows <= _FEW_ROWS else "some" if num_rows <= _SOME_ROWS else "many"


def levels_config(dtype: torch.dtype, rows: str) -> Config:
    """How `linear_levels_kernel` is launched for a class of rows."""
    if dtype == torch.float32:  # without tensor cores: for registers
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    if rows == "few":  # small tiles, for a program for each processor
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 4}
    if rows == "some":
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}


def bytes_config(rows: str) -> Config:
    """How `linear_bytes_kernel` is launched for a class of rows."""
    if rows == "few":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 4}
    if rows == "some":
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}


_INVARIANT = "some"  # the class whose configuration all batches have, if rows must not matter


def tuning_key(matrix: GpuCodes, dtype: torch.dtype, rows: str, *, in_bytes: bool) -> str:
    kind = "bytes" if in_bytes else f"{matrix.bits} bits"
    return f"{kind} {str(dtype).removeprefix('torch.')} {rows} rows"


def takes_bytes(matrix: GpuCodes) -> bool:
    """Whether its products with rows of bytes are exact, and steps do not reach into two blocks."""
    if matrix.codes.dtype != torch.int8 or matrix.in_features > _MAX_FEATURES:
        return False
    return matrix.num_blocks == 1 or matrix.columns_per_scale % _MIN_DOT == 0


def linear_quantized_triton(
    x: Tensor,
    matrix: GpuCodes,
    bias: Tensor | None = None,
    *,
    in_bytes: bool,
    is_invariant: bool = False,
    config: Config | None = None,
) -> Tensor:
    """Multiply as `kernels.linear_quantized.linear_quantized` says. For measurements, `config`
    replaces some of what is chosen.

    Where `in_bytes`, torch's own products take part unless rows must not matter: for integers the
    result is the same. For E4M3 numbers it is that of rows rounded to E4M3 with a scale for each,
    which moves a product by some 3 %, where bytes move it by less than 1 %; the Triton kernel,
    also used where a card has no such product, takes the rows as they are.
    """
    if matrix.order is not None:
        x = x[:, matrix.order]
    if matrix.factors is not None:
        x = x * matrix.factors.to(x.dtype)
    x = x.contiguous()
    if not len(x):
        return x.new_empty(0, matrix.out_features)
    if in_bytes and matrix.is_float8 and matrix.has_library and not is_invariant:
        values, scales = quantize_rows_triton(x, matrix.in_features, dtype=FLOAT8)
        product = product_in_torch(values, scales[:, 0], matrix, x)
        return product if bias is None else product + bias
    is_in_bytes = in_bytes and takes_bytes(matrix)
    rows = _INVARIANT if is_invariant else row_class(len(x))
    chosen = bytes_config(rows) if is_in_bytes else levels_config(x.dtype, rows)
    if not is_invariant:
        key = tuning_key(matrix, x.dtype, rows, in_bytes=is_in_bytes)
        chosen |= config or tuned("linear_quantized", key) or {}
    if is_in_bytes:
        return _product_of_bytes(x, matrix, bias, chosen, is_invariant=is_invariant)
    return _product_of_levels(x, matrix, bias, chosen)


def _product_of_levels(x: Tensor, matrix: GpuCodes, bias: Tensor | None, config: Config) -> Tensor:
    output = x.new_empty(len(x), matrix.out_features)
    grid = (
        triton.cdiv(len(x), config["BLOCK_M"]),
        triton.cdiv(matrix.out_features, config["BLOCK_N"]),
    )
    linear_levels_kernel[grid](
        output, x, _bytes(matrix), matrix.scales, matrix.offsets, matrix.table, bias,
        len(x), matrix.out_features,
        **level_sizes(matrix), **config,
    )  # fmt: skip
    return output


def level_sizes(matrix: GpuCodes) -> Config:
    """The constants of `linear_levels_kernel` that follow from the matrix."""
    return {
        "SIZE": matrix.in_features,
        "COLUMNS": WIDTH,
        "SPAN": math.gcd(matrix.columns_per_scale, WIDTH) if matrix.num_blocks > 1 else WIDTH,
        **_code_sizes(matrix),
    }


def _code_sizes(matrix: GpuCodes) -> Config:
    return {
        "ROW_BYTES": matrix.codes.shape[1],
        "COLUMNS_PER_SCALE": matrix.columns_per_scale,
        "CODES_PER_BYTE": 8 // matrix.bits,
        "ZERO": matrix.zero,
        "IS_FLOAT8": matrix.is_float8,
    }


def _bytes(matrix: GpuCodes) -> Tensor:
    """The codes, of a type that every card's compiler knows."""
    return matrix.codes.view(torch.uint8) if matrix.is_float8 else matrix.codes


def _product_of_bytes(
    x: Tensor, matrix: GpuCodes, bias: Tensor | None, config: Config, *, is_invariant: bool
) -> Tensor:
    values, scales = quantize_rows_triton(x, matrix.columns_per_scale)
    output = x.new_empty(len(x), matrix.out_features)
    num_rows, num_outputs = output.shape

    def grid(config: Config) -> tuple[int, int]:
        return triton.cdiv(num_rows, config["BLOCK_M"]), triton.cdiv(num_outputs, config["BLOCK_N"])

    if matrix.has_library and num_rows > _MAX_TORCH_SKIPS and not is_invariant:
        sums = product_in_torch(values, scales, matrix, x)
        scale_sums_kernel[grid(_SCALE_SUMS)](
            output, sums, scales, matrix.scales, bias, num_rows, num_outputs, **_SCALE_SUMS
        )
        return output
    linear_bytes_kernel[grid(config)](
        output, values, scales, matrix.codes, matrix.scales, matrix.offsets, bias,
        num_rows, num_outputs,
        SIZE=matrix.in_features, NUM_BLOCKS=matrix.num_blocks,
        COLUMNS_PER_SCALE=matrix.columns_per_scale, COLUMNS=byte_columns(matrix), **config,
    )  # fmt: skip
    return output


_SCALE_SUMS: Config = {"BLOCK_M": 4, "BLOCK_N": 512, "num_warps": 4}


def byte_columns(matrix: GpuCodes) -> int:
    """The columns of a step of `linear_bytes_kernel`."""
    if matrix.num_blocks == 1:
        return _MAX_BLOCK
    return math.gcd(matrix.columns_per_scale, _MAX_BLOCK)


def quantize_rows_triton(
    x: Tensor, columns_per_scale: int, *, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """Each block of a row as bytes times a scale.

    Args:
        x: [num_rows, size]
        dtype: int8 or float8_e4m3fn.

    Returns:
        values of `dtype` [num_rows, size], and scales float32 [num_rows, num_blocks].
    """
    num_rows, size = x.shape
    num_blocks = triton.cdiv(size, columns_per_scale)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_blocks, device=x.device)
    columns = triton.next_power_of_2(columns_per_scale)
    blocks = max(1, min(triton.next_power_of_2(num_blocks), _QUANTIZED_AT_ONCE // columns))
    quantize_rows_kernel[(num_rows, triton.cdiv(num_blocks, blocks))](
        values, scales, x, SIZE=size, NUM_BLOCKS=num_blocks, COLUMNS_PER_SCALE=columns_per_scale,
        LARGEST=BYTE if dtype == torch.int8 else torch.finfo(dtype).max,
        IS_FLOAT8=dtype == FLOAT8, BLOCKS=blocks, COLUMNS=columns,
        num_warps=min(max(blocks * columns // 512, 1), 16),
    )  # fmt: skip
    return values, scales


def embed_quantized_triton(token_ids: Tensor, matrix: GpuCodes, dtype: torch.dtype) -> Tensor:
    output = torch.empty(
        len(token_ids), matrix.in_features, dtype=dtype, device=matrix.codes.device
    )
    if len(token_ids):
        grid = (len(token_ids), triton.cdiv(matrix.in_features, _EMBEDDED_AT_ONCE))
        embed_quantized_kernel[grid](
            output, token_ids, _bytes(matrix), matrix.scales, matrix.offsets, matrix.table,
            matrix.order, matrix.out_features, SIZE=matrix.in_features, PART=WIDTH,
            BLOCK=_EMBEDDED_AT_ONCE, **_code_sizes(matrix),
        )  # fmt: skip
    return output


_EMBEDDED_AT_ONCE = 512
