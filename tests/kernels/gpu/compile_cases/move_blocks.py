"""Moving blocks: gather, scatter and copies, in wide and narrow words."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

STRIDES = ("to_block_stride", "to_plane_stride", "from_block_stride", "from_plane_stride")


def case(label: str, *, word: str, ids: tuple[str, ...], is_aligned: bool = True) -> CompileCase:
    signature = {"to_ptr": f"*{word}", "from_ptr": f"*{word}", "num_words": "i32"}
    constexprs: dict[str, Any] = {"BLOCK": 1024}
    for name in ("to_ids_ptr", "from_ids_ptr"):
        if name in ids:
            signature[name] = "*i64"
        else:
            constexprs[name] = None
    return CompileCase(
        label=label,
        module="move_blocks",
        kernel="move_planes_kernel",
        signature=signature | dict.fromkeys(STRIDES, "i32"),
        constexprs=constexprs,
        divisible_by_16=(*STRIDES, "num_words") if is_aligned else (),
    )


CASES = [
    case("gather", word="i64", ids=("from_ids_ptr",)),
    case("scatter", word="i64", ids=("to_ids_ptr",)),
    case("copy", word="i64", ids=("to_ids_ptr", "from_ids_ptr")),
    case("gather of odd sizes", word="u8", ids=("from_ids_ptr",), is_aligned=False),
]
