"""One kernel as it is to be compiled ahead of time: a line in a `CASES` list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TARGETS = ("sm_90", "gfx942")


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """What a launch would settle.

    Attributes:
        label: unique among the cases of its file.
        module: below `penstock.kernels.gpu`.
        kernel: the name of a `@triton.jit` function there.
        signature: the type of every argument that is no constexpr, as Triton spells it:
            "*bf16" (a pointer), "*fp8e4nv", "i32", "i64", "fp32".
        constexprs: the other arguments: `tl.constexpr` ones, and those that are None or 1
            (a launch makes constants of both).
        divisible_by_16: integers a launch would find to be so (strides); pointers always are.
        targets: those of TARGETS that it is meant for.
    """

    label: str
    module: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[str, ...] = TARGETS
