"""Adapters whose reading has ended engines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import QUARANTINE_S, Quarantine
from penstock.engine.request import Adapter

ADAPTER = Adapter(name="mine", path="/mine", digest="1" * 64)
_KILLER = """
import os, sys
from pathlib import Path
from penstock.engine.lora.quarantine import Quarantine
from penstock.engine.request import Adapter
with Quarantine(Path(sys.argv[1])).reading(Adapter(name="mine", path="/mine", digest="1" * 64)):
    os.kill(os.getpid(), 9)
"""


def _die_reading(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLER, str(folder)], check=False)
    assert ended.returncode == -9


def test_what_has_ended_two_engines_is_refused_until_an_hour_later(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "marks")
    _die_reading(tmp_path / "marks")
    _die_reading(tmp_path / "marks")
    with (
        pytest.raises(InvalidRequestError, match=r"'mine' is not loaded: .* ended 2 engines"),
        quarantine.reading(ADAPTER),
    ):
        raise AssertionError("it is read")
    with quarantine.reading(Adapter(name="other", path="/", digest="2" * 64)):
        pass
    for mark in (tmp_path / "marks").iterdir():
        os.utime(mark, (0, time.time() - QUARANTINE_S - 1))
    with quarantine.reading(ADAPTER):
        pass


def test_one_death_may_be_anybodys_fault(tmp_path: Path) -> None:
    _die_reading(tmp_path)
    with Quarantine(tmp_path).reading(ADAPTER):
        pass
    assert not list(tmp_path.iterdir())  # it was read, and that ended nothing
    _die_reading(tmp_path)
    with Quarantine(tmp_path).reading(ADAPTER):
        pass


def test_engines_that_read_it_at_once_are_not_dead(tmp_path: Path) -> None:
    quarantines = [Quarantine(tmp_path) for _ in range(4)]
    with contextlib.ExitStack() as reading:
        for quarantine in quarantines:
            reading.enter_context(quarantine.reading(ADAPTER))
        assert len(list(tmp_path.iterdir())) == 4
    assert not list(tmp_path.iterdir())


def test_what_is_refused_in_order_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="damaged"), Quarantine(tmp_path).reading(ADAPTER):
        raise ValueError("damaged")
    assert not list(tmp_path.iterdir())


def test_without_a_place_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Quarantine(tmp_path / "file").reading(ADAPTER):
        pass
