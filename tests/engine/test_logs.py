"""Lines of the log: one an event, whatever it quotes."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import logging, sys
from penstock.engine.logs import configure_logging
configure_logging("info", sys.argv[1])
log = logging.getLogger("penstock.test")
log.debug("too little")
said = "x\\n2026-01-01 INFO root: forged\\r\\x1b[31m\\u2028é"
log.info("a caller says %s", said, extra={"request_id": "r1"})
try:
    raise ValueError("y\\n2026-01-01 INFO root: forged")
except ValueError:
    log.exception("it broke")
"""


def lines(style: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, style], capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_text_cannot_be_forged() -> None:
    first, broken, *traceback = lines("text")
    assert first.endswith(
        r"INFO penstock.test: a caller says x\n2026-01-01 INFO root: forged\r\x1b[31m\u2028é"
    )
    assert broken.endswith("ERROR penstock.test: it broke")
    assert len(traceback) >= 4
    assert all(line.startswith("  ") for line in traceback)


def test_json_is_one_object_a_line() -> None:
    first, broken = map(json.loads, lines("json"))
    assert first["message"] == "a caller says x\n2026-01-01 INFO root: forged\r\x1b[31m\u2028é"
    assert (first["level"], first["logger"]) == ("info", "penstock.test")
    assert first["request_id"] == "r1"
    assert first["time"].endswith("Z")
    assert "ValueError: y" in broken["exception"]
