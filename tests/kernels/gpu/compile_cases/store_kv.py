"""Writing keys and values: every kind of cache, rows that a program holds whole or in part."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

from penstock.kernels.gpu.store_kv import config_for


def case(
    *, dtype: str, cache: str, num_kv_heads: int, head_dim: int, scale_stride: int = 1
) -> CompileCase:
    row = num_kv_heads * head_dim
    signature = {
        "key_cache_ptr": f"*{cache}",
        "value_cache_ptr": f"*{cache}",
        "key_ptr": f"*{dtype}",
        "value_ptr": f"*{dtype}",
        "slots_ptr": "*i64",
        "key_stride": "i32",
        "value_stride": "i32",
    }
    config = config_for(row)
    num_warps = config.pop("num_warps")
    constexprs: dict[str, Any] = {"ROW": row, "HEAD_DIM": head_dim, **config}
    for name in ("key_scale", "value_scale"):
        if cache == dtype:
            constexprs |= {f"{name}_ptr": None, f"{name}_stride": 0}
        else:
            signature[f"{name}_ptr"] = "*fp32"
            constexprs[f"{name}_stride"] = scale_stride
    return CompileCase(
        label=f"{dtype} into {cache}, {num_kv_heads} heads of {head_dim}, scales {scale_stride}",
        module="store_kv",
        kernel="store_kv_kernel",
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=("key_stride", "value_stride"),
        num_warps=num_warps,
    )


CASES = [
    case(dtype="bf16", cache="bf16", num_kv_heads=8, head_dim=128),
    case(dtype="fp16", cache="fp16", num_kv_heads=1, head_dim=80),
    case(dtype="fp32", cache="fp32", num_kv_heads=8, head_dim=256),
    case(dtype="bf16", cache="fp8e4nv", num_kv_heads=8, head_dim=128),
    case(dtype="bf16", cache="fp8e4nv", num_kv_heads=3, head_dim=112, scale_stride=0),
    case(dtype="fp32", cache="fp8e4nv", num_kv_heads=8, head_dim=128),
]
