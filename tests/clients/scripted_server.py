"""`penstock` with an engine that gives each prompt the next grammar of a list, whatever is asked.
The same prompt gets the same one again, also from the next engine.

Run as `python -m tests.clients.scripted_server serve …`; the supervisor starts the same module as
the engine.
"""

from __future__ import annotations

import hashlib
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
    file = Path(os.environ[FILE])
    add, grammars, told = core.add, json.loads(file.read_text()), file.with_suffix(".told")

    def add_with_grammar(request: Request) -> None:
        params = request.sampling_params
        if params.max_tokens > 0:  # otherwise only the prompt is prepared
            prompts = told.read_text().split() if told.exists() else []
            prompt = hashlib.sha256(str(request.prompt_token_ids).encode()).hexdigest()
            if prompt not in prompts:
                told.write_text(" ".join([*prompts, prompt]))
                prompts.append(prompt)
            grammar = StructuredOutputs("lark", grammars[prompts.index(prompt)])
            params = msgspec.structs.replace(params, structured_outputs=grammar)
        add(msgspec.structs.replace(request, sampling_params=params))

    core.add = add_with_grammar


if __name__ == "__main__":
    sys.exit(run(__spec__.name, _give_grammars))
