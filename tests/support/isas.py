"""The instruction sets that this CPU can run."""

from __future__ import annotations

import os

from penstock.kernels.cpu.isa import ISA_VARIABLE, ISAS, select_isa


def usable_isas() -> list[str]:
    """Those of ISAS from what this CPU selects by itself downwards."""
    chosen = os.environ.pop(ISA_VARIABLE, None)
    try:
        return list(ISAS[ISAS.index(select_isa().name) :])
    finally:
        if chosen is not None:
            os.environ[ISA_VARIABLE] = chosen
