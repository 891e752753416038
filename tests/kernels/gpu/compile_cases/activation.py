"""Activations, each of them in each dtype, with a gate and without."""

from __future__ import annotations

from compile_case import CompileCase

CASES = [
    CompileCase(
        label=f"{activation}{', gated' * is_gated}, {dtype}, {size}",
        module="activation",
        kernel="activation_kernel",
        signature={"active_ptr": f"*{dtype}", "x_ptr": f"*{dtype}"},
        constexprs={"SIZE": size, "ACTIVATION": activation, "IS_GATED": is_gated, "BLOCK": 1024},
    )
    for activation, is_gated, dtype, size in [
        ("silu", True, "bf16", 14336),
        ("silu", True, "fp16", 4864),
        ("gelu_tanh", True, "fp32", 1001),
        ("gelu_tanh", False, "bf16", 14336),
        ("gelu", True, "fp16", 4864),
        ("gelu", False, "bf16", 14336),
        ("relu", False, "bf16", 14336),
        ("relu2", False, "bf16", 14336),
    ]
]
