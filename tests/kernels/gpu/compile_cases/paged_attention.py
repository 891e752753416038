"""Paged attention, in the configurations that the heuristics choose for each target."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from compile_case import CompileCase

from penstock.kernels.gpu.device_limits import DeviceLimits
from penstock.kernels.gpu.paged_decode import decode_config
from penstock.kernels.gpu.paged_prefill import prefill_config

LIMITS = {
    "sm_90": DeviceLimits(num_processors=132, shared_bytes=227 * 1024),
    "gfx942": DeviceLimits(num_processors=304, shared_bytes=64 * 1024),
}
DTYPES = {
    "bf16": (torch.bfloat16, tl.bfloat16),
    "fp16": (torch.float16, tl.float16),
    "fp32": (torch.float32, tl.float32),
}
OPTIONS = {"sinks_ptr": "*fp32", "soft_cap": "fp32", "window": "i32"}
ALIBI = {"alibi_ptr": "*fp32"}
SCALES = {"key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32"}
PARTS = {"mixed_ptr": "*fp32", "log_sum_ptr": "*fp32"}
GROUP = 4


def attention_case(
    kernel: str,
    target: str,
    dtype: str = "bf16",
    *,
    head_dim: int = 128,
    is_fp8: bool = False,
    has_options: bool = False,
    has_alibi: bool = False,
    is_contiguous: bool = False,
    is_invariant: bool = False,
) -> CompileCase:
    """`kernel` is "decode", in splits, or "prefill"."""
    torch_dtype, tl_dtype = DTYPES[dtype]
    cache = "fp8e4nv" if is_fp8 else dtype
    signature = {
        "query_ptr": f"*{dtype}",
        "key_cache_ptr": f"*{cache}",
        "value_cache_ptr": f"*{cache}",
        "query_start_loc_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "scale": "fp32",
        "query_stride": "i32",
        "slot_stride": "i32",
        "table_stride": "i32",
    }
    absent = OPTIONS | SCALES | ALIBI
    if kernel == "decode":
        signature |= PARTS | {"min_split_len": "i32"}
        absent |= {"output_ptr": ""}
        cache_dtype = torch.float8_e4m3fn if is_fp8 else torch_dtype
        config = decode_config(GROUP, head_dim, cache_dtype, LIMITS[target])
    else:
        signature |= {"output_ptr": f"*{dtype}", "num_seqs": "i32"}
        config = prefill_config(GROUP, head_dim, torch_dtype, LIMITS[target])
    signature |= (OPTIONS if has_options else {}) | (SCALES if is_fp8 else {})
    signature |= ALIBI if has_alibi else {}
    constexprs: dict[str, Any] = {
        "scale_stride": 1,
        "GROUP": GROUP,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "DOT_DTYPE": tl.float16 if is_fp8 else tl_dtype,
        "IS_CONTIGUOUS": is_contiguous,
    }
    if kernel == "prefill":
        constexprs["IS_INVARIANT"] = is_invariant
    features = {"fp8": is_fp8, "options": has_options, "alibi": has_alibi,
                "contiguous": is_contiguous, "invariant": is_invariant}  # fmt: skip
    label = [kernel, dtype, str(head_dim), *(name for name, has in features.items() if has)]
    return CompileCase(
        label=" ".join([*label, target]),
        module=f"paged_{kernel}",
        kernel=f"{kernel}_kernel",
        signature=signature,
        num_warps=config.pop("num_warps"),
        num_stages=config.pop("num_stages"),
        constexprs=constexprs | config | dict.fromkeys(set(absent) - set(signature)),
        divisible_by_16=("query_stride", "slot_stride"),
        targets=(target,),
    )


SHAPES: list[dict[str, Any]] = [
    {},
    {"is_contiguous": True},
    {"head_dim": 80, "has_options": True},
    {"dtype": "fp16", "head_dim": 64},
    {"has_alibi": True},
    {"head_dim": 256},
    {"is_fp8": True},
    {"dtype": "fp32"},
]
MERGE = CompileCase(
    label="merge",
    module="paged_decode",
    kernel="merge_kernel",
    signature={
        "output_ptr": "*bf16",
        **PARTS,
        "query_start_loc_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "window": "i32",
        "min_split_len": "i32",
        "num_splits": "i32",
    },
    constexprs={"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "BLOCK_S": 16},
)
CASES = (
    [MERGE]
    + [
        attention_case(kernel, target, **shape)
        for kernel in ("decode", "prefill")
        for target in LIMITS
        for shape in SHAPES
    ]
    + [
        attention_case("prefill", target, is_invariant=True, has_options=has_options)
        for target in LIMITS
        for has_options in (False, True)
    ]
)
