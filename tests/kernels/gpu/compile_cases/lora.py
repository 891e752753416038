"""Low-rank updates, shrinking and expanding."""

from __future__ import annotations

from compile_case import CompileCase


def shrink(dtype: str, rank: int) -> CompileCase:
    pointers = dict.fromkeys(("hidden_ptr", "x_ptr", "a_ptr"), f"*{dtype}")
    return CompileCase(
        label=f"shrink, {dtype}, {rank}",
        module="lora",
        kernel="lora_shrink_kernel",
        signature={
            **pointers, "order_ptr": "*i64", "groups_ptr": "*i64", "size": "i32", "rank": "i32",
        },
        constexprs={"ROWS": 16, "RANK": max(16, rank), "BLOCK_K": 64},
        divisible_by_16=("size",),
    )  # fmt: skip


def expand(dtype: str, rank: int) -> CompileCase:
    pointers = dict.fromkeys(("y_ptr", "hidden_ptr", "b_ptr"), f"*{dtype}")
    return CompileCase(
        label=f"expand, {dtype}, {rank}",
        module="lora",
        kernel="lora_expand_kernel",
        signature={
            **pointers, "scales_ptr": "*fp32", "order_ptr": "*i64", "groups_ptr": "*i64",
            "y_stride": "i32", "num_outputs": "i32", "rank": "i32",
        },
        constexprs={"ROWS": 16, "RANK": max(16, rank), "BLOCK_N": 64},
        divisible_by_16=("y_stride", "num_outputs"),
    )  # fmt: skip


CASES = [
    case(dtype, rank)
    for case in (shrink, expand)
    for dtype, rank in (("bf16", 16), ("fp16", 8), ("bf16", 256), ("fp32", 64))
]
