"""Writes the tables of `gateway/OPTIONS.md` from the declared settings (`make documents`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.engine.settings.declaration import Setting, grouped
from penstock.gateway.launch.settings import ENGINE_SETTINGS, SERVE_SETTINGS
from penstock.gateway.launch.vllm_options import WITHOUT_EFFECT

PAGE = Path(__file__).resolve().parents[2] / "gateway" / "OPTIONS.md"
_MARK = "<!-- `make documents` writes the rest of this page. -->\n"


def written() -> str:
    """The page as it should be: its own text as it is, and new tables."""
    text, mark, _ = PAGE.read_text("utf-8").partition(_MARK)
    assert mark, f"{PAGE} lacks the line {_MARK!r}"
    of_serve = {each.key for each in SERVE_SETTINGS}
    of_engine = {each.key for each in ENGINE_SETTINGS}
    only_engine = [each for each in ENGINE_SETTINGS if each.key not in of_serve]
    tables = [
        f"## {group}\n\n{table(those, of_engine)}"
        for group, those in grouped(SERVE_SETTINGS).items()
    ]
    tables.append(f"## only of `penstock engine`\n\n{table(only_engine, of_engine)}")
    return "\n".join([text + mark, *tables, _without_effect()])


def table(settings: Iterable[Setting], of_engine: Collection[str]) -> str:
    """The rows of settings; those of daily use are in bold type."""
    rows = [
        f"| {_names(each)} | {_default(each)} | {'yes' * (each.key in of_engine)} "
        f"| {_cell(each.help)}{_values(each)} |"
        for each in settings
    ]
    return "\n".join(("| option | default | engine | |", "|---|---|---|---|", *rows, ""))


def _names(each: Setting) -> str:
    mark = "**" * each.is_daily
    first, *others = each.options
    return ", ".join([f"{mark}`{first}`{mark}", *(f"`{name}`" for name in others)])


def _default(each: Setting) -> str:
    return _cell({"true": "on", "false": "off"}.get(each.shown_default, each.shown_default))


def _values(each: Setting) -> str:
    """The values that there are, and what its twins stand for."""
    values = ", ".join(f"`{choice}`" for choice in each.kind.choices)
    twins = "".join(f"; `{flag}`: `{meaning}`" for flag, meaning in each.meanings.items())
    return f" ({values}){twins}" if values else twins


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def _without_effect() -> str:
    rows = [
        f"| {_cell(each.why)} | {', '.join(f'`{name}`' for name in each.names)} |"
        for each in WITHOUT_EFFECT
    ]
    return "\n".join(
        ("## Options of vLLM without effect", "", "| why | options |", "|---|---|", *rows, "")
    )


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
