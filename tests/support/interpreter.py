"""Triton's interpreter: kernels run on a CPU, in numpy, slowly."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def interpret_kernels() -> None:
    """Interpret every kernel of this process; called before anything imports triton."""
    assert "triton" not in sys.modules, "triton has chosen already"
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        """numpy 2.4 no longer makes a number of an array of one, as triton 3.6 asks it to for the
        bounds of a loop."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
