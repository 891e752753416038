"""Gated activations, each of them in each dtype."""

from __future__ import annotations

from compile_case import CompileCase

CASES = [
    CompileCase(
        label=f"{activation}, {dtype}, {size}",
        module="gated_activation",
        kernel="gated_activation_kernel",
        signature={"gated_ptr": f"*{dtype}", "gate_up_ptr": f"*{dtype}"},
        constexprs={"SIZE": size, "ACTIVATION": activation, "BLOCK": 1024},
    )
    for activation in ("silu", "gelu_tanh", "gelu_erf")
    for dtype, size in [("bf16", 14336), ("fp16", 4864), ("fp32", 1001)]
]
