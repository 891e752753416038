"""The instruction sets for which the kernels are compiled."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

ISA_VARIABLE = "PENSTOCK_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")

# Best first: the CPU features required, and the compiler flags that enable them.
_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
# Used if present.
_EXTRAS = {"avx512": ("avx512_bf16", "avx512_vnni"), "avx2": ("avx_vnni",)}
ISAS = tuple(_NEEDS)


@dataclass(frozen=True, slots=True)
class Isa:
    """A set of instructions.

    Attributes:
        flags: for the compiler.
    """

    name: str
    flags: tuple[str, ...]


def select_isa() -> Isa:
    """The best one that this CPU supports, or the one named by `PENSTOCK_CPU_ISA`.

    Raises:
        ValueError: the variable names none, or one that this CPU does not have.
    """
    features = _cpu_features()
    usable = [name for name, needs in _NEEDS.items() if features.issuperset(needs)]
    name = os.environ.get(ISA_VARIABLE) or usable[0]
    if name not in usable:
        raise ValueError(f"{ISA_VARIABLE}={name}: this CPU can run {', '.join(usable)}")
    extras = [extra for extra in _EXTRAS.get(name, ()) if extra in features]
    return Isa(name, tuple(f"-m{item.replace('_', '')}" for item in (*_NEEDS[name], *extras)))


def _cpu_features() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64") or not _CPUINFO.exists():
        return frozenset()
    for line in _CPUINFO.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
