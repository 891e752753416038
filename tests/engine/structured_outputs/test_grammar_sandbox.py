"""The process in which an engine checks grammars of gateways on other machines."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.grammar_sandbox import GrammarSandbox

from .conftest import PATH

# llguidance compiles it for more than five minutes.
BOMB = StructuredOutputs(
    "json_schema",
    json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}),
)
_FRACTION = StructuredOutputs("json_schema", '{"type": "number", "multipleOf": 0.1}')
_UNSUPPORTED = StructuredOutputs("json_schema", '{"properties": {"a": {"not": {}}}}')


@pytest.fixture
def sandbox() -> Iterator[GrammarSandbox]:
    with contextlib.closing(
        GrammarSandbox(str(PATH), vocab_size=1024, eos_token_ids=(4,))
    ) as sandbox:
        yield sandbox


def test_what_would_take_minutes_is_refused_and_the_next_is_not(sandbox: GrammarSandbox) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="takes too long") as refused:
            sandbox.check(BOMB)
        assert refused.value.param == "structured_outputs"
        sandbox.check(StructuredOutputs("regex", "a+"))
    with pytest.raises(InvalidRequestError, match="'not'") as refused:
        sandbox.check(_UNSUPPORTED)
    assert refused.value.param == "structured_outputs.properties.a.not"


def test_a_process_that_has_ended_is_started_again(sandbox: GrammarSandbox) -> None:
    sandbox.check(StructuredOutputs("regex", "a"))
    assert sandbox._process is not None
    sandbox._process.kill()
    with pytest.raises(InvalidRequestError):
        sandbox.check(StructuredOutputs("regex", "b"))
    sandbox.check(StructuredOutputs("regex", "b"))


def test_what_is_being_checked_at_the_end_is_refused(sandbox: GrammarSandbox) -> None:
    sandbox.check(StructuredOutputs("regex", "a"))
    errors = list[Exception]()

    def check() -> None:
        try:
            sandbox.check(BOMB)
        except InvalidRequestError as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    sandbox.close()
    thread.join(60)
    assert len(errors) == 1
    assert sandbox._process is None


def test_it_gives_way_to_streams(sandbox: GrammarSandbox) -> None:
    sandbox.check(StructuredOutputs("regex", "a"))
    assert sandbox._process is not None
    assert os.getpriority(os.PRIO_PROCESS, sandbox._process.pid) >= 10


def test_what_was_checked_is_not_checked_again(compiler: GrammarCompiler) -> None:
    """The check holds Python's lock, for which a step would wait."""
    with pytest.raises(InvalidRequestError, match="multipleOf"):
        compiler.compile(_FRACTION)
    compiler.compile(_FRACTION, is_checked=True)
    assert _FRACTION in compiler.kept
