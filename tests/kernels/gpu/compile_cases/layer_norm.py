"""LayerNorm, with and without a bias, from short rows to the longest."""

from __future__ import annotations

from compile_case import CompileCase

from penstock.kernels.gpu.rows import config_for


def case(*, dtype: str, size: int, has_bias: bool, num_groups: int = 1) -> CompileCase:
    tensors = ["normed_ptr", "x_ptr", "weight_ptr", *["bias_ptr"] * has_bias]
    config = config_for(size)
    constexprs = {"NUM_GROUPS": num_groups, "SIZE": size, "BLOCK": config["BLOCK"]}
    constexprs |= {} if has_bias else {"bias_ptr": None}
    return CompileCase(
        label=f"{dtype}, {num_groups} × {size}{', bias' * has_bias}",
        module="layer_norm",
        kernel="layer_norm_kernel",
        signature=dict.fromkeys(tensors, f"*{dtype}") | {"eps": "fp32"},
        constexprs=constexprs,
        num_warps=config["num_warps"],
    )


CASES = [
    case(dtype="bf16", size=4096, has_bias=True),
    case(dtype="fp16", size=1000, has_bias=False),
    case(dtype="bf16", size=18432, has_bias=True),
    case(dtype="bf16", size=128, has_bias=False, num_groups=64),
]
