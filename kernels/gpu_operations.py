"""The only place that imports Triton, and only for tensors on a GPU, so a CPU does not need it."""

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
