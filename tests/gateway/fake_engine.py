"""An engine without a model: a real socket that speaks `messages` and streams scripted tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import msgspec

from penstock.engine.protocol.frames import FrameReader, decode, encode, framed
from penstock.engine.protocol.messages import (
    Abort,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Hold,
    Message,
    Submit,
    UnloadAdapter,
    step_of,
)
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    SamplingParams,
    Spent,
    TokenLogprobs,
)

INFO = EngineInfo(
    model="fake", model_path="", max_model_len=1024, vocab_size=400, num_blocks=256, block_size=16,
    num_host_blocks=64, max_num_seqs=16, scheduling_policy="fcfs", dtype="float32", device="cpu",
    eos_token_ids=(0,), pid=1,
)  # fmt: skip
NUM_CACHED = 2
VECTOR = struct.pack("<2f", 0.6, -0.8)  # of every text


class FakeEngine:
    """Answers every request with the tokens of `script`, one a step, then EOS. With `ignore_eos`
    it says them over and over until `max_tokens`.

    Attributes:
        scripts: of branches that say something else than `script`.
        drafts: of each token: how many were checked, and how many of them were right.
        mean_logprobs: of branches whose tokens are not -0.5 each.
        others: tokens that are told, where they are asked for, beside the one it says.
        notices: by how many tokens came before them; branch 0 has them.
        refusal, refused_param: what every request is refused with, as its own fault.
        failure: what every request fails with after its first token.
        limit_reason: why an output of `max_tokens` ends.
        may_speak: while it is cleared, the engine is there and says nothing.
        poison: kills the engine when it is submitted, if this says so of it.
        dies_in: that many steps later it is killed.
        holds_in: that many steps later it says nothing until `may_speak` is set again.
        since_step_s: what its heartbeats say of its last step.
        num_running: requests that it answers, of gateways that are gone too.
    """

    def __init__(
        self, address: str, script: list[int], *, step_s: float = 0.0, info: EngineInfo = INFO
    ) -> None:
        self.script = script
        self.step_s = step_s
        self.info = info
        self.scripts: dict[int, list[int]] = {}
        self.script_of: Callable[[Request], list[int] | None] = lambda _: None
        self.drafts = (0, 0)
        self.spent: Spent | None = None  # told with each branch's last output
        self.mean_logprobs: dict[int, float] = {}
        self.others: tuple[int, ...] = (7,)
        self.notices: dict[int, Notice] = {}
        self.refusal: str | None = None
        self.refused_param: str | None = None
        self.failure: str | None = None
        self.limit_reason = FinishReason.LENGTH
        self.may_speak = asyncio.Event()
        self.may_speak.set()
        self.poison: Callable[[Request], bool] = lambda _: False
        self.dies_in: int | None = None
        self.holds_in: int | None = None
        self.num_deaths = 0
        self.num_running = 0
        self.submitted: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self._stopped: set[tuple[int, str]] = set()  # by gateway: another may run it now
        self.aborted_branches: set[tuple[str, int]] = set()
        self.dropped: list[DropPrefix] = []
        self.held: list[Hold] = []
        self.unloaded: list[str] = []
        self.stats = EngineStats(num_requests_running=1, num_blocks_used=16, num_blocks=64)
        self.since_step_s: float | None = None
        self.address = address
        self.num_steps: dict[int, int] = {}  # by gateway
        self._sockets: dict[int, socket.socket] = {}  # those that listen, and by gateway
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeEngine:
        self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._sockets.values():
            connection.close()

    async def die(self) -> None:
        """Tell the gateways, as an engine does that cannot go on, and fall silent."""
        for gateway in list(self.num_steps):
            await self.send(gateway, Failure(message="out of memory"))
        self.fall_silent()

    def kill(self) -> None:
        """Be gone from one moment to the next, as by kill -9."""
        self.num_deaths += 1
        self.fall_silent()
        self.num_steps.clear()
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other end was quicker
                connection.shutdown(socket.SHUT_RDWR)

    def lose_gateways(self) -> None:
        """Close their connections, and live on."""
        for gateway in list(self.num_steps):
            with contextlib.suppress(OSError):
                self._sockets[gateway].shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Begin a life that knows nothing of those before."""
        self.info = msgspec.structs.replace(self.info, pid=self.info.pid + 1)
        Path(self.address).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen()
        listener.setblocking(False)
        self._sockets[next(self._numbers)] = listener
        self._start(self._accept(listener))
        self._start(self._beat())

    def fall_silent(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def send(self, gateway: int, message: Message) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it has gone
            await loop.sock_sendall(self._sockets[gateway], framed(encode(message)))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            for gateway in list(self.num_steps):
                await self.send(
                    gateway, Heartbeat(stats=self.stats, since_step_s=self.since_step_s)
                )
            await asyncio.sleep(0.1)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            gateway = next(self._numbers)
            self._sockets[gateway] = connection
            self._start(self._receive(gateway, connection))

    async def _receive(self, gateway: int, connection: socket.socket) -> None:
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while data := await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
                for frame in frames.feed(data):
                    await self._take(gateway, decode(frame))
        self.num_steps.pop(gateway, None)

    async def _take(self, gateway: int, message: Message) -> None:
        if isinstance(message, Hello):
            self.num_steps.setdefault(gateway, 0)
            await self.send(gateway, self.info)
        elif isinstance(message, Abort):
            self.aborted.update(message.request_ids)
            self._stopped.update((gateway, name) for name in message.request_ids)
            self.aborted_branches.update(message.branches)
        elif isinstance(message, Hold):
            self.held.append(message)
        elif isinstance(message, DropPrefix):
            self.dropped.append(message)
        elif isinstance(message, UnloadAdapter):
            self.unloaded.append(message.name)
        elif isinstance(message, Submit):
            self.submitted[message.request.request_id] = message.request
            if self.poison(message.request):
                self.kill()
            else:
                self._start(self._stream(gateway, message.request))

    async def _stream(self, gateway: int, request: Request) -> None:
        self.num_running += 1
        try:
            await self._answer(gateway, request)
        finally:
            self.num_running -= 1

    async def _answer(self, gateway: int, request: Request) -> None:
        """One step after the other: of each branch that still runs its next output."""
        num_branches = request.sampling_params.num_branches
        running = {index: self._outputs(request, index) for index in range(num_branches)}
        while running and (gateway, request.request_id) not in self._stopped:
            await self.may_speak.wait()
            outputs = [next(branch) for branch in running.values()]
            for output in outputs:
                is_over = output.finish_reason is not None
                if is_over or (request.request_id, output.index) in self.aborted_branches:
                    del running[output.index]
            if not running:
                outputs[-1] = msgspec.structs.replace(outputs[-1], is_last=True)
            await self._send_step(gateway, outputs)
            await asyncio.sleep(self.step_s)

    async def _send_step(self, gateway: int, outputs: list[RequestOutput]) -> None:
        self.num_steps[gateway] += 1
        await self.send(gateway, step_of(self.num_steps[gateway], outputs, self.stats))
        if self.holds_in is not None:
            self.holds_in -= 1
            if self.holds_in == 0:
                self.may_speak.clear()
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in == 0:
                await asyncio.sleep(0.01)  # what was sent is under way
                self.kill()

    def _outputs(self, request: Request, index: int) -> Iterator[RequestOutput]:
        """Of one branch."""
        params, request_id = request.sampling_params, request.request_id
        if self.refusal is not None:
            yield RequestOutput(
                request_id=request_id, index=index, finish_reason=FinishReason.ERROR,
                error=self.refusal, is_refused=True, param=self.refused_param,
            )  # fmt: skip
            return
        if request.pooling is not None:
            yield RequestOutput(
                request_id=request_id, finish_reason=FinishReason.STOP, num_cached_tokens=1,
                vector=VECTOR, spent=self.spent,
            )  # fmt: skip
            return
        entries = _prompt_logprobs(request)
        prompt_logprobs = entries if index == 0 else ()
        if len(entries) > 1:  # a prompt computed in two chunks; no branch has a token before that
            yield RequestOutput(
                request_id=request_id, index=index, prompt_logprobs=prompt_logprobs[:1],
                num_cached_tokens=NUM_CACHED,
            )  # fmt: skip
            prompt_logprobs = prompt_logprobs[1:]
        first = RequestOutput(
            request_id=request_id, index=index, prompt_logprobs=prompt_logprobs,
            num_cached_tokens=NUM_CACHED,
        )  # fmt: skip
        if params.max_tokens == 0:
            yield msgspec.structs.replace(first, finish_reason=FinishReason.LENGTH)
        elif params.beam_search is not None:
            yield _hypothesis(first, list(self._tokens(first, params)))
        else:
            num_known = len(request.output_token_ids)
            yield from self._tokens(first, params, num_known=num_known)

    def _tokens(
        self, first: RequestOutput, params: SamplingParams, *, num_known: int = 0
    ) -> Iterator[RequestOutput]:
        index = first.index
        own = self.script_of(self.submitted[first.request_id])
        script = own or self.scripts.get(index, self.script)
        for number in itertools.count(num_known):
            if index == 0 and number in self.notices:
                yield RequestOutput(request_id=first.request_id, notice=self.notices[number])
            if self.failure is not None and number == 1:
                yield RequestOutput(
                    request_id=first.request_id, index=index, finish_reason=FinishReason.ERROR,
                    error=self.failure,
                )  # fmt: skip
                return
            is_eos = number == len(script) and not params.ignore_eos
            token_id = 0 if is_eos else script[number % len(script)]
            is_end = is_eos or token_id in params.stop_token_ids
            reason = self.limit_reason if number + 1 == params.max_tokens else None
            output = RequestOutput(
                request_id=first.request_id,
                index=index,
                token_ids=(token_id,),
                logprobs=self._logprobs(index, token_id, params.num_logprobs),
                finish_reason=FinishReason.STOP if is_end else reason,
                stop_token_id=token_id if is_end else None,
                spent=self.spent if is_end or reason is not None else None,
                num_draft_tokens=self.drafts[0],
                num_accepted_tokens=self.drafts[1],
            )
            yield (
                output
                if number > num_known
                else msgspec.structs.replace(
                    output,
                    prompt_logprobs=first.prompt_logprobs,
                    num_cached_tokens=first.num_cached_tokens,
                )
            )
            if output.finish_reason is not None:
                return

    def _logprobs(
        self, index: int, token_id: int, num_top: int | None
    ) -> tuple[TokenLogprobs, ...]:
        if num_top is None:
            return ()
        logprob = self.mean_logprobs.get(index, -0.5)
        top = ((token_id, logprob), *((other, float("-inf")) for other in self.others))
        return (TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top=top[:num_top]),)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...]:
    """Of the token at position p: -p, and second to token 7."""
    num_top = request.sampling_params.prompt_logprobs
    if num_top is None:
        return ()
    return tuple(
        TokenLogprobs(
            token_id=token_id,
            logprob=-float(position),
            rank=2,
            top=((7, -0.25), (token_id, -float(position)))[:num_top],
        )
        for position, token_id in enumerate(request.prompt_token_ids[1:], start=1)
    )


def _hypothesis(first: RequestOutput, outputs: list[RequestOutput]) -> RequestOutput:
    """A search tells of its results at the end alone."""
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        score=-float(first.index),
    )
