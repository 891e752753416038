"""The engine without a server: prompts in, finished outputs back.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time", "Dear diary,"]):
            print(output.outputs[0].text)

A call steps a core in this process until all its prompts are answered. `prompts` checks and
normalises prompts, parameters and settings; `outputs` collects outputs.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec
from tqdm import tqdm

from penstock.engine.chat_formats import (
    ModelFacts,
    ModelFormats,
    facts_of,
    of_request,
    sentence_of,
    template_messages,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import EngineDeadError, InvalidRequestError
from penstock.engine.model_files.resolve import read_generation_defaults
from penstock.engine.model_files.users_files import named_as_users_do
from penstock.engine.offline.deferred_interrupt import interrupt_deferred
from penstock.engine.offline.outputs import OutputCollector, PromptOutput, VectorCollector
from penstock.engine.offline.prompts import (
    AdapterFinder,
    Conversation,
    LoRARequest,
    LoRARequests,
    Prompt,
    Prompts,
    TokenPrompt,
    check_number,
    check_vocabulary,
    conversations,
    engine_config,
    offered_tools,
    params_for,
    take_images,
    tokenise,
)
from penstock.engine.pooling.pairs import PairPrompts
from penstock.engine.pooling.settings import (
    PoolingParams,
    PoolingTask,
    cosine,
    read_pooling,
    shortened,
)
from penstock.engine.request import (
    NO_OUTPUT,
    Adapter,
    BeamSearch,
    DefaultLimit,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    check_choice,
    most_output_tokens,
)
from penstock.engine.startup import build_core
from penstock.engine.text import ChatTemplate, Tokenizer, with_special_stops
from penstock.engine.text.bad_words import bad_words_token_ids
from penstock.engine.vision.image_file import LoadedImage
from penstock.engine.vision.image_tokens import read_image_tokens
from penstock.engine.vision.message_parts import parts_of, with_parts

_CLOSED = "this LLM is closed"
_Result = TypeVar("_Result", covariant=True)


class LLM:
    """A model in this process. Threads may share it: calls run one after the other.

    Every call returns one `PromptOutput` per prompt, in the order of the prompts. If any prompt or
    parameter is invalid, the call raises before anything runs. An exception or Ctrl-C during a call
    aborts its requests, and the next call starts clean; only an error of the engine itself makes
    the `LLM` unusable. A call within a call (in a signal handler, say) raises `RuntimeError`; a
    call in a forked process, or after `close`, raises `EngineDeadError`.

    Sampling is reproducible: a draw depends only on (seed, branch, position), and the seed is 0 by
    default. One `SamplingParams` for several prompts uses the seeds seed, seed + 1, …, so that
    equal prompts get different outputs; a list of `SamplingParams` is used unchanged. Repeating a
    call repeats its outputs.

    Args:
        model: a directory, a GGUF file, a Hugging Face Hub id, or the name of a packaged model
            (`demo`, `smollm2`).
        settings: any field of the config sections by its name (`penstock.engine.config`): dtype,
            max_model_len, num_blocks, swap_space, enable_prefix_caching, max_num_seqs, device, …

    Raises:
        ConfigError: an unknown or impossible setting, or a model that cannot be loaded.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", **settings: Any) -> None:
        config = engine_config(os.fspath(model), settings)
        self._core, self.info = build_core(config)
        path = Path(self.info.model_path)
        with named_as_users_do(self.info.model, path):
            self.tokenizer = Tokenizer.from_directory(path)
            self._chat_template = ChatTemplate.from_directory(path)
            self._chat_template.check()
            self._image_tokens = read_image_tokens(path)
            self._pooling = read_pooling(path, self.info.model)
            self._defaults = read_generation_defaults(
                path,
                config.model.generation_config,
                config.model.generation_overrides,
                model=config.model.model,
            )
        self._formats = ModelFormats.of(
            ModelFacts.found_in(self._chat_template),
            self.tokenizer.added_tokens,
            sentence=sentence_of(path),
        )
        self._message_parts = parts_of(self._chat_template, self._image_tokens)
        self._adapters = AdapterFinder(config.lora, self._core)
        self._end: str | None = None  # why further calls are refused
        self._is_closing = False
        self._ids = itertools.count()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held by the call that runs
        self._caller: int | None = None  # its thread

    # -- calls ------------------------------------------------------------------------------

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Used by calls without parameters: the model's generation config over
        `SamplingParams()`."""
        return SamplingParams(**self._defaults.sampling)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        prediction: str | Sequence[str] = "",
        lora_request: LoRARequests = None,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Continue texts.

        Args:
            prompts: one prompt (a text or a list of token ids), or a list of prompts.
            sampling_params: one for all prompts, or a list with one for each; None uses
                `default_sampling_params`.
            priority: one for all prompts, or a list with one for each; lower runs first. Needs
                `scheduling_policy="priority"`.
            prediction: what the outputs may be: one text for all prompts, or a list with one for
                each. It changes no token; as far as it is right, they take less time on a CPU.
            lora_request: an adapter for all prompts, or a list with one (or None) for each. Needs
                `enable_lora=True`.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidRequestError: a prompt or parameter cannot be served; nothing was run.
        """
        tokens = self._tokenise(prompts)
        params = params_for(self._or_default(sampling_params), len(tokens))
        predictions = self._predictions(prediction, len(tokens))
        adapters = self._find_adapters(lora_request, len(tokens))
        requests = self._requests(
            tokens, params, priority, predictions=predictions, adapters=adapters
        )
        collectors = [
            OutputCollector(request, self.tokenizer, prompt=prompt.text, context=prompt.token_ids)
            for request, prompt in zip(requests, tokens, strict=True)
        ]
        return self._collect(collectors, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        prediction: str | Sequence[str] = "",
        lora_request: LoRARequests = None,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Answer conversations, each rendered with the model's chat template. Parameters without
        `max_tokens` allow what is left of the context, as over HTTP.

        An output's `text` is that of its messages; its `items` are also thoughts and tool calls.

        Args:
            messages: one conversation (a list of messages with `role` and `content`), or several.
                As over HTTP, an assistant's message may have `tool_calls`, and a message of the
                role `tool` is a result; a user's message may have images among its parts, as
                `image_url` (a data URL) or, as in vLLM, `image_pil` (Pillow's).
            chat_template: a template to use instead of the model's, or the name of another one of
                the model's.
            chat_template_kwargs: further variables for the template (`enable_thinking`, …).
            tools: functions that the model may call, as in OpenAI's chat API. They are not run.
            tool_choice: `auto`, `none`, `required`, or the name of the function to call.
            prediction: what the answers may be, as for `generate`.
            lora_request: the adapters, as for `generate`.

        Raises:
            InvalidRequestError: a template refuses its conversation, or as for `generate`.
        """
        offered = offered_tools(tools or (), tool_choice)
        source = self._chat_template.source_for(chat_template, has_tools=bool(offered.tools))
        facts = None
        if source is not None and chat_template is not None:
            facts = of_request(facts_of(self._chat_template, source), source)
        talks = [
            take_images(conversation, takes_images=self._image_tokens is not None)
            for conversation in conversations(messages)
        ]
        shown = [
            self._formats.for_template(
                conversation,
                offered.for_template,
                template=facts,
            )
            for conversation, _ in talks
        ]
        texts = [
            self._chat_template.render(
                template_messages(
                    with_parts(conversation, self._message_parts, self._image_tokens),
                    self._formats.facts_for(has_tools=bool(shown_tools), template=facts),
                ),
                add_generation_prompt=add_generation_prompt,
                template=source,
                kwargs={"tools": shown_tools, **(chat_template_kwargs or {})},
            )
            for conversation, shown_tools in shown
        ]
        formats = [offered.output_format(self._formats, text, template=facts) for text in texts]
        tokens = [
            self._chat_prompt(text, images) for text, (_, images) in zip(texts, talks, strict=True)
        ]
        params = [
            each
            if output_format is None
            else msgspec.structs.replace(
                self._formats.limited(
                    each,
                    output_format.syntax,
                    partial(self.tokenizer.encode, add_special_tokens=False),
                ),
                structured_outputs=offered.grammar(
                    output_format, self._formats, each.structured_outputs
                ),
            )
            for each, output_format in zip(
                params_for(self._or_default(sampling_params), len(tokens)), formats, strict=True
            )
        ]
        predictions = self._predictions(prediction, len(tokens))
        requests = self._requests(
            tokens,
            params,
            predictions=predictions,
            adapters=self._find_adapters(lora_request, len(tokens)),
            fills_context=True,
        )
        collectors = [
            OutputCollector(
                request,
                self.tokenizer,
                prompt=text,
                output_format=output_format,
                shown=frozenset(self._formats.marker_tokens(output_format.syntax).values())
                if output_format
                else frozenset(),
            )
            for request, text, output_format in zip(requests, texts, formats, strict=True)
        ]
        return self._collect(collectors, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        search: BeamSearch,
        *,
        max_tokens: int = 16,
        n: int | None = None,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[PromptOutput]:
        """Find the likeliest continuations, best first, with their scores.

        For stop tokens, log-probabilities or `min_tokens` use `generate` with
        `SamplingParams(beam_search=…)`.

        Args:
            n: hypotheses to return; None returns all `search.width`.

        Raises:
            InvalidRequestError: as for `generate`.
        """
        params = SamplingParams(
            beam_search=search,
            n=search.width if n is None else n,
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        )
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool = True,
    ) -> list[list[float]]:
        """The vector of each text, as the checkpoint says how to make it; of a causal language
        model that says nothing, the normalised hidden state of the last token.

        Args:
            dimensions: keep the first numbers only, normalised again (Matryoshka).
            lora_request: the adapters, as for `generate`.

        Raises:
            InvalidRequestError: as for `generate`; the model makes no embeddings; a wrong size.
        """
        self._pooling.check_dimensions(dimensions)
        vectors = self._pool(
            self._tokenise(prompts), "embed", adapters=lora_request, use_tqdm=use_tqdm
        )
        if dimensions is not None:
            vectors = [shortened(each, dimensions) for each in vectors]
        return [each.tolist() for each in vectors]

    def classify(
        self, prompts: Prompts, *, lora_request: LoRARequests = None, use_tqdm: bool = True
    ) -> list[list[float]]:
        """The probability of each label for each text, by the labels' numbers.

        Args:
            lora_request: the adapters, as for `generate`.

        Raises:
            InvalidRequestError: as for `generate`; the model has no labels.
        """
        found = self._pool(
            self._tokenise(prompts), "classify", adapters=lora_request, use_tqdm=use_tqdm
        )
        return [each.tolist() for each in found]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:
        """How well each document answers a query. A reranker reads both together; of any other
        model, it is the cosine of their embeddings.

        Args:
            query: one for all documents, or one for each.
            instruction: of a reranker that judges by one: what makes a document a good one.
            lora_request: an adapter for all texts.

        Raises:
            InvalidRequestError: as for `embed`.
        """
        texts = [documents] if isinstance(documents, str) else list(documents)
        queries = [query] * len(texts) if isinstance(query, str) else list(query)
        if len(queries) != len(texts):
            raise InvalidRequestError(
                f"{len(queries)} queries for {len(texts)} documents", param="query"
            )
        if "score" not in self._pooling.tasks:
            vectors = self._pool(
                self._tokenise([*queries, *texts]), "embed", adapters=lora_request,
                use_tqdm=use_tqdm,
            )  # fmt: skip
            return [
                cosine(one, other)
                for one, other in zip(vectors[: len(texts)], vectors[len(texts) :], strict=True)
            ]
        pairs = PairPrompts(self.tokenizer, self._pooling.pair_format)
        found = [
            pairs.prompt(one, other, instruction=instruction, param="documents")
            for one, other in zip(queries, texts, strict=True)
        ]
        prompts = [TokenPrompt(tuple(token_ids)) for token_ids, _ in found]
        firsts = [num_first for _, num_first in found]
        scores = self._pool(prompts, "score", firsts, adapters=lora_request, use_tqdm=use_tqdm)
        return [each[0] for each in scores]

    def _pool(
        self,
        prompts: Sequence[TokenPrompt],
        task: PoolingTask,
        num_first_tokens: Sequence[int] = (),
        *,
        adapters: LoRARequests,
        use_tqdm: bool,
    ) -> list[array[float]]:
        if task not in self._pooling.tasks:
            raise self._pooling.refusal()
        found = self._find_adapters(adapters, len(prompts))
        requests = self._requests(prompts, [NO_OUTPUT] * len(prompts), adapters=found)
        collectors = [
            VectorCollector(
                msgspec.structs.replace(
                    request, pooling=PoolingParams(task=task, num_first_tokens=num_first)
                )
            )
            for request, num_first in zip(
                requests, num_first_tokens or [0] * len(requests), strict=True
            )
        ]
        return self._collect(collectors, use_tqdm=use_tqdm)

    def warm(self, prompts: Prompts, *, retention: Retention | None = None) -> None:
        """Compute prompts and leave their KV in the prefix cache for later calls.

        Args:
            retention: how long to prefer that KV at eviction.

        Raises:
            InvalidRequestError: as for `generate`.
        """
        tokens = self._tokenise(prompts)
        params = [SamplingParams(max_tokens=0)] * len(tokens)
        requests = self._requests(tokens, params, retention=retention)
        self._collect(
            [OutputCollector(request, self.tokenizer) for request in requests], use_tqdm=False
        )

    def drop_prefix(self, prompt: Prompt, *, lora_request: LoRARequest | None = None) -> int:
        """Forget the cached KV of these tokens, from their end back to where another cached prefix
        branches off (so pass an answered prompt with its answer); the number of blocks
        forgotten.

        Args:
            lora_request: the adapter that computed it.
        """
        (tokens,) = self._tokenise([prompt])
        (adapter,) = self._find_adapters(lora_request, 1)
        with self._lock_of_call():
            return self._require_core().drop_prefix(
                tokens.token_ids, adapter=None if adapter is None else adapter.digest
            )

    def close(self) -> None:
        """Release the device once the running call has ended; waiting and later calls raise
        `EngineDeadError`. Does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        lock = self._lock_of_call()
        self._is_closing = True
        with lock:
            if self._end is None:
                self._end = _CLOSED
                self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts of calls ---------------------------------------------------------------------

    def _lock_of_call(self) -> threading.RLock:
        """The lock that a call holds while it uses the core.

        Raises:
            EngineDeadError: after a fork, where the thread that holds it may not exist.
            RuntimeError: this thread holds it.
        """
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this LLM belongs to process {self._pid}; make a new one after a fork"
            )
        if self._caller == threading.get_ident():
            raise RuntimeError("this thread is already inside a call of this LLM")
        return self._lock

    def _require_core(self) -> EngineCore:
        if self._end is not None or self._is_closing:
            raise EngineDeadError(self._end or _CLOSED)
        return self._core

    def _tokenise(self, prompts: Prompts) -> list[TokenPrompt]:
        return tokenise(prompts, self.tokenizer, vocab_size=self.info.vocab_size)

    def _chat_prompt(self, text: str, images: Sequence[LoadedImage]) -> TokenPrompt:
        """A rendered conversation with its images."""
        tokens = self._image_tokens if images else None
        if tokens is not None:
            text = tokens.expanded(text, images)
        # The template writes the special tokens itself.
        ids = self.tokenizer.encode(text, add_special_tokens=False, param="messages")
        places = () if tokens is None else tokens.located(ids, images)
        return TokenPrompt(tuple(ids), text, places)

    def _find_adapters(self, requests: LoRARequests, num_prompts: int) -> list[Adapter | None]:
        if requests is None:
            return [None] * num_prompts
        with self._lock_of_call():
            return self._adapters.find(requests, num_prompts)

    def _or_default(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.default_sampling_params if params is None else params

    def _requests(
        self,
        prompts: Sequence[TokenPrompt],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] = 0,
        *,
        predictions: Sequence[tuple[int, ...]] | None = None,
        adapters: Sequence[Adapter | None] | None = None,
        retention: Retention | None = None,
        fills_context: bool = False,
    ) -> list[Request]:
        arrival_s = time.time()
        return [
            Request(
                request_id=str(next(self._ids)),
                prompt_token_ids=prompt.token_ids,
                sampling_params=self._checked(
                    own, len(prompt.token_ids), fills_context=fills_context
                ),
                arrival_s=arrival_s,
                priority=band,
                retention=retention,
                prediction_token_ids=predicted,
                adapter=adapter,
                images=prompt.images,
            )
            for prompt, own, band, predicted, adapter in zip(
                prompts,
                params,
                self._priorities(priority, len(prompts)),
                predictions or [()] * len(prompts),
                adapters or [None] * len(prompts),
                strict=True,
            )
        ]

    def _checked(
        self, params: SamplingParams, num_prompt_tokens: int, *, fills_context: bool
    ) -> SamplingParams:
        size = self.info.vocab_size
        check_vocabulary(params.logit_bias, size, param="logit_bias")
        check_vocabulary(params.stop_token_ids, size, param="stop_token_ids")
        check_vocabulary(params.allowed_token_ids or (), size, param="allowed_token_ids")
        if params.bad_words:
            bad = bad_words_token_ids(self.tokenizer, params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=bad)
        params = with_special_stops(params, self.tokenizer, vocab_size=size)
        check_choice(params, vocab_size=size, eos_token_ids=self.info.eos_token_ids)
        if params.structured_outputs is not None:
            with self._lock_of_call():  # here, so that nothing runs if it is wrong
                core = self._require_core()
                core.preparation.load(core.grammars.need(params.structured_outputs))
        if not isinstance(params.max_tokens, DefaultLimit):
            return params
        limit = int(params.max_tokens)
        if fills_context:
            limit = max(1, self.info.max_model_len - num_prompt_tokens)
            limit = most_output_tokens(
                params,
                num_prompt_tokens,
                limits=range(min(max(params.min_tokens, 1), limit), limit + 1),
                block_size=self.info.block_size,
                num_blocks=self.info.num_blocks,
            )
        return msgspec.structs.replace(params, max_tokens=limit)

    def _priorities(self, priority: int | Sequence[int], num_prompts: int) -> Sequence[int]:
        bands = [priority] * num_prompts if isinstance(priority, int) else priority
        check_number(bands, num_prompts, "priorities", param="priority")
        if any(bands) and self.info.scheduling_policy != "priority":
            raise InvalidRequestError(
                'priority needs LLM(scheduling_policy="priority")', param="priority"
            )
        return bands

    def _predictions(
        self, prediction: str | Sequence[str], num_prompts: int
    ) -> list[tuple[int, ...]]:
        """Token ids of what each output may be, cut to the context."""
        texts = [prediction] * num_prompts if isinstance(prediction, str) else prediction
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(
                "prediction must be a text or a list of texts", param="prediction"
            )
        check_number(texts, num_prompts, "predictions", param="prediction")
        tokens: dict[str, tuple[int, ...]] = {}  # by text: often one for all
        for text in dict.fromkeys(texts):
            token_ids = self.tokenizer.encode(text, add_special_tokens=False, param="prediction")
            check_vocabulary(token_ids, self.info.vocab_size, param="prediction")
            tokens[text] = tuple(token_ids[: self.info.max_model_len])
        return [tokens[text] for text in texts]

    def _collect(
        self, collectors: Sequence[_Collector[_Result]], *, use_tqdm: bool
    ) -> list[_Result]:
        """Step the core until every collector is done."""
        live = {collector.request.request_id: collector for collector in collectors}
        with self._lock_of_call():  # before SIGINT is deferred: a waiting call can be interrupted
            self._caller = threading.get_ident()
            try:
                self._step_until_done(live, use_tqdm=use_tqdm)
            finally:
                self._caller = None
        return [collector.result() for collector in collectors]

    def _step_until_done(self, live: dict[str, _Collector[_Result]], *, use_tqdm: bool) -> None:
        with (
            interrupt_deferred() as deliver_interrupt,
            self._submitted(live),
            _Progress(len(live), is_shown=use_tqdm) as progress,
        ):
            while live:
                for output in self._step():
                    collector = live[output.request_id]
                    if collector.add(output):
                        self._core.abort(output.request_id, index=output.index)
                    if collector.is_done:
                        del live[output.request_id]
                    progress.count(output, is_done=collector.is_done)
                deliver_interrupt()

    @contextmanager
    def _submitted(self, live: Mapping[str, _Collector[_Result]]) -> Iterator[None]:
        """Submit requests to the core; those still live at the end are aborted."""
        core = self._require_core()
        try:
            for position, collector in enumerate(live.values()):
                try:
                    core.add(collector.request)
                except InvalidRequestError as error:
                    where = f"prompt {position}: " if len(live) > 1 else ""
                    raise type(error)(f"{where}{error}", param=error.param) from error
            yield
        finally:
            if self._end is None:
                for request_id in live:
                    core.abort(request_id)

    def _step(self) -> list[RequestOutput]:
        self._core.wait()
        try:
            return self._core.step()
        except BaseException as error:
            # Scheduler and device may now disagree about what the blocks hold.
            self._end = f"the engine failed ({type(error).__name__}: {error}); make a new LLM"
            raise


class _Collector(Protocol[_Result]):
    """The outputs of one request."""

    request: Request
    is_done: bool

    def add(self, output: RequestOutput) -> bool:
        """Add an output; whether its branch must be aborted."""
        ...

    def result(self) -> _Result: ...


class _Progress:
    """A progress bar of finished prompts, with tokens per second."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._bar = tqdm(total=num_prompts, unit="prompt", disable=not is_shown)
        self._num_tokens = 0
        self._started_s = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def count(self, output: RequestOutput, *, is_done: bool) -> None:
        self._num_tokens += len(output.token_ids)
        if is_done:
            rate = self._num_tokens / (time.monotonic() - self._started_s)
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update()
