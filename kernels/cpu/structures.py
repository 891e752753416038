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
        *_fields("", "num_tokens num_seqs table_stride num_sampled num_gathered"),
        *_fields("token_ids slot_mapping query_start_loc seq_lens block_tables"),
        *_fields("cosines sines rotary_rows sampled_tokens"),
    ]


class Call(ctypes.Structure):
    _fields_: ClassVar = _fields("plan args")


class LinearArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x weight bias residual num_rows", "in_features out_features")


class QuantizeRowsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("bytes scales x num_rows", "size")


class PackInt8Args(ctypes.Structure):
    _fields_: ClassVar = _fields("packed codes scales", "in_features out_features")


class LinearInt8Args(LinearArgs):
    """The fields of `linear`, and one more after them."""

    _fields_: ClassVar = _fields("x_scales")


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
        "scale soft_cap",
    )


class SiluMulArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x num_rows", "size")


class GatherRowsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("y x step", "size")


class SampleTokensArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        "token_ids is_valid logits temperature top_k top_p min_p uniforms num_rows", "vocab_size"
    )


class DrawUniformsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields("uniforms seeds indices positions num_rows")
