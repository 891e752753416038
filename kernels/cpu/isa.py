"""The instruction sets for which the kernels are compiled."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ISA_VARIABLE = "PENSTOCK_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # as others than Linux call them

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c")
_AVX512_EXTRAS = ("avx512_bf16", "avx512_vnni")

# For each machine, best first: the CPU features required; all have `portable`.
_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "amx": (*_AVX512, *_AVX512_EXTRAS, "amx_tile", "amx_bf16", "amx_int8"),
        "avx512": _AVX512,
        "avx2": ("avx2", "fma", "f16c"),
    },
    "aarch64": {"neon": ("dotprod",)},
}
# Used if present.
_EXTRAS = {
    "avx512": _AVX512_EXTRAS,
    "avx2": ("avx_vnni",),
    "neon": ("bf16", "i8mm"),
}
# What a wheel has compiled kernels for, best first: processors have these extras together, or none.
_SHIPPED = {
    "x86_64": {
        "amx": ("amx", ()),
        "avx512_bf16": ("avx512", _AVX512_EXTRAS),
        "avx512_vnni": ("avx512", ("avx512_vnni",)),
        "avx512": ("avx512", ()),
        "avx2_vnni": ("avx2", ("avx_vnni",)),
        "avx2": ("avx2", ()),
        "portable": ("portable", ()),
    },
    "aarch64": {
        "neon_bf16": ("neon", ("bf16", "i8mm")),
        "neon": ("neon", ()),
        "portable": ("portable", ()),
    },
}
# Where Linux's names in /proc/cpuinfo, or torch's, are not those of the compiler's flags.
_ALIASES = {
    "asimddp": "dotprod",
    "avx512_f": "avx512f",
    "avx512_bw": "avx512bw",
    "avx512_vl": "avx512vl",
    "avx512_dq": "avx512dq",
    "fma3": "fma",
}


@dataclass(frozen=True, slots=True)
class Isa:
    """A set of instructions.

    Attributes:
        flags: for GCC and Clang.
    """

    name: str
    flags: tuple[str, ...]


def this_machine() -> str:
    """`x86_64`, `aarch64`, or another name of Python's for this processor's family."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


def usable_isas() -> tuple[str, ...]:
    """The names of those that this CPU can run, best first."""
    features = _cpu_features()
    needs = _NEEDS.get(this_machine(), {})
    return (*(name for name, needed in needs.items() if features.issuperset(needed)), "portable")


def select_isa() -> Isa:
    """The best one that this CPU supports, or the one named by `PENSTOCK_CPU_ISA`.

    Raises:
        ValueError: the variable names none, or one that this CPU does not have.
    """
    usable = usable_isas()
    name = os.environ.get(ISA_VARIABLE) or usable[0]
    if name not in usable:
        raise ValueError(f"{ISA_VARIABLE}={name}: this CPU can run {', '.join(usable)}")
    features = _cpu_features()
    extras = [extra for extra in _EXTRAS.get(name, ()) if extra in features]
    return _isa(this_machine(), name, extras)


def shipped_isas(machine: str) -> dict[str, Isa]:
    """The variants that the library in a wheel for this machine has, by name, best first."""
    return {
        variant: _isa(machine, name, extras)
        for variant, (name, extras) in _SHIPPED.get(machine, {}).items()
    }


def best_shipped(isa: Isa) -> str | None:
    """The variant of a shipped library for this CPU's set of instructions."""
    for variant, shipped in shipped_isas(this_machine()).items():
        if shipped.name == isa.name and _features_of(shipped) <= _features_of(isa):
            return variant
    return None


def _isa(machine: str, name: str, extras: list[str] | tuple[str, ...]) -> Isa:
    features = (*_NEEDS.get(machine, {}).get(name, ()), *extras)
    if machine == "aarch64" and features:  # these have one flag for all
        return Isa(name, (f"-march=armv8.2-a+{'+'.join(features)}",))
    joined = (name.replace("_", "-" if name.startswith("amx") else "") for name in features)
    return Isa(name, tuple(f"-m{feature}" for feature in joined))


def _features_of(isa: Isa) -> set[str]:
    return set("+".join(isa.flags).split("+"))


def _cpu_features() -> frozenset[str]:
    names = _features_by_system() or _by_torch()
    features = frozenset(_ALIASES.get(name, name) for name in names)
    return features if "amx_tile" not in features or _may_use_tiles() else features - {"amx_tile"}


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for AMX's registers, for all threads of this process."""
    if platform.system() != "Linux":
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # as in the kernel's arch/x86/xstate.rst
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def _features_by_system() -> list[str]:
    """Empty on another system than Linux, and where an emulator shows the host's processor."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return []
    name_of_list = {"x86_64": "flags", "aarch64": "Features"}.get(this_machine())
    for line in lines:
        name, _, features = line.partition(":")
        if name.strip() == name_of_list:
            return features.split()
    return []


def _by_torch() -> list[str]:
    import torch  # not needed to build a wheel

    # 2.10 has none.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return [name for name, has in capabilities.items() if has is True]
