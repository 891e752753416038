"""From texts to vectors, scores or labels: several prompts that are computed beside each other, and
beside streams, and answered together.

    texts → token ids → (each fits the context?) → Pooled
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.errors import InvalidRequestError, PromptTooLongError
from penstock.engine.pooling.pairs import PairPrompts
from penstock.engine.pooling.settings import PoolingParams, PoolingTask
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import (
    NO_OUTPUT,
    FinishReason,
    ImageInput,
    Request,
    RequestOutput,
    Spent,
)
from penstock.gateway.admission.admission import Admission, Reservation
from penstock.gateway.auth.callers import ANYBODY, Caller
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.generation.context_limits import (
    check_prompt_bytes,
    check_vocabulary,
    effective_priority,
)
from penstock.gateway.generation.request_planner import LONG_TEXT_CHARS, LongWork
from penstock.gateway.generation.served_model import ServedModel
from penstock.gateway.sources import next_of
from penstock.gateway.storage.usage.ledger import Counts, Ledger, UsageRecord, settled, today
from penstock.gateway.telemetry.metrics import Metrics, StreamMeter

MANY_NUMBERS = 1 << 18  # of vectors: from here on working with them would stall the event loop


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The prompt of a request for a vector or a score.

    Attributes:
        param: the parameter that it came from.
        num_first_tokens: as in `PoolingParams`.
        images: in the ids.
    """

    token_ids: Sequence[int]
    param: str
    num_first_tokens: int = 0
    images: tuple[ImageInput, ...] = ()


