"""The engine's end of the wire as a thread, and gateways that speak to it."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.process.server import EngineServer
from penstock.engine.protocol.frames import FrameReader, decode, encode, framed
from penstock.engine.protocol.messages import (
    EngineInfo,
    Epoch,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
)
from penstock.engine.protocol.sockets import TransportBrokenError
from penstock.engine.request import Request, RequestOutput, SamplingParams, StructuredOutputs
from penstock.engine.scheduling import Scheduler

from ..scheduling.stepped_device import SteppedDevice

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

PATIENCE_S = 60.0  # with a busy machine

Connect = Callable[..., "Gateway"]


class Device(SteppedDevice):
    """Its steps take a while, as a model's do; or it breaks.

    Attributes:
        num_parts: of steps, that the watchdog is shown.
    """

    step_s = 0.001
    fails = False
    num_parts = 0

    def num_parts_done(self) -> int:
        return self.num_parts

    def describe(self) -> str:
        return "a device that is held"

    def submit(self, batch: Batch) -> Any:
        if self.fails:
            raise RuntimeError("the device caught fire")
        time.sleep(self.step_s)
        return super().submit(batch)


class Gateway:
    """A gateway's socket."""

    def __init__(self, address: str | socket.socket) -> None:
        """Args:
        address: of a Unix socket, or a connection.
        """
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(address)
            except OSError:
                self.socket.close()
                raise
        else:
            self.socket = address
        self._frames = FrameReader()
        self._messages: deque[Message] = deque()
        self.num_bytes = 0  # received

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
            self.num_bytes += len(data)
            self._messages += map(decode, self._frames.feed(data))

    def hello(self) -> EngineInfo:
        self.send(Hello())
        message = self.receive()
        assert isinstance(message, EngineInfo)
        return message

    def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        name: str = "",
        epoch: Epoch = (1, 0),
        regex: str | None = None,
        grammar: StructuredOutputs | None = None,
        n: int = 1,
    ) -> None:
        if regex is not None:
            grammar = StructuredOutputs("regex", regex)
        params = SamplingParams(max_tokens=max_tokens, structured_outputs=grammar, n=n)
        self.send(
            Submit(
                request=Request(
                    request_id=request_id, prompt_token_ids=prompt, sampling_params=params
                ),
                name=name,
                epoch=epoch,
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
            for output in outputs_of(step):
                if output.request_id == request_id:
                    tokens.extend(output.token_ids)
                    if output.finish_reason is not None:
                        return tokens, output, numbers


def outputs_of(step: Step) -> list[RequestOutput]:
    """What a frame says, as if all of it were outputs."""
    tokens = step.tokens.items()
    return [*step.outputs, *(RequestOutput(request_id=r, token_ids=(t,)) for r, t in tokens)]


class Engine:
    """A real server, scheduler and blocks before a device that takes a step when it is let."""

    def __init__(self, address: str, info: EngineInfo = INFO, **options: Any) -> None:
        self.address = address
        sizes = {"num_blocks": info.num_blocks, "block_size": info.block_size}
        self.blocks = BlockManager(**sizes)
        self.scheduler = Scheduler(
            SchedulerConfig(), self.blocks, eos_token_ids=(), max_model_len=info.max_model_len
        )
        self.device = Device(**sizes)
        self.server = EngineServer(
            EngineCore(self.scheduler, self.device), info, address, **options
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Engine:
        self.server.start()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.device.set_free()
        self.server.stop()
        self.thread.join(timeout=PATIENCE_S)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.server.run()
        except (RuntimeError, TransportBrokenError) as error:
            self.error = error

    def wait_for_idle_blocks(self) -> None:
        wait_until(lambda: not self.blocks.tiers.device.num_held)

    def wait_for_mail(self, num_messages: int = 1) -> None:
        """Until so many have reached it that it will see after the step it holds."""
        wait_until(lambda: self.server.transport.num_unread >= num_messages)

    def wait_for_step(self, number: int) -> None:
        """Until it holds that one."""
        wait_until(lambda: len(self.device.begun) == number)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.001)
