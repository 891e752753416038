"""The argument structures of `ops.h`, field by field, for ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

_POINTER, _INTEGER, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _fields(pointers: str, integers: str = "", doubles: str = "") -> Sequence[tuple[str, Any]]:
    return [
        *((name, _POINTER) for name in pointers.split()),
        *((name, _INTEGER) for name in integers.split()),
        *((name, _DOUBLE) for name in doubles.split()),
    ]


class Step(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("", "num_tokens num_seqs table_stride"),
        *_fields("token_ids slot_mapping query_start_loc seq_lens block_tables"),
        *_fields("cosines sines rotary_rows"),
    ]


class Call(ctypes.Structure):
    _fields_: ClassVar = _fields("run args")


class LinearArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x weight bias residual num_rows", "in_features out_features")


class EmbedArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y weight step", "size num_rows is_packed")


class RmsNormArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x weight num_rows", "size", "eps")


class RopeStoreArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        "query key_cache value_cache qkv query_norm key_norm step",
        "block_size num_heads num_kv_heads head_dim",
        "eps",
    )


class AttentionArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        "out query key_cache value_cache step",
        "block_size num_heads num_kv_heads head_dim window",
        "scale",
    )


class SiluMulArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x num_rows", "size")


class ArgmaxArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("best index x num_rows", "size")
