"""The engine's process, run by the supervisor as `python -m penstock.engine.process`.

More than a quarter of torch's import is `torch._meta_registrations`: what the results of operations
look like on the device "meta", in Python, for compilers and for models through transformers. Models
of our own need none of it; what makes their parameters has it in C++. So a process on a CPU leaves
the module out of torch's import, and imports it with the first module that may need it.

What imports make stays: collections in between would look through it again and again, for nothing.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from penstock.engine.process.template import has_gpu

_TORCH, _LATER = "torch", "torch._meta_registrations"
# `_decomp` and `_refs` can be imported only by way of it.
_NEED_IT = {"torch._decomp", "torch._dynamo", "torch._refs", "transformers"}


class MetaRegistrationsLater(MetaPathFinder):
    """Finds an empty module in their place while torch is imported; then imports them before what
    needs them."""

    _is_early = False  # torch is not imported yet

    def import_torch(self) -> None:
        """Import torch without them; changes nothing if torch is imported already."""
        if _TORCH in sys.modules:
            return
        self._is_early = True
        sys.meta_path.insert(0, self)
        torch = importlib.import_module(_TORCH)
        self._is_early = False
        if sys.modules.pop(_LATER, None) is not None:
            delattr(torch, _LATER.rpartition(".")[2])

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._is_early and name == _LATER:
            return ModuleSpec(name, _AsItIs(ModuleType(name)))
        if self._is_early or name not in _NEED_IT:
            return None
        sys.meta_path.remove(self)
        importlib.import_module(_LATER)
        module = sys.modules.get(name)
        if module is None:
            return None
        # It has just been imported on the way, and must not be a second time.
        spec = ModuleSpec(name, _AsItIs(module))
        module.__spec__ = spec  # importlib takes that of a module that is there
        return spec


class _AsItIs(Loader):
    """Loads a module that exists."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def main() -> int:
    """Run the engine; the process's exit code."""
    gc.disable()
    if not has_gpu():
        MetaRegistrationsLater().import_torch()
    from penstock.engine.process.server import main as run_engine

    gc.freeze()
    gc.enable()
    return run_engine()


if __name__ == "__main__":
    sys.exit(main())
