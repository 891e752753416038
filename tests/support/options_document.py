"""Writes the tables of `gateway/OPTIONS.md` from the table of options (`make documents`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.gateway.launch.flags import ENGINE_GROUPS, FLAGS, GROUPS, WITHOUT_EFFECT, Flag

PAGE = Path(__file__).resolve().parents[2] / "gateway" / "OPTIONS.md"
_MARK = "<!-- `make documents` writes the rest of this page. -->\n"


def written() -> str:
    """The page as it should be: its own text as it is, and new tables."""
    text, mark, _ = PAGE.read_text("utf-8").partition(_MARK)
    assert mark, f"{PAGE} lacks the line {_MARK!r}"
    of_engine = {flag.name for flags in ENGINE_GROUPS.values() for flag in flags}
    only_engine = [flag for flag in ENGINE_GROUPS["listen"] if flag not in FLAGS]
    tables = [f"## {title}\n\n{_table(flags, of_engine)}" for title, flags in GROUPS.items()]
    tables.append(f"## only of `penstock engine`\n\n{_table(only_engine, of_engine)}")
    return "\n".join([text + mark, *tables, _without_effect()])


def _table(flags: Iterable[Flag], of_engine: Iterable[str]) -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in (f'--{flag.name}', *flag.aliases))} "
        f"| {_default(flag)} | {'yes' * (flag.name in of_engine)} | {_cell(flag.help)}"
        f"{f' ({_choices(flag)})' * bool(flag.choices)} |"
        for flag in flags
    ]
    return "\n".join(("| option | default | engine | |", "|---|---|---|---|", *rows, ""))


def _default(flag: Flag) -> str:
    if flag.default in (None, ()):
        return ""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return _cell(flag.kind.show(flag.default))


def _choices(flag: Flag) -> str:
    return ", ".join(f"`{choice}`" for choice in flag.choices)


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
