"""The structures of `ops.h` for ctypes, read from the header: it alone declares them."""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure
from typing import TypeAlias

from torch import Tensor

# A tensor, structure or counter stands for its address, None for a null pointer.
Argument: TypeAlias = Tensor | Structure | ctypes.c_int64 | float | None

_ADDRESSED = (Structure, ctypes.c_int64)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCTURE = re.compile(r"^struct (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_TYPE = re.compile(r"\s*(?:const )?((?:struct )?\w+)")
_MEMBER = re.compile(r"(\*?)(\w+)\s*(?:,|$)")


class Call(Structure):
    """`struct call` of `pool.h`."""

    _fields_ = (("plan", ctypes.c_void_p), ("args", ctypes.c_void_p))


def read_structures(header: str) -> dict[str, type[Structure]]:
    """The structures that a C header declares, by name. A member is a pointer, an int64_t, a double
    or a structure declared above, whose members count as the outer one's own.

    Raises:
        KeyError: a member of another type.
    """
    types: dict[str, type] = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}
    structures = {}
    for name, body in _STRUCTURE.findall(_COMMENT.sub("", header)):
        fields = [
            (member, ctypes.c_void_p if star else types[kind])
            for declaration in body.split(";")[:-1]
            for kind in _TYPE.match(declaration).groups()  # type: ignore[union-attr]
            for star, member in _MEMBER.findall(declaration)
        ]
        inner = [member for member, kind in fields if issubclass(kind, Structure)]
        # Without a dictionary, so that no member can be misspelt.
        members = {"__slots__": (), "_anonymous_": inner, "_fields_": fields}
        made = type(name, (Structure,), members)
        structures[name] = types[f"struct {name}"] = made
    return structures


def plain(value: Argument) -> float | None:
    """An argument in the form that ctypes takes: a tensor or a structure by its address."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, _ADDRESSED) else value
