"""Launch configurations that were fastest on real cards: `tuned.json`, shipped with the kernels.

The table is written by `python -m penstock.load.gpu.tune` on a card, never by hand:

    {device: {operation: {key: {"BLOCK_N": …, "num_warps": …, …}}}}

A key names a class of shapes; an operation's launcher makes it, and where the table has no entry
its heuristics choose.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).with_name("tuned.json")

Config = dict[str, int]
Table = dict[str, dict[str, dict[str, Config]]]


def tuned(operation: str, key: str) -> Config | None:
    """What is known to be fastest on this process's GPU; None where nobody has tuned."""
    return read_table().get(device_name(), {}).get(operation, {}).get(key)


@cache
def read_table() -> Table:
    table: Table = json.loads(TABLE.read_text("utf-8"))
    return table


@cache
def device_name() -> str:
    """As the driver names it; `""` where there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
