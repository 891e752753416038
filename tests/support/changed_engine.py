"""`penstock` with an engine that a test has changed.

A module that ends in `sys.exit(run(__spec__.name, change))` is run as `python -m MODULE serve …`;
the supervisor starts the same module as the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.engine.process import server
from penstock.engine.process.launch import CONFIG_FD, run_child
from penstock.gateway.launch.cli import main
from penstock.gateway.launch.supervisor import Supervisor


def run(module: str, change: Callable[[Any], None]) -> int:
    """Run the server or, as its child, the engine, whose core is changed once it is built."""
    return _run_engine(change) if CONFIG_FD in os.environ else _run_server(module)


def _run_engine(change: Callable[[Any], None]) -> int:
    build_core = server.build_core

    def build(config: Any, **others: Any) -> Any:
        core, info = build_core(config, **others)
        change(core)
        return core, info

    server.build_core = build
    return run_child("penstock-engine", server.serve, prepare=server.prepare)


def _run_server(module: str) -> int:
    plan = Supervisor._plan

    def plan_ours(self: Supervisor, *arguments: Any) -> Any:
        children = plan(self, *arguments)
        children[0].module = module
        return children

    Supervisor._plan = plan_ours
    return main()
