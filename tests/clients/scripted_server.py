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

from penstock.engine.request import Request, StructuredOutputs

from ..support.changed_engine import run

FILE = "PENSTOCK_TEST_GRAMMARS"  # with a JSON list of Lark grammars


def _give_grammars(core: Any) -> None:
    add, grammars = core.add, iter(json.loads(Path(os.environ[FILE]).read_text()))

    def add_with_grammar(request: Request) -> None:
        params = request.sampling_params
        if params.max_tokens > 0:  # otherwise only the prompt is prepared
            grammar = StructuredOutputs("lark", next(grammars))
            params = msgspec.structs.replace(params, structured_outputs=grammar)
        add(msgspec.structs.replace(request, sampling_params=params))

    core.add = add_with_grammar


if __name__ == "__main__":
    sys.exit(run(__spec__.name, _give_grammars))
