"""The gateway: HTTP, SSE and WebSocket in front of an engine in another process.

It turns text into token ids, sends them to the engine over a Unix socket, and turns the engine's
outputs into each API's events.
"""

from __future__ import annotations

_DISTRIBUTION = "penstock-llm"


def installed_version() -> str:
    """The version of the installed package."""
    from importlib import metadata  # its import takes longer than all else in `penstock --version`

    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"
