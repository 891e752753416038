"""Turning queries and keys and storing: with and without norms, every kind of cache."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

from penstock.kernels.gpu.rotary_store_kv import config_for


def case(
    *, dtype: str, cache: str, heads: tuple[int, int], head_dim: int, has_norm: bool = False
) -> CompileCase:
    signature = {
        "query_ptr": f"*{dtype}",
        "key_cache_ptr": f"*{cache}",
        "value_cache_ptr": f"*{cache}",
        "qkv_ptr": f"*{dtype}",
        "cos_ptr": f"*{dtype}",
        "sin_ptr": f"*{dtype}",
        "slots_ptr": "*i64",
        "eps": "fp32",
    }
    config = config_for(head_dim)
    num_warps = config.pop("num_warps")
    constexprs: dict[str, Any] = {
        "OFFSET": 0.0,
        "NUM_HEADS": heads[0],
        "NUM_KV_HEADS": heads[1],
        "HALF": head_dim // 2,
        **config,
    }
    for name in ("query_norm_ptr", "key_norm_ptr"):
        if has_norm:
            signature[name] = f"*{dtype}"
        else:
            constexprs[name] = None
    for name in ("key_scale", "value_scale"):
        if cache == dtype:
            constexprs |= {f"{name}_ptr": None, f"{name}_stride": 0}
        else:
            signature[f"{name}_ptr"] = "*fp32"
            constexprs[f"{name}_stride"] = 1
    return CompileCase(
        label=f"{dtype} into {cache}, heads {heads} of {head_dim}{', norm' * has_norm}",
        module="rotary_store_kv",
        kernel="rotary_store_kv_kernel",
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
    )


CASES = [
    case(dtype="bf16", cache="bf16", heads=(32, 8), head_dim=128),
    case(dtype="bf16", cache="bf16", heads=(32, 8), head_dim=128, has_norm=True),
    case(dtype="fp16", cache="fp16", heads=(15, 5), head_dim=80),
    case(dtype="fp32", cache="fp32", heads=(8, 1), head_dim=256, has_norm=True),
    case(dtype="bf16", cache="fp8e4nv", heads=(32, 8), head_dim=128, has_norm=True),
    case(dtype="fp32", cache="fp8e4nv", heads=(7, 1), head_dim=112),
]
