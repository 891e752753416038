"""The reading order of the READMEs, held against a request (`make path`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ..support.request_path import KINDS, ROOT, traced_server

_HEADING = "In the order a request meets them"
_ITEM = re.compile(r"^\d+\. \[[^]]+\]\(([^)]+)\)", re.MULTILINE)


@pytest.fixture(scope="module")
def chat_path() -> Iterator[list[str]]:
    with traced_server() as server:
        yield server.path(KINDS["chat"])


@pytest.mark.parametrize("room", ["gateway", "engine"])
@pytest.mark.exhaustive
def test_a_chat_request_enters_files_in_the_order_of_the_readme(
    chat_path: list[str], room: str
) -> None:
    _, section = (ROOT / room / "README.md").read_text().split(f"# {_HEADING}\n")
    listed = [f"{room}/{link}" for link in _ITEM.findall(section.split("\n#")[0])]
    assert len(listed) >= 8
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    assert [name for name in chat_path if name in listed] == listed
