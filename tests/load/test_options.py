"""What the arguments choose: dialogues and their times, or a refusal."""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Endpoint
from penstock.load.workloads.driver import Arrivals, ClosedLoop, OpenLoop, gamma_offsets
from penstock.load.workloads.options import (
    add_dataset_arguments,
    add_load_arguments,
    loads_of,
    make_dialogues,
)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_arguments(parser, num_prompts=6)
    add_load_arguments(parser)
    return parser.parse_args(arguments)


def dialogues_of(*arguments: str, endpoint: Endpoint = "completions") -> list[Dialogue]:
    parsed = parse(*arguments)
    return make_dialogues(parsed, endpoint, num_dialogues=parsed.num_prompts, seed=parsed.seed)


@pytest.mark.parametrize("name", ["random", "sharegpt"])
def test_completions_get_token_ids_and_the_others_words(name: str) -> None:
    kinds: dict[Endpoint, type] = {"completions": tuple, "chat": str, "responses": str}
    for endpoint, kind in kinds.items():
        dialogues = dialogues_of("--dataset", name, endpoint=endpoint)
        assert len(dialogues) == 6
        assert {type(dialogue.turns[0].text) for dialogue in dialogues} == {kind}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--num-prompts", "0"), "--num-prompts"),
        (("--dataset", "jsonl"), "--dataset-path"),
    ],
)
def test_datasets_without_sense_are_refused(arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        dialogues_of(*arguments)


def test_loads_follow_from_the_arguments() -> None:
    def arrivals(*arguments: str) -> Arrivals:
        (load,) = loads_of(parse(*arguments))
        return load.arrivals(dialogues_of(), seed=0)

    assert arrivals() == arrivals("--request-rate", "inf") == OpenLoop((0.0,) * 6)
    assert arrivals("--max-concurrency", "3") == ClosedLoop(3)
    rated = arrivals("--request-rate", "4", "--max-concurrency", "2")
    assert isinstance(rated, OpenLoop)
    assert rated.offsets_s[-1] == pytest.approx(6 / 4)
    assert rated.max_concurrency == 2
    sweep = loads_of(parse("--max-concurrency", "4,1,4"))
    assert list(map(str, sweep)) == ["1 in flight", "4 in flight"]
    assert [load.rate for load in loads_of(parse("--request-rate", "2,0.5"))] == [0.5, 2]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_and_end_where_the_rate_says(burstiness: float) -> None:
    offsets_s = gamma_offsets(20_000, rate=8.0, burstiness=burstiness)
    assert offsets_s[-1] == pytest.approx(20_000 / 8)
    gaps_s = [later - earlier for earlier, later in pairwise((0.0, *offsets_s))]
    assert min(gaps_s) >= 0
    # A gamma distribution's coefficient of variation is 1 ÷ √shape.
    assert stdev(gaps_s) / fmean(gaps_s) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert gamma_offsets(9, rate=8.0, seed=1) != gamma_offsets(9, rate=8.0, seed=2)
    even = gamma_offsets(4, rate=2.0, burstiness=math.inf)
    assert even == pytest.approx((0.5, 1.0, 1.5, 2.0))
