"""The small JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model file.

    Raises:
        ModelLoadError: missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"cannot read {path}: expected a JSON object")
    return value
