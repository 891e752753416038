"""Gateways that come, fall silent, read late or speak something else, and what ends them all."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import force_setattr, replace

from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.protocol import sockets
from penstock.engine.protocol.frames import framed
from penstock.engine.protocol.messages import (
    MAX_SILENT_BEATS,
    PROTOCOL_VERSION,
    Abort,
    DropPrefix,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
)
from penstock.engine.protocol.sockets import TransportBrokenError
from penstock.engine.request import (
    ImageInput,
    Request,
    Retention,
    SamplingParams,
    StructuredOutputs,
)

from ..scheduling.fake_device import expected_output
from .stack import PATIENCE_S, Connect, Engine, Gateway


def test_a_gateway_that_disconnects_loses_its_sequences(engine: Engine, connect: Connect) -> None:
    gateway, stays = connect(), connect()
    engine.device.hold(but=1)
    gateway.submit("a", (1,) * 50, 1900)
    gateway.receive()
    engine.wait_for_step(2)
    stays.submit("b", (2,), 300)
    engine.wait_for_mail()
    gateway.socket.close()
    engine.wait_for_mail(2)
    engine.device.set_free()
    assert stays.finish("b")[0] == expected_output([2], 300)
    engine.wait_for_idle_blocks()
    assert len(engine.device.batches) < 310


def _up_to_the_end(gateway: Gateway) -> Iterator[Message]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield gateway.receive(beats=True)


def test_a_silent_gateway_is_declared_dead(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many beats as it may let pass, and no sooner."""
    gateway, beats = connect(), list[Message]()
    engine.device.step_s = 0.1  # it would go on for minutes
    gateway.submit("a", (1,) * 50, 1900)
    while not isinstance(message := gateway.receive(beats=True), Step):
        beats.append(message)
    monkeypatch.setattr(sockets, "MAX_SILENT_BEATS", MAX_SILENT_BEATS)
    beats += _up_to_the_end(gateway)
    engine.wait_for_idle_blocks()
    assert sum(isinstance(message, Heartbeat) for message in beats) >= MAX_SILENT_BEATS