class Embedder:
    """Tokenises texts and plans their vectors, scores or labels. What can be refused is refused
    here.

    Args:
        adapters: of this model.
        long_work: tokenises long texts off the event loop.
        max_prompt_bytes: see `GatewayConfig`.
    """

    def __init__(
        self,
        engine: EnginePool,
        model: ServedModel,
        *,
        adapters: AdapterRegistry,
        metrics: Metrics,
        ledger: Ledger,
        admission: Admission,
        long_work: LongWork,
        max_prompt_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.long_work = long_work
        self._engine = engine
        self._metrics = metrics
        self._ledger = ledger
        self._admission = admission
        self._max_prompt_bytes = max_prompt_bytes
        self._pairs: PairPrompts | None = None

    def max_model_len(self) -> int:
        """The context of the engine that runs. Raises `EngineDeadError`."""
        return self._engine.info_for_running().max_model_len

    async def tokenise_each(
        self,
        texts: Sequence[tuple[str, str]],
        *,
        add_special_tokens: bool,
        truncate: Callable[[int], int | None],
    ) -> list[PooledPrompt]:
        """Prompts of texts, each after the name of its parameter.

        Args:
            truncate: the context's length → the tokens beyond which a text's end is cut off, if it
                is.

        Raises:
            As `tokenise`.
        """
        encode = self.model.tokenizer.encode

        def prompts(max_tokens: int | None) -> Iterator[PooledPrompt]:
            for param, text in texts:
                token_ids = encode(
                    text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, param=param
                )
                yield PooledPrompt(token_ids, param)

        return await self._tokenise_all(texts, prompts, truncate)

    async def tokenise_pairs(
        self,
        firsts: Sequence[tuple[str, str]],
        seconds: Sequence[tuple[str, str]],
        *,
        instruction: str | None,
        truncate: Callable[[int], int | None],
    ) -> list[PooledPrompt]:
        """Prompts of pairs for a model that scores them; a single first text belongs to every
        second one.

        Args: as in `tokenise_each` and `PairPrompts.prompt`.
        """
        self._pairs = self._pairs or PairPrompts(
            self.model.tokenizer, self.model.pooling.pair_format
        )
        encode, make = self.model.tokenizer.encode, self._pairs.prompt
        info = await self._engine.require_info()
        queries = list(firsts) * (len(seconds) // len(firsts))

        def prompts(max_tokens: int | None) -> Iterator[PooledPrompt]:
            for param, query in firsts:  # before it is tokenised with each of many documents
                _check_length(PooledPrompt(encode(query, param=param), param), info)
            for (_, query), (param, text) in zip(queries, seconds, strict=True):
                try:
                    token_ids, num_first = make(
                        query, text, instruction=instruction, max_tokens=max_tokens, param=param
                    )
                except PromptTooLongError as error:  # the query leaves no room, cut off or not
                    raise PromptTooLongError(
                        str(error), max_model_len=info.max_model_len, param=param
                    ) from None
                yield PooledPrompt(token_ids, param, num_first)

        return await self._tokenise_all([*firsts, *seconds], prompts, truncate)

    async def cut_off(
        self, texts: Sequence[tuple[str, str]], max_tokens: int
    ) -> list[tuple[str, str]]:
        """Texts, each after the name of its parameter, without what is beyond so many tokens."""
        first = self.model.tokenizer.first_text
        num_chars = sum(len(text) for _, text in texts)
        return await self.long_work.run(
            lambda: [(param, first(text, max_tokens, param=param)) for param, text in texts],
            is_long=num_chars >= LONG_TEXT_CHARS,
        )

    async def _tokenise_all(
        self,
        texts: Sequence[tuple[str, str]],
        prompts: Callable[[int | None], Iterator[PooledPrompt]],
        truncate: Callable[[int], int | None],
    ) -> list[PooledPrompt]:
        """The prompts, up to the first that is too long."""
        info = await self._engine.require_info()
        max_tokens = truncate(info.max_model_len)
        longest = self.model.tokenizer.longest_token_bytes if max_tokens is None else None
        for param, text in texts:
            check_prompt_bytes(
                text,
                max_model_len=info.max_model_len,
                longest_token_bytes=longest,
                max_bytes=self._max_prompt_bytes,
                param=param,
            )

        def checked() -> list[PooledPrompt]:
            return [_check_length(prompt, info) for prompt in prompts(max_tokens)]

        # A text may be tokenised with each of the others.
        num_chars = len(texts) * max(len(text) for _, text in texts)
        return await self.long_work.run(checked, is_long=num_chars >= LONG_TEXT_CHARS)

    async def pool(
        self,
        request_id: str,
        prompts: Sequence[PooledPrompt],
        task: PoolingTask,
        *,
        model: str | None = None,
        caller: Caller = ANYBODY,
        deadline_s: float | None = None,
        priority: int | None = None,
    ) -> Pooled:
        """Vectors or scores of prompts that fit and are admitted, together and as one request, but
        are not submitted.

        Args:
            model: the name that `AdapterRegistry.require` has returned.

        Raises:
            InvalidRequestError: a prompt cannot be served.
            RequestRefusedError: 429 or 503: the request was not admitted; 404: the adapter was
                unloaded meanwhile.
            EngineDeadError: the engine is not available.
        """
        info = await self._engine.require_info()
        adapter = self.adapters.adapter(model)
        band = effective_priority(caller, priority, info.scheduling_policy)
        for prompt in prompts:
            _check_length(prompt, info)
            check_vocabulary(prompt.token_ids, info.vocab_size, param=prompt.param)
        num_tokens = sum(len(each.token_ids) for each in prompts)
        reservation = await self._admission.admit(
            caller, num_tokens, NO_OUTPUT, deadline_s=deadline_s
        )
        now_s = time.time()
        requests = [
            Request(
                request_id=f"{request_id}-{number}",
                prompt_token_ids=tuple(prompt.token_ids),
                sampling_params=NO_OUTPUT,
                arrival_s=now_s,
                tenant=caller.tenant,
                weight=caller.weight,
                priority=band,
                adapter=adapter,
                cache_salt=caller.salt_of(None),
                images=prompt.images,
                pooling=PoolingParams(task=task, num_first_tokens=prompt.num_first_tokens),
            )
            for number, prompt in enumerate(prompts)
        ]
        meter = StreamMeter(self._metrics, caller.tenant)
        return Pooled(
            self._engine,
            requests,
            meter=meter,
            reservation=reservation,
            ledger=self._ledger,
            key_id=caller.key_id,
        )


def _check_length(prompt: PooledPrompt, info: EngineInfo) -> PooledPrompt:
    """The prompt, if it fits.

    Raises:
        InvalidRequestError: it has no tokens.
        PromptTooLongError: it is longer than the context.
    """
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("the text has no tokens", param=prompt.param)
    if num_tokens > info.max_model_len:
        raise PromptTooLongError(
            f"your {prompt.param} resulted in {num_tokens} tokens. Please reduce its length; "
            "truncate_prompt_tokens cuts it off.",
            max_model_len=info.max_model_len,
            param=prompt.param,
        )
    return prompt


class Pooled:
    """Requests with `pooling`, of one caller's request. `run` may be called once.

    Args:
        meter: counts them as one request.
        reservation: of all of them.
        ledger: where their usage is recorded, as that of one request.
        key_id: of the caller's API key.
    """

    def __init__(
        self,
        engine: EnginePool,
        requests: Sequence[Request],
        *,
        meter: StreamMeter,
        reservation: Reservation,
        ledger: Ledger,
        key_id: str,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._meter = meter
        self._reservation = reservation
        self._ledger = ledger
        self._key_id = key_id
        self.num_prompt_tokens = sum(len(each.prompt_token_ids) for each in requests)
        self._used = Counts(num_requests=1, prompt_tokens=self.num_prompt_tokens)

    async def run(self) -> list[bytes]:
        """The vectors, in the order of the requests. If one fails, or this is cancelled, all are
        aborted.

        Raises:
            EngineDeadError: the engine died.
            InvalidRequestError: the engine refused a request.
            GenerationFailedError: the engine gave up on a request.
        """
        reason, is_done = FinishReason.ABORT, False
        streams: list[EngineStream] = []
        try:
            streams += map(self._engine.submit, self._requests)
            vectors = [await self._vector(stream) for stream in streams]
            reason, is_done = FinishReason.STOP, True
        except Exception:
            reason = FinishReason.ERROR
            raise
        finally:
            for stream in streams:
                self._engine.abort(stream)
            if is_done:
                self._meter.output(0, num_tokens=0, num_prompt_tokens=self.num_prompt_tokens)
            used = self._used if is_done else Counts()
            self._meter.finished(reason.value, used)
            self._reservation.release(num_prompt=used.prompt_tokens, num_cached=used.cached_tokens)
        await settled(self._ledger.note(self._record()))
        return vectors

    def _record(self) -> UsageRecord:
        first = self._requests[0]
        return UsageRecord(
            id=first.request_id,
            tenant=first.tenant,
            key_id=self._key_id,
            day=today(),
            counts=self._used,
        )

    def _count(self, output: RequestOutput) -> None:
        spent = output.spent or Spent()
        self._used = self._used.plus(
            Counts(
                cached_tokens=output.num_cached_tokens,
                host_cached_tokens=output.num_host_cached_tokens,
                compute_us=spent.compute_us,
                block_us=spent.block_us,
            )
        )

    async def _vector(self, stream: EngineStream) -> bytes:
        while (outputs := await next_of(stream)) is not None:
            for output in outputs:
                if output.vector is not None:
                    self._reservation.started()
                    self._count(output)
                    return output.vector
                _check(output)
        raise GenerationFailedError("the engine gave no vector")


def _check(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        message = output.error or "the engine gave no reason"
        if output.is_refused:
            raise InvalidRequestError(message, param=output.param)
        raise GenerationFailedError(message)
