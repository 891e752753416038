"""Products with quantized weights, lookups, and rows rounded to bytes."""

from __future__ import annotations

import torch
from compile_case import CompileCase

from penstock.kernels.gpu.linear_quantized import bytes_config, levels_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTH = 64
SIZES = {"num_rows": "i32", "num_outputs": "i32"}


def codes(
    kind: str, *, size: int, block: int, scales: str = "fp32"
) -> tuple[dict[str, str], dict[str, object]]:
    """The signature and the constants that describe a matrix: "4", "4 offsets", "4 table", "8",
    "8 offsets" or "float8"."""
    is_packed = kind.startswith("4")
    signature = {
        "codes_ptr": "*u8" if is_packed or kind == "float8" else "*i8",
        "scales_ptr": f"*{scales}",
        **({"offsets_ptr": "*fp32"} if "offsets" in kind else {}),
        **({"table_ptr": "*fp32"} if "table" in kind else {}),
    }
    nones = {name: None for name in ("offsets_ptr", "table_ptr") if name not in signature}
    return signature, {
        **nones,
        "SIZE": size,
        "ROW_BYTES": size // 2 if is_packed else size,
        "COLUMNS_PER_SCALE": block,
        "CODES_PER_BYTE": 2 if is_packed else 1,
        "ZERO": 8 if kind == "4" else 0,
        "IS_FLOAT8": kind == "float8",
    }


def levels(kind: str, dtype: str, rows: str, *, block: int = 128, size: int = 4096,
           scales: str = "fp32", has_bias: bool = False) -> CompileCase:  # fmt: skip
    config = levels_config(DTYPES[dtype], rows)
    signature, constants = codes(kind, size=size, block=block, scales=scales)
    tensors = ["output_ptr", "x_ptr", *["bias_ptr"] * has_bias]
    return CompileCase(
        label=f"{kind}, {dtype}, {rows} rows, blocks of {block}{', bias' * has_bias}",
        module="linear_quantized",
        kernel="linear_levels_kernel",
        signature=dict.fromkeys(tensors, f"*{dtype}") | signature | SIZES,
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs={
            **constants, **config, "COLUMNS": WIDTH, "SPAN": min(block, WIDTH),
            **({} if has_bias else {"bias_ptr": None}),
        },
        divisible_by_16=("num_outputs",),
    )  # fmt: skip


