"""An engine without a model: a real ROUTER that speaks `messages` and streams scripted tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator

import zmq
import zmq.asyncio

from penstock.engine.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
    decode,
    encode,
)
from penstock.engine.request import FinishReason, Request, RequestOutput, TokenLogprobs

INFO = EngineInfo(
    model="fake", model_path="", max_model_len=1024, vocab_size=400, num_blocks=64, block_size=16,
    dtype="float32", device="cpu", eos_token_ids=(0,), pid=1,
)  # fmt: skip


class FakeEngine:
    """Answers every request with the tokens of `script`, one a step, then EOS. With `ignore_eos`
    it says them over and over until `max_tokens`."""

    def __init__(self, address: str, script: list[int], *, step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.refusal: str | None = None
        self.submitted: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.stats = EngineStats(num_requests_running=1, num_blocks_used=16, num_blocks=64)
        self.address = address
        self._context = zmq.asyncio.Context()
        self.num_steps: dict[bytes, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeEngine:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.address)
        self._start(self._receive())
        self._start(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def die(self) -> None:
        """Tell the gateways, as an engine does that cannot go on, and fall silent."""
        for identity in list(self.num_steps):
            await self.send(identity, Failure(message="out of memory"))
        self.fall_silent()

    def fall_silent(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def send(self, identity: bytes, message: Message) -> None:
        await self._router.send_multipart([identity, encode(message)])

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            for identity in list(self.num_steps):
                await self.send(identity, Heartbeat(stats=self.stats))
            await asyncio.sleep(0.5)

    async def _receive(self) -> None:
        while True:
            identity, frame = await self._router.recv_multipart()
            message = decode(frame)
            if isinstance(message, Hello):
                self.num_steps.setdefault(identity, 0)
                await self.send(identity, INFO)
            elif isinstance(message, Abort):
                self.aborted.update(message.request_ids)
            elif isinstance(message, Submit):
                self.submitted[message.request.request_id] = message.request
                self._start(self._stream(identity, message.request))

    async def _stream(self, identity: bytes, request: Request) -> None:
        for output in self._outputs(request):
            if request.request_id in self.aborted:
                return
            self.num_steps[identity] += 1
            number = self.num_steps[identity]
            step = Step(number=number, outputs=(output,), stats=self.stats)
            with contextlib.suppress(zmq.ZMQError):
                await self.send(identity, step)
            await asyncio.sleep(self.step_s)

    def _outputs(self, request: Request) -> Iterator[RequestOutput]:
        params, request_id = request.sampling_params, request.request_id
        if self.refusal is not None:
            yield RequestOutput(
                request_id=request_id, finish_reason=FinishReason.ERROR, error=self.refusal
            )
            return
        for index in range(params.max_tokens):
            is_eos = index == len(self.script) and not params.ignore_eos
            token_id = 0 if is_eos else self.script[index % len(self.script)]
            logprob = TokenLogprobs(
                token_id=token_id, logprob=-0.5, rank=1, top=((token_id, -0.5), (7, float("-inf")))
            )
            reason = FinishReason.LENGTH if index + 1 == params.max_tokens else None
            yield RequestOutput(
                request_id=request_id,
                token_ids=(token_id,),
                logprobs=() if params.logprobs is None else (logprob,),
                finish_reason=FinishReason.STOP if is_eos else reason,
                stop_token_id=0 if is_eos else None,
                num_cached_tokens=2,
            )
            if is_eos:
                return