def test_a_gateway_that_reads_late_loses_nothing(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames wait, longer than the kernel has room for them, and nobody else's do."""
    monkeypatch.setattr(sockets, "SEND_BUFFER_BYTES", 1)
    gateway, other = connect(), connect()
    engine.device.hold()
    gateway.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    params = SamplingParams(max_tokens=300, logprobs=20)
    request = Request(request_id="a", prompt_token_ids=(1,), sampling_params=params)
    gateway.send(Submit(request=request))
    other.submit("b", (2,), 100)
    engine.device.set_free()
    assert other.finish("b")[0] == expected_output([2], 100)
    in_the_kernel = len(gateway.socket.recv(1 << 24, socket.MSG_PEEK))
    before = gateway.num_bytes
    tokens, _, numbers = gateway.finish("a")
    assert gateway.num_bytes - before > 2 * in_the_kernel
    assert tokens == expected_output([1], 300)
    assert numbers == list(range(1, 301))


def test_what_speaks_something_else_is_let_go(engine: Engine, connect: Connect) -> None:
    stranger, gateway = connect(says_hello=False), connect()
    stranger.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises((EOFError, ConnectionResetError)):
        stranger.receive()
    gateway.submit("a", (1,), 5)
    assert gateway.finish("a")[0] == expected_output([1], 5)


def test_a_machine_that_stood_still_kills_nobody(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours pass between two beats: for the gateway, silent meanwhile, they are one."""
    gateway, hours_s = connect(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours_s[0])
    monkeypatch.setattr(sockets, "time", clock)
    for _ in range(3):
        hours_s[0] += 2 * 3600.0
        for _ in range(2):
            assert isinstance(gateway.receive(beats=True), Heartbeat)
    gateway.submit("a", (1,), 5)
    assert gateway.finish("a")[0] == expected_output([1], 5)


def test_heartbeats_carry_stats_even_while_a_step_is_long(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.hold()
    gateway.submit("a", (1,), 1)
    engine.wait_for_step(1)
    for _ in range(2):
        beat = gateway.receive(beats=True)
        assert isinstance(beat, Heartbeat)
        assert beat.stats is not None
        assert beat.stats.num_requests_running + beat.stats.num_requests_waiting == 1
    engine.device.set_free()
    step = gateway.receive()
    assert isinstance(step, Step)
    assert step.stats is not None
    assert step.stats.generation_tokens_total == 1


def test_strangers_are_told_to_say_hello(connect: Connect) -> None:
    gateway = connect(says_hello=False)
    gateway.socket.sendall(framed(b"\xc1 junk"))
    gateway.submit("a", (1,), 5)
    assert gateway.receive() == Failure(message="unknown gateway: say hello first")
    other = connect(says_hello=False)
    other.send(Hello(protocol_version=PROTOCOL_VERSION + 1))
    answer = other.receive()
    assert isinstance(answer, Failure)
    assert "upgrade both together" in answer.message


def test_a_failing_device_tells_every_gateway(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.fails = True
    gateway.submit("a", (1,), 5)
    answer = gateway.receive()
    assert answer == Failure(message="the engine failed: RuntimeError: the device caught fire")
    engine.thread.join(timeout=PATIENCE_S)
    assert isinstance(engine.error, RuntimeError)


def test_a_broken_wire_ends_the_engine(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would live on, deaf."""

    def fail(_: object) -> None:
        raise MemoryError("a bug")

    monkeypatch.setattr(sockets, "decode", fail)
    connect(says_hello=False).send(Hello())
    engine.thread.join(timeout=PATIENCE_S)
    assert isinstance(engine.error, TransportBrokenError)


def _changed(**fields: Any) -> Request:
    """A good request, apart from these fields of it or of its parameters."""
    params = SamplingParams(max_tokens=5)
    request = Request(request_id="bad", prompt_token_ids=(1,), sampling_params=params)
    for name, value in fields.items():
        if name in SamplingParams.__struct_fields__:
            force_setattr(params, name, value)
        else:
            request = replace(request, **{name: value})
    return request


_IMAGE = ImageInput(digest="0" * 64, offset=0, num_tokens=1, num_features=1, data=b"another")


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt_token_ids": (1, token_id)} for token_id in (50, 10**9, -5, 1 << 62)),
        {"prompt_token_ids": (1,), "output_token_ids": (10**9,)},
        {"prediction_token_ids": (10**9,)},
        {"allowed_token_ids": (10**9,)},
        {"stop_token_ids": (-5,)},
        {"bad_words_token_ids": ((1 << 62,),)},
        {"bad_words_token_ids": ((),)},
        {"logit_bias": {1 << 62: 1.0}},
        {"structured_outputs": StructuredOutputs("regex", "a" * (4 << 20) + "b")},
        {"temperature": math.nan},
        {"max_tokens": -1},
        {"arrival_s": math.nan},
        {"arrival_s": math.inf},
        {"retention": Retention(duration_s=math.nan)},
        {"pooling": PoolingParams(task="embed", num_first_tokens=9)},
        {"images": (_IMAGE,)},
        {"images": (replace(_IMAGE, offset=-1),)},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_a_request_that_cannot_be_is_refused_and_disturbs_nobody(
    engine: Engine, connect: Connect, fields: dict[str, Any]
) -> None:
    other, gateway = connect(), connect()
    engine.device.hold()
    other.submit("good", (2,), 20)
    gateway.send(Submit(request=_changed(**fields)))
    step = gateway.receive()
    assert isinstance(step, Step)
    [output] = step.outputs
    assert (output.request_id, output.is_refused, output.is_last) == ("bad", True, True)
    engine.device.set_free()
    assert other.finish("good")[0] == expected_output([2], 20)


def test_other_messages_that_cannot_be_are_ignored(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    gateway.send(DropPrefix(token_ids=(-5,)))
    gateway.send(DropPrefix(token_ids=(1 << 62,)))
    gateway.send(Abort(branches=(("a", 1 << 62),)))
    gateway.submit("a", (1,), 5)
    assert gateway.finish("a")[0] == expected_output([1], 5)


def test_an_id_that_is_in_use_is_refused_whatever_the_name(
    engine: Engine, connect: Connect
) -> None:
    other, gateway = connect(), connect()
    engine.device.hold()
    other.submit("a", (2,), 1900, name="x")
    engine.wait_for_step(1)
    gateway.submit("a", (1,), 5, name="y")
    engine.device.set_free()
    step = gateway.receive()
    assert isinstance(step, Step)
    assert step.outputs[0].is_refused
    assert other.finish("a")[0] == expected_output([2], 1900)
