"""The table of launch configurations: what it says is used; the tuner writes what is fastest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tests.support.gpu_small import SMALL_ATTENTION
from torch import Tensor

from penstock.kernels.gpu import paged_attention, tune, tuning
from penstock.kernels.gpu.measuring import Draw, Timer, seconds_of
from penstock.kernels.gpu.sampling import config_for
from penstock.kernels.gpu.tune import DECODE, Run, Tunable, Tuner, tunables
from penstock.load.gpu.sections import FEW_DECODE

KEY = "head_dim 32 group 2 block_size 16 float16 float16 paged"
OWN, FAST, SLOW, WRONG = ({"BLOCK_N": n} for n in (0, 1, 2, 3))
SECONDS = {0: 1.0, 1: 0.5, 2: 2.0, 3: 0.1}


@pytest.fixture
def small(device: str) -> Tuner:
    where = torch.device(device)
    return Tuner(
        draw=Draw(where, torch.float16),
        timer=Timer(where, flush_bytes=1 << 16, num_repeats=1),
        attention=SMALL_ATTENTION,
        hidden_size=32,
        intermediate_size=64,
        num_sampled=2,
        vocab_sizes=(96,),
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty table that the kernels read, for a card called `card`."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(tuning, "read_table", lambda: found)
    monkeypatch.setattr(tuning, "device_name", lambda: "card")
    return found


def test_the_shipped_table_is_one():
    """Entries come from `python -m penstock.kernels.gpu.tune`, on the device they are for."""
    for operations in tuning.read_table().values():
        assert operations.keys() <= {
            "linear_quantized", "paged_decode", "paged_prefill", "sample_tokens"
        }  # fmt: skip
        for configs in operations.values():
            for config in configs.values():
                assert all(isinstance(value, int) for value in config.values())


def test_only_this_device_operation_and_key_count(table):
    table["card"] = {"paged_decode": {"key": {"BLOCK_N": 32}}}
    table["other"] = {"paged_decode": {"else": {"BLOCK_N": 64}}}
    assert tuning.tuned("paged_decode", "key") == {"BLOCK_N": 32}
    assert tuning.tuned("paged_decode", "else") is None
    assert tuning.tuned("paged_prefill", "key") is None


def test_a_launcher_takes_what_was_tuned(table, small, monkeypatch):
    taken = []
    decode = paged_attention.decode

    def spy(output: Tensor, arguments: Any, layout: Any, config: Any, **options: Any) -> None:
        taken.append(config)
        decode(output, arguments, layout, config, **options)

    monkeypatch.setattr(paged_attention, "decode", spy)
    tunable = next(tunables(small))
    assert (tunable.operation, tunable.key) == ("paged_decode", KEY)
    run = next(tunable.runs())
    own = run()
    table["card"] = {"paged_decode": {KEY: {"BLOCK_N": 32, "num_warps": 2}}}
    torch.testing.assert_close(run(), own, rtol=0, atol=2e-3)
    assert taken[1] == {**taken[0], "BLOCK_N": 32, "num_warps": 2}


def test_sampling_takes_what_was_tuned(table):
    own = config_for(5003)
    table["card"] = {"sample_tokens": {"5003": {**own, "BLOCK": 2048}}}
    assert config_for(5003) == {**own, "BLOCK": 2048}


def test_every_class_has_a_key_of_its_own(small):
    classes = list(tunables(small))
    names = [str(tunable) for tunable in classes]
    assert len(set(names)) == len(names) > 10
    for word in (
        "4 bits float16 few rows",
        "bytes float16 many rows",
        "contiguous",
        "float8_e4m3fn",
        "sample_tokens",
        "paged_prefill",
        "block_size 8",
    ):
        assert any(word in name for name in names), word
    assert all(tunable.candidates for tunable in classes)
    assert all(config in (None, *DECODE) for config in FEW_DECODE)


# -- the tuner --------------------------------------------------------------------------------


def stub_runs(is_better: bool) -> Iterator[Run]:
    """Three shapes, in the last of which the fast one may be no faster than the launcher's own."""
    for is_fast in (True, True, is_better):

        def run(config: dict[str, int] = OWN, is_fast: bool = is_fast) -> Tensor:
            run.seconds = SECONDS[config["BLOCK_N"]] if is_fast else 1.0  # type: ignore[attr-defined]
            return torch.full((2, 4), 2.0 if config == WRONG else 1.0)

        yield run


class StubTimer:
    def median_s(self, call: Any) -> float:
        call()
        run = getattr(call, "func", call)
        seconds: float = run.seconds
        return seconds


def stub(*, is_better: bool = True) -> Tunable:
    return Tunable(
        operation="paged_decode",
        key="key",
        candidates=[SLOW, FAST, WRONG],
        runs=lambda: stub_runs(is_better),
    )


def test_the_fastest_that_is_right_wins(small):
    small.timer = StubTimer()
    config, ratio = tune.best(small, stub(), [SLOW, FAST, WRONG])
    assert config == FAST
    assert ratio == pytest.approx(0.5)
    assert tune.best(small, stub(), [SLOW])[1] == pytest.approx(2.0)


def test_all_shapes_of_a_class_count(small):
    small.timer = StubTimer()
    config, ratio = tune.best(small, stub(is_better=False), [SLOW, FAST])
    assert config == FAST
    assert ratio == pytest.approx(0.25 ** (1 / 3))


def test_a_configuration_beyond_the_device_never_wins(small, monkeypatch):
    def too_large(call: Any) -> float:
        raise triton.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(small.timer, "median_s", too_large)
    assert seconds_of(small.timer, lambda: None) == float("inf")


def test_a_table_is_added_to_not_replaced(small, tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"other card": {"paged_decode": {"key": {"BLOCK_N": 9}}}}))
    monkeypatch.setattr(tune, "device_name", lambda: "card")
    monkeypatch.setattr(tune, "tunables", lambda _: iter([stub()]))
    small.timer = StubTimer()
    tune.tune(small, path)
    found = json.loads(path.read_text())
    assert found["card"] == {"paged_decode": {"key": FAST}}
    assert found["other card"] == {"paged_decode": {"key": {"BLOCK_N": 9}}}


def test_what_gains_nothing_is_not_kept(small, tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    slow = stub()
    monkeypatch.setattr(
        tune,
        "tunables",
        lambda _: iter([Tunable(operation="x", key="y", candidates=[SLOW], runs=slow.runs)]),
    )
    small.timer = StubTimer()
    tune.tune(small, path)
    assert json.loads(path.read_text()) == {}


@pytest.mark.exhaustive
def test_it_tunes_the_kernels_themselves(small, tmp_path: Path, capsys):
    tune.tune(small, tmp_path / "tuned.json", max_classes=6, max_candidates=1)
    printed = capsys.readouterr().out
    assert printed.count("takes") == 6
    assert "wrong" not in printed
