"""How far steps have come while they compute, for the watchdog.

A step says nothing before its end, and on a CPU that may be minutes away; what it is made of shows
that it gets on: the calls of the kernels' pool or, where torch computes, the layers.
"""

from __future__ import annotations

from penstock.engine.models.decoder import Decoder
from penstock.engine.models.fast_path import LanguageModel
from penstock.kernels.cpu.library import CpuLibrary


class Progress:
    """
    Args:
        model: as it runs.
        library: the CPU's kernels; None where there are none.
    """

    def __init__(self, model: LanguageModel, library: CpuLibrary | None) -> None:
        self._library = library
        self._num_layers = 0
        # On a GPU layers are only launched, and a step is no minutes.
        if isinstance(model, Decoder) and model.device.type == "cpu":
            for layer in model.layers:
                layer.register_forward_hook(self._count_layer)

    def num_parts_done(self) -> int:
        """Of all steps so far; more than before where a step gets on."""
        return self._num_layers + (0 if self._library is None else self._library.num_calls)

    def describe(self) -> str:
        """What the threads of the CPU's pool do now, in words."""
        return "none" if self._library is None else self._library.describe_pool()

    def _count_layer(self, *_: object) -> None:
        self._num_layers += 1
