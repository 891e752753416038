"""`penstock` with an engine that gives each request the next grammar of a list, whatever it asks.

Run as `python -m tests.clients.scripted_server serve …`; the supervisor starts the same module as
the engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine import server
from penstock.engine.process import CONFIG_FD, run_child
from penstock.engine.request import Request, StructuredOutputs
from penstock.gateway.launch.cli import main
from penstock.gateway.launch.supervisor import Supervisor

FILE = "PENSTOCK_TEST_GRAMMARS"  # with a JSON list of Lark grammars


def _run_engine() -> int:
    build_core, grammars = server.build_core, iter(json.loads(Path(os.environ[FILE]).read_text()))

    def build(config: Any) -> Any:
        core, info = build_core(config)
        add = core.add

        def add_with_grammar(request: Request) -> None:
            params = request.sampling_params
            if params.max_tokens > 0:  # otherwise only the prompt is prepared
                grammar = StructuredOutputs("lark", next(grammars))
                params = msgspec.structs.replace(params, structured_outputs=grammar)
            add(msgspec.structs.replace(request, sampling_params=params))

        core.add = add_with_grammar
        return core, info

    server.build_core = build
    return run_child("penstock-engine", server.serve)


def _run_server() -> int:
    plan = Supervisor._plan

    def plan_ours(self: Supervisor, *arguments: Any) -> Any:
        children = plan(self, *arguments)
        children[0].module = __spec__.name
        return children

    Supervisor._plan = plan_ours
    return main()


if __name__ == "__main__":
    sys.exit(_run_engine() if CONFIG_FD in os.environ else _run_server())
