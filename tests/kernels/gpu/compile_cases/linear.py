"""The matrix product whose rows do not depend on each other."""

from __future__ import annotations

import torch
from compile_case import CompileCase

from penstock.kernels.gpu.linear import config_for

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def case(dtype: str, *, size: int, has_bias: bool) -> CompileCase:
    config = config_for(DTYPES[dtype])
    tensors = ["output_ptr", "x_ptr", "weight_ptr", *["bias_ptr"] * has_bias]
    return CompileCase(
        label=f"{dtype}, {size}{', bias' * has_bias}",
        module="linear",
        kernel="linear_kernel",
        signature=dict.fromkeys(tensors, f"*{dtype}") | {"num_rows": "i32", "num_outputs": "i32"},
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs={"SIZE": size, **config, **({} if has_bias else {"bias_ptr": None})},
        divisible_by_16=("num_outputs",),
    )


CASES = [
    case("bf16", size=4096, has_bias=False),
    case("bf16", size=896, has_bias=True),
    case("fp16", size=14336, has_bias=False),
    case("fp32", size=4096, has_bias=True),
]
