"""The products of a mixture of experts."""

from __future__ import annotations

import torch
from compile_case import CompileCase

from penstock.kernels.gpu.experts import config_for, dense_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTEGERS = {"num_experts": "i32", "num_outputs": "i32"}


def dense(dtype: str, *, size: int, num_experts: int) -> CompileCase:
    config = dense_config(DTYPES[dtype])
    tensors = ("output_ptr", "x_ptr", "weight_ptr")
    return CompileCase(
        label=f"{dtype}, {size}, {num_experts} experts",
        module="experts",
        kernel="experts_linear_kernel",
        signature=dict.fromkeys(tensors, f"*{dtype}") | {"ends_ptr": "*i64", **INTEGERS},
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs={"SIZE": size, "EXPERTS": num_experts, "bias_ptr": None, **config},
        divisible_by_16=("num_outputs",),
    )


def levels(bits: int, *, size: int) -> CompileCase:
    config = config_for(torch.bfloat16)
    return CompileCase(
        label=f"bf16, {size}, {bits} bits",
        module="experts",
        kernel="experts_levels_kernel",
        signature={
            "output_ptr": "*bf16", "x_ptr": "*bf16", "codes_ptr": "*u8" if bits == 4 else "*i8",
            "scales_ptr": "*fp16", "bias_ptr": "*bf16", "ends_ptr": "*i64", **INTEGERS,
        },
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs={
            "offsets_ptr": None, "table_ptr": None, "SIZE": size,
            "ROW_BYTES": size * bits // 8, "COLUMNS_PER_SCALE": 64, "SPAN": 64,
            "CODES_PER_BYTE": 8 // bits, "ZERO": 8 if bits == 4 else 0, "IS_FLOAT8": False,
            "EXPERTS": 128, "COLUMNS": 64, **config,
        },
        divisible_by_16=("num_outputs",),
    )  # fmt: skip


CASES = [
    dense("bf16", size=2048, num_experts=128),
    dense("fp16", size=768, num_experts=64),
    dense("fp32", size=4096, num_experts=8),
    levels(4, size=2048),
    levels(8, size=2048),
]
