"""What a line of the log looks like, in every process.

One event is one line, whatever it quotes: control characters of a message are escaped and the
lines of a traceback indented, so that no caller can forge a line. Standard library only, as the
supervisor logs too.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(level: str, style: str, *, text_format: str | None = None) -> None:
    """Log to stderr from `level` on.

    Args:
        level: as in `debug`.
        style: `text` or `json`.
        text_format: of `logging`, for text.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter(text_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    def __init__(self, text_format: str | None) -> None:
        super().__init__(text_format or "%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (its name there)
        return "".join(_escaped(c) for c in super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"  {line}" for line in super().formatException(ei).splitlines())


class _JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, what `extra=` named, and `exception`."""

    converter = time.gmtime  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _escaped(character: str) -> str:
    is_printed = character.isprintable() or character in " \t"
    return character if is_printed else repr(character)[1:-1]
