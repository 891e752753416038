"""Grammars are compiled beside the steps, and their requests run afterwards."""

from __future__ import annotations

from penstock.engine.protocol.messages import Abort
from penstock.engine.request import FinishReason

from ..scheduling.fake_device import expected_output
from .stack import Connect, Engine, wait_until


def test_streams_go_on_while_a_grammar_is_compiled(engine: Engine, connect: Connect) -> None:
    gateway, other = connect(), connect()
    grammars = engine.device.grammars
    grammars.may_compile.clear()
    gateway.submit("late", (1,), 30, regex="a")
    other.submit("plain", (2,), 300)
    assert other.finish("plain")[0] == expected_output([2], 300)
    assert not grammars
    grammars.may_compile.set()
    assert gateway.finish("late")[0] == expected_output([1], 30)
    assert grammars.num_kept == 1
    grammars.may_compile.clear()  # it is not compiled again
    gateway.submit("again", (3,), 30, regex="a")
    assert gateway.finish("again")[0] == expected_output([3], 30)


def test_a_request_whose_grammar_is_wrong_is_refused(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    gateway.submit("wrong", (1,), 30, regex="wrong")
    token_ids, output, _ = gateway.finish("wrong")
    assert token_ids == []
    assert (output.finish_reason, output.is_refused) == (FinishReason.ERROR, True)
    assert (output.error, output.param) == ("it is wrong", "structured_outputs")
    gateway.submit("wrong", (1,), 30, regex="right")  # its name is free again
    assert gateway.finish("wrong")[0] == expected_output([1], 30)


def test_a_branch_that_is_aborted_while_it_is_compiled(engine: Engine, connect: Connect) -> None:
    """As for a request that another engine had begun, and one branch had ended."""
    gateway, other = connect(), connect()
    engine.device.grammars.may_compile.clear()
    gateway.submit("two", (1,), 30, regex="a", n=2)
    gateway.send(Abort(branches=(("two", 1),)))
    other.submit("plain", (2,), 30)
    other.finish("plain")
    engine.device.grammars.may_compile.set()
    assert gateway.finish("two")[0] == expected_output([1], 30)
    wait_until(lambda: not engine.server.request_ids)


def test_who_leaves_while_it_is_compiled_never_runs(engine: Engine, connect: Connect) -> None:
    gateway, leaver = connect(), connect()
    engine.device.grammars.may_compile.clear()
    gateway.submit("aborted", (1,), 30, regex="a")
    gateway.send(Abort(request_ids=("aborted",)))
    leaver.submit("lost", (2,), 30, regex="b")
    leaver.socket.close()
    gateway.submit("old", (3,), 30, regex="c", name="response")
    gateway.submit("new", (4,), 30, regex="d", name="response", epoch=(2, 0))
    assert gateway.finish("old")[1].is_superseded
    wait_until(lambda: engine.server.request_ids == {"new"})
    engine.device.grammars.may_compile.set()
    assert gateway.finish("new")[0] == expected_output([4], 30)
    first_tokens = [
        item.entry.token_ids[0]
        for batch in engine.device.batches
        for item in batch.scheduled
        if item.entry is not None
    ]
    assert first_tokens == [4]
