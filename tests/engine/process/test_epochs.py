"""Two gateways want the same computed: the higher epoch has it, whatever comes late."""

from __future__ import annotations

import itertools

import pytest

from penstock.engine.protocol.messages import Abort, Epoch
from penstock.engine.request import FinishReason, RequestOutput

from ..scheduling.fake_device import expected_output
from .stack import Connect, Engine, Gateway

PROMPT = (1,) * 100  # takes 7 blocks


def check_superseded(output: RequestOutput) -> None:
    assert output.is_superseded
    assert output.is_last
    assert output.finish_reason is FinishReason.ERROR
    assert not output.is_refused, "its caller is not at fault"


def takes_over(engine: Engine, old: Gateway, new: Gateway) -> None:
    """The old gateway's request runs, and holds a step, when the new one has submitted it."""
    engine.device.hold(but=3)
    old.submit("r", PROMPT, 1500, name="r", epoch=(1, 0))
    engine.wait_for_step(4)
    new.submit("r@2", PROMPT, 30, name="r", epoch=(2, 0))
    engine.wait_for_mail()


def test_a_higher_epoch_replaces_the_request_within_a_step(
    engine: Engine, connect: Connect
) -> None:
    old, new = connect(), connect()
    takes_over(engine, old, new)
    old_seq_id = engine.device.begun[-1].scheduled[0].seq_id
    engine.device.allow(1)
    engine.wait_for_step(5)
    assert old_seq_id in engine.device.begun[-1].left_seq_ids
    assert engine.blocks.tiers.device.num_held == 7, "those of one request"
    engine.device.set_free()
    tokens, last, _ = old.finish("r")
    check_superseded(last)
    assert tokens == expected_output(list(PROMPT), 4), "up to the step that the submit met"
    assert new.finish("r@2")[0] == expected_output(list(PROMPT), 30)
    engine.wait_for_idle_blocks()


@pytest.mark.parametrize("epoch", [(1, 7), (2, 0), (2, 1)])
@pytest.mark.parametrize("is_same_gateway", [False, True])
def test_a_lower_or_equal_epoch_is_refused_as_superseded(
    engine: Engine, connect: Connect, *, epoch: Epoch, is_same_gateway: bool
) -> None:
    owner, other = connect(), connect()
    late = owner if is_same_gateway else other
    engine.device.hold(but=1)
    owner.submit("r@2~1", (1,), 50, name="r", epoch=(2, 1))
    engine.wait_for_step(2)
    late.submit("late", (1,), 50, name="r", epoch=epoch)
    engine.wait_for_mail()
    engine.device.allow(1)
    tokens, last, _ = late.finish("late")
    check_superseded(last)
    assert not tokens
    engine.device.set_free()
    if not is_same_gateway:  # else its outputs were read with the refusal
        assert owner.finish("r@2~1")[0] == expected_output([1], 50)
    engine.wait_for_idle_blocks()
    assert engine.scheduler.counters.num_refused == 0


def test_who_lost_its_connection_goes_on_at_once(engine: Engine, connect: Connect) -> None:
    """Whether or not the engine knows by then that the old connection is gone."""
    for number, gone_first in enumerate((False, True)):
        name, begun = f"r{number}", len(engine.device.begun)
        old, new = connect(), connect()
        engine.device.hold(but=1)
        old.submit(name, (1,), 1500, name=name, epoch=(1, 0))
        engine.wait_for_step(begun + 2)
        actions = [
            old.socket.close,
            lambda new=new, name=name: new.submit(f"{name}~1", (1,), 40, name=name, epoch=(1, 1)),
        ]
        for num_mails, action in enumerate(actions if gone_first else actions[::-1], start=1):
            action()
            engine.wait_for_mail(num_mails)
        engine.device.set_free()
        assert new.finish(f"{name}~1")[0] == expected_output([1], 40)
        engine.wait_for_idle_blocks()


def test_what_the_old_owner_says_late_does_not_touch_the_new_request(
    engine: Engine, connect: Connect
) -> None:
    old, new = connect(), connect()
    takes_over(engine, old, new)
    for late in (
        Abort(request_ids=("r",)),
        Abort(branches=(("r", 0),)),
        Abort(request_ids=("r@2",)),  # another gateway's
        Abort(branches=(("r@2", 0),)),
    ):
        old.send(late)
    old.submit("r~1", PROMPT, 30, name="r", epoch=(1, 1))
    engine.wait_for_mail(6)
    engine.device.set_free()
    check_superseded(old.finish("r")[1])
    check_superseded(old.finish("r~1")[1])
    old.socket.close()
    assert new.finish("r@2")[0] == expected_output(list(PROMPT), 30)


def test_it_goes_to_and_fro_between_two_connections(engine: Engine, connect: Connect) -> None:
    """Each submit has outputs of its own: none of them is taken for another's."""
    gateways = connect(), connect()
    engine.device.hold()
    gateways[0].submit("r@1", (1,), 40, name="r", epoch=(1, 0))
    engine.wait_for_step(1)
    for epoch in range(2, 7):
        new, old = gateways[(epoch + 1) % 2], gateways[epoch % 2]
        new.submit(f"r@{epoch}", (1,), 40, name="r", epoch=(epoch, 0))
        engine.wait_for_mail()
        old.send(Abort(request_ids=(f"r@{epoch - 1}",)))  # late
        engine.wait_for_mail(2)
        num_begun = len(engine.device.begun)
        engine.device.allow(2)
        engine.wait_for_step(num_begun + 2)
    engine.device.set_free()
    for epoch, gateway in zip(range(1, 6), itertools.cycle(gateways), strict=False):
        tokens, last, _ = gateway.finish(f"r@{epoch}")
        check_superseded(last)
        assert tokens == expected_output([1], len(tokens))
    assert gateways[1].finish("r@6")[0] == expected_output([1], 40)
    engine.wait_for_idle_blocks()


def test_a_name_is_free_once_its_request_has_ended(engine: Engine, connect: Connect) -> None:
    first, second = connect(), connect()
    first.submit("r@9", (1,), 3, name="r", epoch=(9, 0))
    first.finish("r@9")
    second.submit("r", (1,), 3, name="r", epoch=(1, 0))
    assert second.finish("r")[0] == expected_output([1], 3)
    second.submit("r", (), 3, name="r", epoch=(1, 0))  # refused: the name is not taken
    assert second.finish("r")[1].is_refused
    first.submit("r", (1,), 3, name="r", epoch=(1, 0))
    assert first.finish("r")[0] == expected_output([1], 3)
    engine.wait_for_idle_blocks()
    assert not engine.server.request_ids
