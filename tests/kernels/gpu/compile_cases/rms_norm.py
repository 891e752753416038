"""RMSNorm, alone and of a sum, from short rows to the longest."""

from __future__ import annotations

from compile_case import CompileCase

from penstock.kernels.gpu.rows import config_for


def case(*, dtype: str, size: int, has_residual: bool, offset: float = 0.0) -> CompileCase:
    tensors = {"normed_ptr", "x_ptr", "weight_ptr"}
    tensors |= {"total_ptr", "residual_ptr"} if has_residual else set()
    absent = {"total_ptr", "residual_ptr"} - tensors
    config = config_for(size)
    return CompileCase(
        label=f"{dtype}, {size}{', sum' * has_residual}, {offset}",
        module="rms_norm",
        kernel="rms_norm_kernel",
        signature=dict.fromkeys(sorted(tensors), f"*{dtype}") | {"eps": "fp32"},
        constexprs=dict.fromkeys(sorted(absent))
        | {"OFFSET": offset, "SIZE": size, "BLOCK": config["BLOCK"]},
        num_warps=config["num_warps"],
    )


CASES = [
    case(dtype=dtype, size=size, has_residual=has_residual)
    for dtype, size in [
        ("bf16", 4096),
        ("fp16", 896),
        ("fp32", 1000),
        ("fp32", 16384),
        ("bf16", 18432),
    ]
    for has_residual in (False, True)
] + [case(dtype="bf16", size=2304, has_residual=True, offset=1.0)]
