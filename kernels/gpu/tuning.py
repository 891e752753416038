"""Launch configurations that were fastest on real GPUs: `tuned.json`, shipped with the kernels.

`python -m penstock.kernels.gpu.tune` writes the table on a GPU; it is never edited by hand:

    {device: {operation: {key: {"BLOCK_N": …, "num_warps": …, …}}}}

A key names a class of shapes; an operation's launcher makes it, and falls back on heuristics if
the table has no entry.
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
    """The fastest known configuration for this process's GPU; None without an entry."""
    return read_table().get(device_name(), {}).get(operation, {}).get(key)


@cache
def read_table() -> Table:
    table: Table = json.loads(TABLE.read_text("utf-8"))
    return table


@cache
def device_name() -> str:
    """The driver's name of the device; `""` without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def write_whole(path: Path, text: str) -> None:
    """Write a file that is complete at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
