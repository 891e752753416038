"""Choosing tokens: vocabularies of every dtype, from small to large, and what goes with them."""

from __future__ import annotations

from compile_case import CompileCase

PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "uniforms_ptr")
UNUSED_BITS = {"fp32": 0, "bf16": 16, "fp16": 13}


def case(
    *,
    dtype: str,
    block: int = 2048,
    num_warps: int = 16,
    is_aligned: bool = True,
    has_masks: bool = False,
) -> CompileCase:
    return CompileCase(
        label=f"{dtype}, {block} at once{'' if is_aligned else ', odd size'}"
        f"{', masks' if has_masks else ''}",
        module="sampling",
        kernel="sample_tokens_kernel",
        signature={
            "token_ids_ptr": "*i64",
            "is_valid_ptr": "*u8",
            "logits_ptr": f"*{dtype}",
            "lists_ptr": f"*{dtype}",
            **dict.fromkeys(PARAMETERS, "*fp64"),
            "masked_ptr": f"*{dtype}",
            "masks_ptr": "*i32",
            "mask_indices_ptr": "*i64",
            "num_words": "i32",
            "size": "i32",
        },
        constexprs={
            "SHIFT": UNUSED_BITS[dtype],
            "BLOCK": block,
            "DEPTH": 16,
            "WAYS": 4,
            "NUM_SPANS": 16,
            "HAS_MASKS": has_masks,
        },
        divisible_by_16=("size",) if is_aligned else (),
        num_warps=num_warps,
    )


CASES = [
    *(case(dtype=dtype) for dtype in UNUSED_BITS),
    *(case(dtype=dtype, has_masks=True) for dtype in UNUSED_BITS),
    case(dtype="bf16", is_aligned=False),
    case(dtype="bf16", block=128, num_warps=4),
    *(
        CompileCase(
            label=f"log-probabilities, {dtype}",
            module="token_logprobs",
            kernel="token_logprobs_kernel",
            signature={
                "logprobs_ptr": "*fp32",
                "ranks_ptr": "*i64",
                "totals_ptr": "*fp32",
                "logits_ptr": f"*{dtype}",
                "token_ids_ptr": "*i64",
                "size": "i32",
            },
            constexprs={"BLOCK": 2048},
            divisible_by_16=("size",),
            num_warps=16,
        )
        for dtype in UNUSED_BITS
    ),
    CompileCase(
        label="uniforms",
        module="draw_uniforms",
        kernel="draw_uniforms_kernel",
        signature={"uniforms_ptr": "*fp64", "draws_ptr": "*i64", "num_rows": "i32"},
        constexprs={"BLOCK": 128},
    ),
]
