"""A setting is declared once, and everything else follows from that."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.engine.settings.declaration import (
    Group,
    Need,
    Part,
    Section,
    Setting,
    default_of,
    others_of,
    setting,
    settings_of,
    take_twins,
)
from penstock.engine.settings.kinds import COUNT, JSON, whole
from penstock.gateway.app import _engine_pool, _service_settings
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.arguments import SettingsParser
from penstock.gateway.launch.cli import main
from penstock.gateway.launch.settings import ENGINE, SERVE, SERVE_SETTINGS, resolve_settings
from penstock.gateway.storage.conversations.store import DEFAULT_TTL_S

from ...support import options_document

_MOST_IN_HELP = 60
_SECTIONS = dict.fromkeys((*SERVE, *ENGINE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cellar(Section):
    """All that a new setting takes."""

    max_barrels: int = setting(
        12, Group.MEMORY, "barrels in the cellar", whole(1, 99), aliases=("--casks",),
        switches={"dry": 1}, needs=(Need(("has_door",), "barrels are wide"),),
    )  # fmt: skip
    has_door: bool = setting(True, Group.MEMORY, "a door", is_daily=True)
    wines: str | None = setting(
        None, Group.MEMORY, "which", JSON,
        parts={"red-wines": Part("red", COUNT), "white-wines": Part("white", JSON)},
    )  # fmt: skip


CELLAR = settings_of(Cellar)


def read(*words: str, **variables: str) -> dict[str, Any]:
    parser = SettingsParser(prog="cellar")
    parser.add_settings(CELLAR, model="which")
    return resolve_settings(vars(parser.parse_args(words)), variables, settings=CELLAR)


def test_a_field_is_option_variable_key_help_row_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read()["max_barrels"] == 12
    assert read("--max-barrels", "3")["max_barrels"] == 3
    assert read("--max_barrels=3")["max_barrels"] == read("--casks", "3")["max_barrels"] == 3
    assert read(PENSTOCK_MAX_BARRELS="4")["max_barrels"] == 4
    file = tmp_path / "cellar.toml"
    for key in ("max-barrels", "max_barrels", "casks"):
        file.write_text(f"{key} = 5")
        assert read("--config", str(file))["max_barrels"] == 5
    assert Cellar.of(read("--max-barrels", "3")) == Cellar(max_barrels=3)

    with pytest.raises(ConfigError, match=r"^--max-barrels must be a whole number from 1 to 99"):
        Cellar(max_barrels=100)
    with pytest.raises(ConfigError, match=r"^PENSTOCK_MAX_BARRELS must be a whole number from 1"):
        read(PENSTOCK_MAX_BARRELS="100")
    with pytest.raises(SystemExit):
        read("--max-barrels", "100")
    assert "--max-barrels must be a whole number from 1 to 99, not '100'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read("--max-barels", "1")
    assert "unknown option --max-barels (did you mean --max-barrels?)" in capsys.readouterr().err

    with pytest.raises(SystemExit):
        read("--help=all")
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-barrels, --casks N barrels in the cellar; --dry: 1 (default: 12)" in text
    row = "| `--max-barrels`, `--casks`, `--dry` | 12 |  | barrels in the cellar; `--dry`: `1` |"
    assert row in options_document.table(CELLAR, ())


def test_what_goes_together_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"^--max-barrels 3 needs --has-door: barrels are wide"):
        Cellar(max_barrels=3, has_door=False)
    with pytest.raises(ConfigError, match="needs --has-door"):
        read("--no-has-door", "--max-barrels", "3")
    assert Cellar(has_door=False).max_barrels == 12


def test_a_switch_stands_for_a_value() -> None:
    assert read("--dry") == {"max_barrels": 1, "has_door": True, "wines": None}
    assert read("--no-dry", PENSTOCK_DRY="yes")["max_barrels"] == 12
    with pytest.raises(ConfigError, match="--dry means --max-barrels 1: it cannot be used with"):
        read("--dry", PENSTOCK_MAX_BARRELS="2")


def test_a_part_stands_for_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cellar.yaml"
    file.write_text("wines: {rose: 1, red: 2}\nwhite-wines: {dry: 3}")
    found = read("--config", str(file), "--red-wines", "4")["wines"]
    assert json.loads(found) == {"rose": 1, "red": 4, "white": {"dry": 3}}
    assert json.loads(read("--white-wines.dry", "5")["wines"]) == {"white": {"dry": 5}}
    assert json.loads(read(PENSTOCK_RED_WINES="6")["wines"]) == {"red": 6}
    with pytest.raises(ConfigError, match=r"^PENSTOCK_RED_WINES must be a whole number, 1 or more"):
        read(PENSTOCK_RED_WINES="none")
    with pytest.raises(SystemExit):
        read("--red-wines", "0")
    assert "--red-wines must be a whole number, 1 or more, not '0'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--wines must be a JSON object"):
        take_twins(CELLAR, {"wines": "[]", "red_wines": 3})


@pytest.mark.parametrize("section", _SECTIONS, ids=lambda section: section.__name__)
def test_a_field_is_a_setting_or_described(section: type[Section]) -> None:
    described = re.findall(r"^ {4,8}(\w+(?:, \w+)*): ", section.__doc__ or "", re.MULTILINE)
    names = {name for line in described for name in line.split(", ")}
    own = {item.name for item in fields(section)}
    assert names <= own, "described, and not there"
    assert set(others_of(section)) == names


def test_a_setting_is_declared_by_one_section() -> None:
    """A section that has another's setting says so (`same_as`)."""
    found: dict[str, Setting] = {}
    for section in _SECTIONS:
        for each in settings_of(section):
            same = found.setdefault(each.key, each)
            assert (same.help, same.default, same.kind) == (each.help, each.default, each.kind)


def test_defaults_are_those_of_the_declaration() -> None:
    assert default_of(GatewayConfig, "session_ttl_s") == DEFAULT_TTL_S == 30 * 86400


def test_the_wait_for_an_engine_reaches_all_that_wait() -> None:
    config = GatewayConfig(engine_address="x", engine_wait_s=3.5)
    assert _service_settings(config).engine_wait_s == 3.5
    assert _engine_pool(config)._engine_wait_s == 3.5


def shown_by(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The options in the help."""
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 0
    return re.findall(r"^  (-[\w, -]+)", capsys.readouterr().out, re.MULTILINE)


def test_help_shows_what_is_of_daily_use(capsys: pytest.CaptureFixture[str]) -> None:
    daily = shown_by(capsys, "serve", "--help")
    everything = shown_by(capsys, "serve", "--help=all")
    assert len(daily) <= _MOST_IN_HELP
    assert set(daily) <= set(everything)
    assert len(everything) == len(SERVE_SETTINGS) + 2  # --help, --config
    assert any(line.startswith("--max-model-len") for line in daily)
    assert not any(line.startswith("--cudagraph-mode") for line in daily)
    assert len(shown_by(capsys, "engine", "--help")) < len(shown_by(capsys, "engine", "-h", "all"))


@pytest.mark.parametrize("word", ["Redis", "redis", "--redis-url", "redis-u"])
def test_help_about_a_word(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_by(capsys, "serve", f"--help={word}")
    assert any(line.startswith("--redis-url") for line in shown)
    assert 0 < len(shown) <= 3
    [line] = shown_by(capsys, "serve", "--help=rope-theta")
    assert line.startswith("--hf-overrides")
    with pytest.raises(SystemExit) as ending:
        main(["serve", "--help=nonsense"])
    assert ending.value.code == 2
    assert "--help=nonsense: no option or group has this name" in capsys.readouterr().err
