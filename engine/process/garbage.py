"""When an engine's processes collect garbage: between steps, since a collection would delay all
streams, and rather while there is no work."""

from __future__ import annotations

import gc

# How many objects may be new before garbage is collected: while there is no work, and beside work.
FEW_OBJECTS, MANY_OBJECTS = 1_000, 100_000
_FULL_EVERY = 100  # collections


def keep_out_of_steps() -> None:
    """Collect garbage only where `collect` is called, and only of objects that are made from now
    on: those made at start-up live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect(num_objects: int) -> None:
    """Collect garbage, between two steps, if more objects than so many are new."""
    num_new, _, num_before = gc.get_count()
    if num_new > num_objects:
        gc.collect(2 if num_before >= _FULL_EVERY else 1)
