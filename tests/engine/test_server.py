"""The engine's end of the wire, spoken to over a real socket."""

from __future__ import annotations

import hashlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import wire
from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.codec import decode, encode
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.frames import FrameReader, framed
from penstock.engine.messages import (
    PROTOCOL_VERSION,
    SILENCE_LIMIT_S,
    Abort,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
)
from penstock.engine.request import (
    BeamSearch,
    FinishReason,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.scheduling import Scheduler
from penstock.engine.server import EngineServer
from penstock.engine.wire import WireBrokenError

from .policy.fake_device import expected_output
from .policy.stepped_device import SteppedDevice

INFO = EngineInfo(
    model="fake",
    model_path="/",
    max_model_len=2000,
    vocab_size=50,
    num_blocks=200,
    block_size=16,
    num_host_blocks=64,
    max_num_seqs=16,
    scheduling_policy="fcfs",
    dtype="float32",
    device="cpu",
    eos_token_ids=(1, 2),
    pid=1,
)


_BARE_WIRE = f"""
import sys, time
from penstock.engine.messages import EngineInfo
from penstock.engine.wire import Wire
Wire(sys.argv[1], {INFO!r}).start()
time.sleep(600)
"""
PATIENCE_S = 60.0  # with a busy machine

Connect = Callable[..., "Gateway"]


class Device(SteppedDevice):
    """Its steps take a while, as a model's do; or it breaks."""

    step_s = 0.001
    fails = False

    def submit(self, batch: Batch) -> Any:
        if self.fails:
            raise RuntimeError("the device caught fire")
        time.sleep(self.step_s)
        return super().submit(batch)


class Gateway:
    """A gateway's socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self._frames = FrameReader()
        self._messages: deque[Message] = deque()

    def send(self, message: Message) -> None:
        self.socket.sendall(framed(encode(message)))

    def receive(self, *, timeout_s: float = PATIENCE_S, beats: bool = False) -> Message:
        """The next message that is no heartbeat. Raises EOFError where the engine has closed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            while self._messages:
                message = self._messages.popleft()
                if beats or not isinstance(message, Heartbeat):
                    return message
            if not select.select([self.socket], [], [], max(0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages += map(decode, self._frames.feed(data))

    def hello(self) -> EngineInfo:
        self.send(Hello())
        message = self.receive()
        assert isinstance(message, EngineInfo)
        return message

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.send(
            Submit(
                request=Request(
                    request_id=request_id, prompt_token_ids=prompt, sampling_params=params
                )
            )
        )

    def finish(self, request_id: str) -> tuple[list[int], RequestOutput, list[int]]:
        """A request's tokens, its last output, and the numbers of the frames meanwhile."""
        tokens: list[int] = []
        numbers: list[int] = []
        while True:
            step = self.receive()
            assert isinstance(step, Step)
            numbers.append(step.number)
            for output in step.outputs:
                if output.request_id == request_id:
                    tokens.extend(output.token_ids)
                    if output.finish_reason is not None:
                        return tokens, output, numbers


def connected(address: str, *, timeout_s: float = PATIENCE_S) -> Gateway:
    """As soon as somebody listens there."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return Gateway(address)
        except OSError:
            assert time.monotonic() < until_s, "nobody listens"
            time.sleep(0.01)


class Engine:
    def __init__(self, address: str) -> None:
        self.address = address
        self.blocks = BlockManager(num_blocks=200, block_size=16)
        scheduler = Scheduler(SchedulerConfig(), self.blocks, eos_token_ids=(), max_model_len=2000)
        self.device = Device(num_blocks=200, block_size=16)
        self.server = EngineServer(EngineCore(scheduler, self.device), INFO, address)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.server.run()
        except (RuntimeError, WireBrokenError) as error:
            self.error = error

    def wait_for_idle_blocks(self) -> None:
        wait_until(lambda: not self.blocks.num_used_blocks)

    def wait_for_mail(self, num_messages: int = 1) -> None:
        """Until so many have reached it that it will see after the step it holds."""
        wait_until(lambda: self.server._wire._inbox.qsize() >= num_messages)

    def wait_for_step(self, number: int) -> None:
        """Until it holds that one."""
        wait_until(lambda: len(self.device.begun) == number)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.001)


@pytest.fixture
def num_silent_beats() -> int:
    """That a gateway may let pass: here none sends any, and a slow machine takes its time."""
    return 1000


@pytest.fixture
def engine(
    tmp_path: Path, num_silent_beats: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    monkeypatch.setattr(wire, "MAX_SILENT_BEATS", num_silent_beats)
    running = Engine(f"{tmp_path}/e.sock")
    running.server.start()
    running.thread.start()
    yield running
    running.device.set_free()
    running.server.stop()
    running.thread.join(timeout=PATIENCE_S)
    assert not running.thread.is_alive()


@pytest.fixture
def connect(engine: Engine) -> Iterator[Connect]:
    """Makes gateways, and closes their sockets at the end."""
    gateways: list[Gateway] = []

    def make(*, says_hello: bool = True) -> Gateway:
        gateways.append(Gateway(engine.address))
        if says_hello:
            assert gateways[-1].hello() == INFO
        return gateways[-1]

    yield make
    for gateway in gateways:
        gateway.socket.close()


def test_a_request_comes_back_token_by_token(connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", (1, 2, 3), 40)
    tokens, last, numbers = gateway.finish("a")
    assert tokens == expected_output([1, 2, 3], 40)
    assert last.finish_reason is FinishReason.LENGTH
    assert numbers == list(range(1, 41)), "one numbered frame per iteration"


def test_all_streams_of_an_iteration_share_a_frame(engine: Engine, connect: Connect) -> None:
    gateway, other = connect(), connect()
    engine.device.hold()
    gateway.submit("r0", (0,), 5)
    engine.wait_for_step(1)
    for index in range(1, 8):
        gateway.submit(f"r{index}", (index,), 5)
    other.submit("theirs", (9,), 5)
    engine.wait_for_mail(8)
    engine.device.set_free()
    steps = []
    while True:
        step = gateway.receive()
        assert isinstance(step, Step)
        steps.append(step)
        if any(output.finish_reason for output in step.outputs):
            break
    assert max(len(step.outputs) for step in steps) == 8
    assert {o.request_id for s in steps for o in s.outputs} <= {f"r{i}" for i in range(8)}
    assert other.finish("theirs")[0] == expected_output([9], 5)


def test_an_abort_frees_blocks_within_a_step(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.hold(but=1)
    gateway.submit("a", (1,) * 100, 1500)
    gateway.receive()
    engine.wait_for_step(2)
    assert engine.blocks.num_used_blocks >= 7
    gateway.send(Abort(request_ids=("a", "unknown")))
    engine.wait_for_mail()
    engine.device.allow(1)
    engine.wait_for_step(3)
    assert engine.blocks.num_used_blocks == 0
    assert not engine.device.begun[-1].scheduled, "the step that forgets it"
    engine.device.set_free()
    gateway.submit("b", (1,), 3)
    assert gateway.finish("b")[0] == expected_output([1], 3)


def test_one_gateway_cannot_abort_anothers_request(engine: Engine, connect: Connect) -> None:
    gateway, other = connect(), connect()
    engine.device.hold(but=1)
    gateway.submit("a", (1,), 200)
    gateway.receive()
    engine.wait_for_step(2)
    other.send(Abort(request_ids=("a",)))
    engine.wait_for_mail()
    engine.device.set_free()
    assert gateway.finish("a")[1].finish_reason is FinishReason.LENGTH


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


@pytest.mark.parametrize("num_silent_beats", [wire.MAX_SILENT_BEATS])
def test_a_silent_gateway_is_declared_dead(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.step_s = 0.1  # it would go on for minutes
    began_s = time.monotonic()
    gateway.submit("a", (1,) * 50, 1900)
    gateway.receive()
    engine.wait_for_idle_blocks()
    assert time.monotonic() - began_s > SILENCE_LIMIT_S - 1


def test_a_gateway_that_reads_late_loses_nothing(engine: Engine, connect: Connect) -> None:
    """Its frames wait, longer than the kernel has room for them, and nobody else's do."""
    gateway, other = connect(), connect()
    engine.device.hold()
    gateway.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    params = SamplingParams(max_tokens=300, logprobs=20)
    request = Request(request_id="a", prompt_token_ids=(1,), sampling_params=params)
    gateway.send(Submit(request=request))
    [wired] = [one for one in engine.server._wire._gateways.values() if one.number == 1]
    wired.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    other.submit("b", (2,), 100)
    engine.device.set_free()
    assert other.finish("b")[0] == expected_output([2], 100)
    assert wired.pending
    tokens, _, numbers = gateway.finish("a")
    assert tokens == expected_output([1], 300)
    assert numbers == list(range(1, 301))


def test_what_speaks_something_else_is_let_go(engine: Engine, connect: Connect) -> None:
    stranger, gateway = connect(says_hello=False), connect()
    stranger.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises((EOFError, ConnectionResetError)):
        stranger.receive()
    gateway.submit("a", (1,), 5)
    assert gateway.finish("a")[0] == expected_output([1], 5)


def test_a_machine_that_stood_still_kills_nobody(tmp_path: Path) -> None:
    address = f"{tmp_path}/e.sock"
    process = subprocess.Popen([sys.executable, "-c", _BARE_WIRE, address])
    try:
        gateway = connected(address)
        assert gateway.hello() == INFO
        process.send_signal(signal.SIGSTOP)
        time.sleep(SILENCE_LIMIT_S + 1)
        process.send_signal(signal.SIGCONT)
        for _ in range(2):
            assert isinstance(gateway.receive(beats=True), Heartbeat)
        gateway.socket.close()
    finally:
        process.kill()
        process.wait()


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


def test_refusals_name_the_reason(connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", (), 5)
    _, refused, _ = gateway.finish("a")
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error == "the prompt has no tokens"


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

    monkeypatch.setattr(engine.server._wire, "_read", fail)
    connect(says_hello=False).send(Hello())
    engine.thread.join(timeout=PATIENCE_S)
    assert isinstance(engine.error, WireBrokenError)


def test_every_message_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(7, 8), seed=2**64 - 1, logprobs=2
    )
    request = Request(
        request_id="é",
        prompt_token_ids=(1, 2),
        output_token_ids=(3,),
        sampling_params=params,
        arrival_s=1.25,
        deadline_s=None,
        tenant="t",
    )
    logprobs = TokenLogprobs(token_id=3, logprob=-0.5, rank=2, top=((4, -0.25), (3, -0.5)))
    output = RequestOutput(
        request_id="é",
        token_ids=(3,),
        logprobs=(logprobs,),
        finish_reason=FinishReason.STOP,
        stop_token_id=3,
    )
    stats = EngineStats(num_requests_running=3)
    for message in (
        Hello(),
        INFO,
        Submit(request=request),
        Abort(request_ids=("a", "b")),
        Step(number=7, outputs=(output,), stats=stats),
        Step(number=8, outputs=(RequestOutput(request_id="a", index=2, token_ids=(4, 5)),)),
        Heartbeat(stats=stats),
        Heartbeat(),
        Failure(message="x"),
    ):
        assert decode(encode(message)) == message
    text_level = replace(request, sampling_params=replace(params, stop=("END",)))
    assert decode(encode(Submit(request=text_level))) == Submit(request=request)


def test_another_layout_is_another_version() -> None:
    """Fails with every field that a frame gains, loses or has elsewhere: raise the version then,
    and set both here anew."""
    kinds = (
        *(Hello, EngineInfo, Submit, Abort, DropPrefix, Step, Heartbeat, Failure),
        *(Request, SamplingParams, BeamSearch, Retention),
        *(RequestOutput, TokenLogprobs, EngineStats),
    )
    layout = [
        [kind.__name__, *(f"{each.name}: {each.type}" for each in fields(kind))] for kind in kinds
    ]
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
    assert (PROTOCOL_VERSION, digest) == (3, "378e298ed16f0c82")


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x90", b"\x91\xa4what", b"\x01"])
def test_what_is_no_frame_is_a_value_error(frame: bytes) -> None:
    with pytest.raises(ValueError, match="not a penstock frame"):
        decode(frame)


def test_one_branch_is_aborted_and_the_others_go_on(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    engine.device.hold(but=3)
    params = SamplingParams(max_tokens=30, n=3)
    gateway.send(
        Submit(request=Request(request_id="a", prompt_token_ids=(1, 2), sampling_params=params))
    )
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    is_over = False
    while not is_over:
        step = gateway.receive()
        assert isinstance(step, Step)
        for output in step.outputs:
            tokens[output.index].extend(output.token_ids)
            is_over |= output.is_last
        if step.number == 3:
            engine.wait_for_step(4)
            gateway.send(Abort(branches=(("a", 1), ("unknown", 0))))
            engine.wait_for_mail()
            engine.device.set_free()
    assert 3 <= len(tokens[1]) <= 4, "what the step it met brought is the last"
    for index in (0, 2):
        assert tokens[index] == expected_output([1, 2], 30, index)
    engine.wait_for_idle_blocks()


def test_a_refusal_names_the_parameter(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    params = SamplingParams(max_tokens=1900, n=8)
    gateway.send(
        Submit(request=Request(request_id="a", prompt_token_ids=(1,), sampling_params=params))
    )
    _, output, _ = gateway.finish("a")
    assert output.is_refused
    assert output.is_last
    assert output.param == "n"
    assert "952 KV blocks of 16 tokens, and there are 200" in (output.error or "")


def test_a_prefix_is_found_until_it_is_dropped(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    prompt = tuple(range(40))

    def num_cached(request_id: str) -> int:
        gateway.submit(request_id, prompt, 1)
        return gateway.finish(request_id)[1].num_cached_tokens

    assert [num_cached("a"), num_cached("b")] == [0, 39]
    gateway.send(DropPrefix(token_ids=prompt))
    assert num_cached("c") == 0


def test_the_numbers_of_memory_are_told(engine: Engine, connect: Connect) -> None:
    gateway = connect()
    gateway.submit("a", tuple(range(40)), 20)
    step = gateway.receive()
    assert isinstance(step, Step)
    assert step.stats.num_blocks_used == 3
    assert (step.stats.num_slots_allocated, step.stats.num_slots_empty) == (48, 8)
    gateway.finish("a")
    beat = gateway.receive(beats=True)
    while not isinstance(beat, Heartbeat):
        beat = gateway.receive(beats=True)
    assert beat.stats is not None
    assert (beat.stats.num_blocks_used, beat.stats.num_blocks_cached) == (0, 4)
    assert beat.stats.prefix_cache_queries_total == 40


def test_stats_come_with_the_steps_that_show_something_new(connect: Connect) -> None:
    gateway = connect()
    began_s = time.monotonic()
    gateway.submit("a", (1,), 300)
    steps = []
    while not steps or not steps[-1].outputs[-1].is_last:
        step = gateway.receive()
        assert isinstance(step, Step)
        steps.append(step)
    told = [step.stats for step in steps if step.stats is not None]
    assert steps[0].stats is not None
    assert steps[-1].stats is not None
    assert steps[-1].stats.generation_tokens_total == len(steps) == 300
    assert len(told) <= 3 + (time.monotonic() - began_s) / 0.1
