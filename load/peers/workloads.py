"""The requests of each workload: the same for all rivals, drawn from a seed.

    single          one stream, 128 tokens in and 128 out, one request after the other
    c8, c32         8 and 32 in flight, lognormal lengths, in the mean 160 in and 128 out
    prefill         prompts of 2,000 tokens, one after the other; their tokens count
    front128        128 short streams: on a tiny model, the cost of the front end

Prompts are token ids, so that no tokenizer is involved.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.load.client.records import Dialogue, Turn
from penstock.load.peers import models
from penstock.load.workloads.datasets import Lengths, RandomLengths, ShareGpt, TokenIds


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    concurrency: int
    dialogues: tuple[Dialogue, ...]

    @property
    def turns(self) -> list[Turn]:
        """The only one of each dialogue."""
        return [dialogue.turns[0] for dialogue in self.dialogues]


class Plan(NamedTuple):
    """How many requests make a cell of some seconds on a model of this size, and what a run
    without flags asks of it: the rest would only take time."""

    num_single: int
    num_c8: int
    num_c32: int
    rounds: int
    workloads: tuple[str, ...]


WORKLOADS = ("single", "c8", "c32", "prefill", "front128")
PLANS: Mapping[str, Plan] = {
    "T": Plan(8, 48, 96, 2, ("front128",)),
    "S": Plan(8, 32, 64, 2, ("single", "c8", "c32")),
    "M": Plan(2, 12, 32, 1, ("single", "c8", "c32")),
    "GPT2": Plan(4, 16, 32, 1, ("single", "c8")),
    "MOE": Plan(8, 16, 32, 1, ("single", "c8")),
}
PLAN_OF_FILES = Plan(4, 16, 32, 3, ("single", "c8", "c32", "prefill"))


def plan_of(model: str) -> Plan:
    return PLANS.get(model, PLAN_OF_FILES)


def make(name: str, model: str) -> Workload:
    """A workload for a model, the same at every call."""
    plan, ids = plan_of(model), models.word_ids(model)
    seed = zlib.crc32(f"{model} {name}".encode())
    if name in ("c8", "c32"):
        lognormal = ShareGpt(
            num_dialogues=plan.num_c8 if name == "c8" else plan.num_c32,
            prompt_mean=160,
            output_mean=128,
            sigma=0.65,
            shortest=16,
            max_input_tokens=512,
            max_output_tokens=256,
            seed=seed,
        )
        dialogues = lognormal.make(TokenIds(ids))
        return Workload(name, int(name.removeprefix("c")), tuple(dialogues))
    concurrency, num, num_in, num_out = {
        "single": (1, plan.num_single, 128, 128),
        "prefill": (1, plan.num_single, 2000, 2),
        "front128": (128, 256, 32, 96),
    }[name]
    return _fixed(name, ids, concurrency, num, num_in, num_out, seed=seed)


def warm_up(model: str, concurrency: int) -> Workload:
    """A short workload with tokens of its own, so that no cache finds them again."""
    ids = models.word_ids(model)
    return _fixed("warm", ids, concurrency, concurrency, 64, 8, seed=concurrency)


def _fixed(
    name: str, ids: range, concurrency: int, num: int, num_in: int, num_out: int, *, seed: int
) -> Workload:
    lengths = Lengths.fixed(num_in), Lengths.fixed(num_out)
    dataset = RandomLengths(
        num_dialogues=num, input_len=lengths[0], output_len=lengths[1], seed=seed
    )
    return Workload(name, concurrency, tuple(dataset.make(TokenIds(ids))))
