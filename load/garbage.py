"""Keeping the garbage collector out of what is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """What is there now is not searched for garbage meanwhile: that would be a pause.

    The server does the same once it has started.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
