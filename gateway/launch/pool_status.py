"""`penstock status`: a server's engines, as `/health` describes them."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

_TIMEOUT_S = 5.0
_COLUMNS = {
    "engine": "name", "state": "state", "running": "num_requests_running",
    "waiting": "num_requests_waiting", "streams here": "num_streams", "KV used": "kv_cache_usage",
    "cached": "prefix_cache_hit_rate",
}  # fmt: skip
_SHARES = {"kv_cache_usage", "prefix_cache_hit_rate"}


def show(base_url: str) -> int:
    """Print the table; the command's exit code: 1 if the server has no engine."""
    if not base_url.startswith(("http://", "https://")):
        print(f"penstock: error: {base_url} is no URL", file=sys.stderr)
        return 2
    try:
        status, health = _ask(f"{base_url.rstrip('/')}/health")
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"penstock: error: {base_url} does not answer: {error}", file=sys.stderr)
        return 1
    print(f"{base_url}: {health.get('status') or health.get('error', {}).get('message')}")
    if engines := health.get("engines"):
        print(table(engines))
    return int(status != 200)


def table(engines: Sequence[Mapping[str, Any]]) -> str:
    """A line per engine."""
    rows = [list(_COLUMNS)]
    for engine in engines:
        cells = {key: engine.get(key) for key in _COLUMNS.values()}
        rows.append([_cell(key, value) for key, value in cells.items()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if key in _SHARES else str(value)


def _ask(url: str) -> tuple[int, Mapping[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310  (checked)
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
