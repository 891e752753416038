"""Where triton is imported, and only when a tensor lies on a GPU: a CPU needs none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def gpu_operation(name: str, module: str | None = None) -> Callable[..., Any]:
    """The launcher `<name>_triton` of `kernels.gpu.<module>`; the module is `name` if not given.

    It takes the arguments of the public operation `name`.
    """
    found = importlib.import_module(f"penstock.kernels.gpu.{module or name}")
    launcher: Callable[..., Any] = getattr(found, f"{name}_triton")
    return launcher