def in_bytes(dtype: str, rows: str, *, block: int, size: int = 4096,
             has_offsets: bool = False, has_bias: bool = False) -> CompileCase:  # fmt: skip
    config = bytes_config(rows)
    tensors = {
        "output_ptr": f"*{dtype}",
        "x_ptr": "*i8",
        "x_scales_ptr": "*fp32",
        "codes_ptr": "*i8",
        "scales_ptr": "*fp32",
        **({"offsets_ptr": "*fp32"} if has_offsets else {}),
        **({"bias_ptr": f"*{dtype}"} if has_bias else {}),
    }
    nones = {name: None for name in ("offsets_ptr", "bias_ptr") if name not in tensors}
    return CompileCase(
        label=f"bytes, {dtype}, {rows} rows, blocks of {block}{', offsets' * has_offsets}",
        module="linear_quantized",
        kernel="linear_bytes_kernel",
        signature=tensors | SIZES,
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs={
            **nones, **config, "SIZE": size, "NUM_BLOCKS": -(-size // block),
            "COLUMNS_PER_SCALE": block, "COLUMNS": min(block, 128),
        },
        divisible_by_16=("num_outputs",),
    )  # fmt: skip


def quantized_rows(dtype: str, values: str, *, block: int, size: int = 4096) -> CompileCase:
    num_blocks = -(-size // block)
    blocks = max(1, min(num_blocks, 1024 // block))
    return CompileCase(
        label=f"rows of {values}, {dtype}, blocks of {block}",
        module="linear_quantized",
        kernel="quantize_rows_kernel",
        signature={"values_ptr": f"*{values}", "scales_ptr": "*fp32", "x_ptr": f"*{dtype}"},
        num_warps=min(max(blocks * block // 512, 1), 16),
        constexprs={
            "SIZE": size, "NUM_BLOCKS": num_blocks, "COLUMNS_PER_SCALE": block,
            "LARGEST": 127 if values == "i8" else 448.0, "IS_FLOAT8": values != "i8",
            "BLOCKS": blocks, "COLUMNS": block,
        },
        # Another card's E4M3 has another range; torch has no product for it there.
        targets=("sm_90", "gfx942") if values == "i8" else ("sm_90",),
    )  # fmt: skip


def lookup(kind: str, dtype: str, *, block: int, has_order: bool = False) -> CompileCase:
    signature, constants = codes(kind, size=4096, block=block)
    order = {"order_ptr": "*i64"} if has_order else {}
    return CompileCase(
        label=f"lookup in {kind}, {dtype}{', order' * has_order}",
        module="linear_quantized",
        kernel="embed_quantized_kernel",
        signature={
            "output_ptr": f"*{dtype}", "token_ids_ptr": "*i64", **signature, **order,
            "num_outputs": "i32",
        },
        constexprs={
            **constants, "PART": WIDTH, "BLOCK": 512, **({} if has_order else {"order_ptr": None})
        },
    )  # fmt: skip


def scaled_sums(dtype: str, *, has_bias: bool) -> CompileCase:
    bias = {"bias_ptr": f"*{dtype}"} if has_bias else {}
    return CompileCase(
        label=f"scaled sums, {dtype}{', bias' * has_bias}",
        module="linear_quantized",
        kernel="scale_sums_kernel",
        signature={
            "output_ptr": f"*{dtype}", "sums_ptr": "*i32", "x_scales_ptr": "*fp32",
            "scales_ptr": "*fp32", **bias, **SIZES,
        },
        constexprs={"BLOCK_M": 4, "BLOCK_N": 512, **({} if has_bias else {"bias_ptr": None})},
        divisible_by_16=("num_outputs",),
    )  # fmt: skip


CASES = [
    *(levels("4", "bf16", rows) for rows in ("few", "some", "many")),
    levels("4 offsets", "bf16", "few", block=64, scales="fp16", has_bias=True),
    levels("4 offsets", "bf16", "many", block=64),
    levels("4 offsets", "bf16", "few", block=32),
    levels("4 table", "bf16", "few", block=16, scales="bf16"),
    levels("4 table", "bf16", "many", block=16),
    levels("4", "fp16", "few", block=32, size=14336),
    levels("4", "fp16", "many"),
    levels("4", "fp32", "many", has_bias=True),
    levels("4 table", "fp32", "many", block=16),
    *(levels("8", "bf16", rows) for rows in ("few", "some", "many")),
    levels("8 offsets", "fp16", "many", block=32),
    levels("8", "fp32", "many"),
    *(levels("float8", "bf16", rows) for rows in ("few", "some", "many")),
    levels("float8", "fp16", "many"),
    levels("float8", "fp32", "many"),
    *(in_bytes("bf16", rows, block=128) for rows in ("few", "some", "many")),
    *(in_bytes("bf16", rows, block=4096) for rows in ("few", "some", "many")),
    in_bytes("bf16", "few", block=4096, has_offsets=True, has_bias=True),
    in_bytes("fp16", "many", block=32, has_offsets=True),
    in_bytes("fp32", "many", block=128, has_bias=True),
    quantized_rows("bf16", "i8", block=128),
    quantized_rows("fp16", "i8", block=32),
    quantized_rows("fp32", "i8", block=4096),
    quantized_rows("bf16", "i8", block=32768, size=28672),
    quantized_rows("bf16", "fp8e4nv", block=4096),
    scaled_sums("bf16", has_bias=False),
    scaled_sums("fp16", has_bias=True),
    lookup("4", "bf16", block=64, has_order=True),
    lookup("4 table", "fp16", block=16),
    lookup("8", "bf16", block=128),
    lookup("float8", "fp32", block=4096),
]
