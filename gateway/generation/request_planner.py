"""Plans generations. A request that can be refused is refused here, before its generation exists.

    prompt → token ids → (fits the context and KV memory? its grammar compiles?) → Generation

Long texts are tokenised off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec

from penstock.engine.chat_formats import (
    ModelFormats,
    OfferedTools,
    OutputFormat,
    Piece,
    TemplateFacts,
    template_messages,
    with_known_effort,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import (
    Adapter,
    ImageInput,
    Request,
    Retention,
    SamplingParams,
    check_choice,
)
from penstock.engine.text import OutputText, with_special_stops
from penstock.engine.text.bad_words import bad_words_token_ids
from penstock.engine.text.chat_template import MAX_CPU_S, ChatTemplate, SlowTemplateError
from penstock.engine.vision.image_file import LoadedImage
from penstock.engine.vision.message_parts import MessageParts, with_parts
from penstock.gateway import installed_version
from penstock.gateway.admission.admission import Admission, Reservation
from penstock.gateway.auth.callers import ANYBODY, Caller
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.generation.cache_history import (
    NO_PREDECESSOR,
    CacheHistory,
    Comparison,
    Predecessor,
    PromptShape,
    shape_of,
)
from penstock.gateway.generation.context_limits import (
    Effort,
    GenerationOptions,
    check_logprobs,
    check_prompt_bytes,
    check_vocabulary,
    default_prompt_bytes,
    effective_priority,
    fit_branches,
    output_limit,
)
from penstock.gateway.generation.fill_in_middle import GapPrompts
from penstock.gateway.generation.generation import DeltaSource, Generation
from penstock.gateway.generation.grammar_check import GrammarCheck
from penstock.gateway.generation.images.loader import ImageLoader
from penstock.gateway.generation.paced_work import LARGE, PacedWork, work_of
from penstock.gateway.generation.progress import Estimates
from penstock.gateway.generation.prompt_memory import MIN_KNOWN_CHARS, PromptMemory
from penstock.gateway.generation.served_model import ServedModel
from penstock.gateway.generation.template_parts import as_read, names_parts_of, reads_of
from penstock.gateway.generation.template_process import TemplateProcess
from penstock.gateway.storage.usage.ledger import Ledger
from penstock.gateway.telemetry.metrics import Metrics, StreamMeter

LONG_TEXT_CHARS = 64 << 10  # from here on tokenising would stall the event loop
_LONG_TEXT_TOKENS = 16 << 10
_MANY_MESSAGES = 64  # a template may take quadratic time in the number of messages
_MAX_SHORT_S = 0.05  # of a template on the event loop; ordinary ones take a tenth of it at most
NUM_CONTEXT_TOKENS = 64  # last tokens of a prompt on which the continuing text can depend
_MAX_THREADS = 2  # each may need 100 times a text's bytes, and the engine needs the cores
_MAX_OPEN = 64  # running and waiting; each keeps its text in memory
# Google's, of the OpenAI-compatible API of Gemini 2.5; more effort is no limit.
_EFFORT_BUDGETS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}
_NAME_CHARS = 12  # of a digest in a fingerprint
_SESSION_CHARS = 16
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation and how to render it; `images` are those of its messages, in order.

    Attributes:
        keeps_places: no system message may be shown elsewhere (`chat_formats.system_messages`).
        dropped: by the name of a rule, how much of the request is not in the messages.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write their own
    template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    images: Sequence[LoadedImage] = ()
    keeps_places: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)


class RequestPlanner:
    """Tokenises prompts and plans their generations.

    Args:
        ledger: where what generations use is recorded.
        images: loads the images of requests.
        history: of prompts, for comparisons; None: nothing is compared.
        templates: renders the chat templates of requests; None: requests may not have any.
        max_prompt_bytes, max_logprobs: see `GatewayConfig`.
    """

    def __init__(
        self,
        engine: EnginePool,
        model: ServedModel,
        *,
        metrics: Metrics,
        ledger: Ledger,
        admission: Admission,
        adapters: AdapterRegistry,
        images: ImageLoader,
        templates: TemplateProcess | None = None,
        history: CacheHistory | None = None,
        max_prompt_bytes: int | None = None,
        max_logprobs: int = -1,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.images = images
        self.long_work = LongWork()
        self.generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.paced_work = PacedWork()
        self.grammars = GrammarCheck(model.directory, metrics)
        self.gaps = GapPrompts(
            model.fill_in_middle, self.tokenise, lambda: engine.info_for_running().max_model_len
        )
        self._engine = engine
        self._metrics = metrics
        self._ledger = ledger
        self._estimates = Estimates(
            lambda: engine.stats.prefill_tokens_per_s / engine.num_engines,
            metrics.estimate_ratio.observe,
        )
        self._history = history
        self._admission = admission
        self._memory = PromptMemory(model.tokenizer)
        self._templates = templates
        self._max_prompt_bytes = max_prompt_bytes
        self._max_logprobs = max_logprobs
        self._weights = b""
        takes_parts = model.images is None or model.message_parts is not MessageParts.PLAIN
        self._reads_part = reads_of(model.chat_template) if takes_parts else names_parts_of(None)

    async def max_model_len(self) -> int:
        """Tokens of the context. Raises: EngineDeadError."""
        return (await self._engine.require_info()).max_model_len

    def fingerprint(self, adapter: Adapter | None = None) -> str:
        """Names the server's version and the weights."""
        info = self._engine.info
        if info is not None:  # else an engine is being started again, with the same weights
            self._weights = info.cache_root
        return _fingerprint(self._weights, "" if adapter is None else adapter.digest)

    async def close(self) -> None:
        """Stop the threads and the processes."""
        self.long_work.close()
        self.paced_work.close()
        self.images.close()
        self._estimates.close()
        await self.grammars.close()
        if self._templates is not None:
            await self._templates.close()

    async def tokenise_chat(
        self, text: str, *, add_special_tokens: bool, must_fit: bool, tenant: str = ""
    ) -> list[int]:
        """The token ids of a rendered conversation. Raises as `tokenise`."""
        if add_special_tokens or len(text) < MIN_KNOWN_CHARS:
            return await self.tokenise(
                text, add_special_tokens=add_special_tokens, param="messages", must_fit=must_fit
            )
        reused = await self.long_work.run(
            partial(self._memory.search(tenant), text), is_long=len(text) >= LONG_TEXT_CHARS
        )
        rest = await self.tokenise(
            reused.rest,
            add_special_tokens=False,
            param="messages",
            must_fit=must_fit,
            num_known_tokens=len(reused.token_ids),
        )
        token_ids = [*reused.token_ids, *rest]
        self._memory.remember(tenant, text, token_ids)
        return token_ids

    async def render_chat(self, prompt: ChatPrompt) -> str:
        """A conversation, rendered by the model's or the request's template, with the tokens of its
        images.

        Raises:
            InvalidRequestError: the template raises an error, or requests may not have templates.
        """
        text = await self._rendered(prompt)
        if not prompt.images:
            return text
        return self.images.expanded(text, prompt.images, param="messages")

    async def _rendered(self, prompt: ChatPrompt) -> str:
        template = self.model.chat_template
        source = template.source_for(prompt.template, has_tools=bool(prompt.tools))
        documents = prompt.kwargs.get("documents")
        if documents and "documents" not in (source or ""):
            raise InvalidRequestError(_no_documents(template), param="documents")
        facts = await self.template_facts(prompt.template)
        is_own = prompt.template is None or prompt.template in template.named
        if is_own:
            shown = {"messages": prompt.messages, "tools": prompt.tools, "documents": documents}
            size, num_messages = work_of(shown), len(prompt.messages)
            if (
                num_messages < _MANY_MESSAGES
                and size < LARGE
                and _num_chars(prompt.messages) < LONG_TEXT_CHARS
            ):
                with contextlib.suppress(SlowTemplateError):  # then it counts as long
                    return self._render(prompt, source, facts, max_cpu_s=_MAX_SHORT_S)
            render = partial(self._render, prompt, source, facts, max_cpu_s=MAX_CPU_S)
            return await self.paced_work.run(render, size=size + num_messages)
        if self._templates is None:
            raise RequestRefusedError(
                "chat_template is not enabled on this server; start it with "
                "--trust-request-chat-template",
                code="unsupported_parameter",
                param="chat_template",
            )
        assert source is not None
        arguments = self._template_arguments(prompt, source, facts)
        return await self._templates.render(source, template.special_tokens, arguments)

    async def template_facts(self, template: str | None) -> TemplateFacts | None:
        """What a request's template shows; None: it has none, or may not have one. Raises as
        `render_chat`."""
        if template is None:
            return None
        known = self.model.formats.facts.named.get(template)
        if known is not None or self._templates is None:
            return known
        return await self._templates.facts(template, self.model.chat_template.special_tokens)

    def _render(
        self,
        prompt: ChatPrompt,
        source: str | None,
        facts: TemplateFacts | None,
        *,
        max_cpu_s: float,
    ) -> str:
        arguments = self._template_arguments(prompt, source, facts)
        return self.model.chat_template.render(template=source, max_cpu_s=max_cpu_s, **arguments)

    def _template_arguments(
        self, prompt: ChatPrompt, source: str | None, facts: TemplateFacts | None
    ) -> dict[str, Any]:
        """Arguments of `ChatTemplate.render`, of which the template shows everything.

        Args:
            facts: of the request's own template.
        """
        messages, tools = prompt.messages, prompt.tools
        is_plain = not (tools or prompt.keeps_places or self.model.images) and all(
            _is_plain(message, is_first=not at) for at, message in enumerate(messages)
        )
        if not is_plain:
            reads = self._reads_part if prompt.template is None else names_parts_of(source)
            messages = as_read(messages, reads)
            messages, tools = self.model.formats.for_template(
                messages, tools, template=facts, keeps_places=prompt.keeps_places
            )
        own = self.model.formats.facts_for(has_tools=bool(tools), template=facts)
        if not is_plain:
            messages = with_parts(messages, self.model.message_parts, self.model.images)
            messages = template_messages(messages, own)
        variables: Mapping[str, Any] = {**self.model.template_defaults, **prompt.kwargs}
        if "reasoning_effort" in variables:
            variables = with_known_effort(variables, own.calls)
        return {
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
            "kwargs": {"tools": tools, **variables},
        }

    async def count(self, caller: Caller) -> None:
        """Count a request to steer another, which is a request. Raises as `Admission.count`."""
        await self._admission.count(caller)

    async def tokenise(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        param: str,
        must_fit: bool,
        num_known_tokens: int = 0,
    ) -> list[int]:
        """The token ids of a text.

        Args:
            param: the parameter that the text came from.
            must_fit: the whole text must fit the context, after `num_known_tokens` others.

        Raises:
            InvalidRequestError: the tokenizer cannot process the text.
            PromptTooLongError: the text's length shows that it does not fit, or that tokenising it
                would take too long.
            EngineDeadError: the engine is not available.
            RequestRefusedError: 503: too many long texts are waiting.
        """
        engine = self._engine
        info = await engine.require_info() if must_fit else engine.info_for_running()
        tokenizer = self.model.tokenizer
        check_prompt_bytes(
            text,
            max_model_len=info.max_model_len,
            longest_token_bytes=tokenizer.longest_token_bytes if must_fit else None,
            max_bytes=self._max_prompt_bytes,
            param=param,
            num_known_tokens=num_known_tokens,
        )
        return await self.long_work.run(
            partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, param=param),
            is_long=len(text) >= LONG_TEXT_CHARS,
        )

    async def detokenise(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self.long_work.run(
            partial(
                self.model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
            ),
            is_long=len(token_ids) >= _LONG_TEXT_TOKENS,
        )

    async def plan(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        options: GenerationOptions,
        *,
        param: str,
        caller: Caller = ANYBODY,
        deadline_s: float | None = None,
        retention: Retention | None = None,
        images: tuple[ImageInput, ...] = (),
        reservation: Reservation | None = None,
        shape: PromptShape | None = None,
        predecessor: Predecessor = NO_PREDECESSOR,
        session: str = "",
        is_agent: bool = False,
    ) -> Generation:
        """A generation that fits and is admitted, but not started. The caller must enter or discard
        it.

        Args:
            param: the parameter that the prompt came from, for error messages.
            reservation: of a request that is already admitted.
            session: names the conversation that it is a turn of, among its tenant's.
            is_agent: that one's last turn ended in a tool call.
            deadline_s: seconds from now within which the first token is wanted.
            shape: of the prompt, if it is a conversation's.
            predecessor: with which its prompt is compared.

        Raises:
            InvalidRequestError: the prompt or a sampling parameter cannot be served.
            RequestRefusedError: the output's grammar is refused. 429 or 503: the request was not
                admitted.
            EngineDeadError: the engine is not available.
        """
        info = await self._engine.require_info()
        priority = effective_priority(caller, options.priority, info.scheduling_policy)
        params = _fitting_params(options, len(prompt_token_ids), info=info, param=param)
        params = await self._with_bad_words(params)
        params = self._with_thought_limit(params, options, prompt_token_ids)
        prediction_token_ids = await self._tokenise_prediction(options.prediction, info)
        for name, token_ids in (
            (param, prompt_token_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("prediction", prediction_token_ids),
        ):
            check_vocabulary(token_ids, info.vocab_size, param=name)
        check_logprobs(params, self._max_logprobs)
        params = with_special_stops(params, self.model.tokenizer, vocab_size=info.vocab_size)
        check_choice(params, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        if reservation is None:
            reservation = await self._admission.admit(
                caller, len(prompt_token_ids), params, deadline_s=deadline_s
            )
        try:
            for name, grammar in options.grammars:
                try:
                    await self.grammars.check(grammar, param=name, info=info, tenant=caller.tenant)
                except RequestRefusedError:
                    if not grammar.triggers:
                        raise
                    # Nobody asked for it: calls are read as they come.
                    params = msgspec.structs.replace(params, structured_outputs=None)
        except BaseException:
            reservation.release()
            raise
        now_s = time.time()
        return self._generation(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt_token_ids),
                sampling_params=params,
                arrival_s=now_s,
                tenant=caller.tenant,
                weight=caller.weight,
                priority=priority,
                cache_salt=caller.salt_of(options.cache_salt),
                wants_queue_position=options.wants_queue_position,
                retention=retention,
                prediction_token_ids=prediction_token_ids,
                adapter=self.adapters.adapter(options.model),
                images=images,
                session=_session_key(caller.tenant, session),
                is_agent=is_agent,
            ),
            continues_prompt=options.continues_prompt,
            reservation=reservation,
            output_format=options.output_format,
            has_end_logprobs=options.has_end_logprobs,
            tells_every_token=options.tells_every_token,
            key_id=caller.key_id,
            comparison=self._comparison(shape, predecessor, info),
        )

    def shape_of(self, prompt: ChatPrompt, text: str) -> PromptShape | None:
        """The shape of a conversation's prompt, for `plan`.

        Args:
            text: its rendering.
        """
        if self._history is None:
            return None
        return shape_of(
            text,
            messages=prompt.messages,
            tools=prompt.tools,
            template=prompt.template,
            parameters={**self.model.template_defaults, **prompt.kwargs},
            dropped=prompt.dropped,
        )

    def _comparison(
        self, shape: PromptShape | None, predecessor: Predecessor, info: EngineInfo
    ) -> Comparison | None:
        if shape is None and predecessor is NO_PREDECESSOR:
            return None
        return Comparison(
            self._history,
            shape,
            predecessor,
            block_size=info.block_size,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            count=self._metrics.count_compared,
        )

    def _prefill_tokens_per_s(self) -> float:
        """Of an engine; 0 while nothing has been measured."""
        return self._engine.stats.prefill_tokens_per_s / self._engine.num_engines

    async def constrained(
        self, options: GenerationOptions, offered: OfferedTools, output_format: OutputFormat | None
    ) -> GenerationOptions:
        """The options with the output's format, and with the grammar that enforces calls.

        Raises:
            InvalidRequestError: a tool's schema cannot be enforced.
            RequestRefusedError: 503: too many large ones are waiting.
        """
        if output_format is None:
            return options
        make = partial(_constrained, options, offered, output_format, self.model.formats)
        tools = {tool.name: tool.parameters for tool in output_format.tools}
        return await self.paced_work.run_if_large(make, size=work_of({"tools": tools}))

    async def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the tokens of their `bad_words`."""
        if not params.bad_words:
            return params
        encode = partial(bad_words_token_ids, self.model.tokenizer, params.bad_words)
        is_long = sum(map(len, params.bad_words)) >= LONG_TEXT_CHARS
        token_ids = await self.long_work.run(encode, is_long=is_long)
        return msgspec.structs.replace(params, bad_words_token_ids=token_ids)

    def _with_thought_limit(
        self, params: SamplingParams, options: GenerationOptions, prompt_token_ids: Sequence[int]
    ) -> SamplingParams:
        """The parameters with what their `thinking_token_budget` means in the output."""
        if params.thinking_token_budget < 0 and options.effort is not None:
            budget = self._budget_of(options.effort)
            params = msgspec.structs.replace(params, thinking_token_budget=budget)
        if params.thinking_token_budget < 0:
            return params
        tokenizer, formats = self.model.tokenizer, self.model.formats
        if options.output_format is not None:
            syntax = options.output_format.syntax
        elif params.structured_outputs is None:  # of a prompt that may be a rendered conversation
            end = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
            text = tokenizer.decode(end, skip_special_tokens=False)
            syntax = formats.syntax_after(text, has_tools=False)
        else:
            return params
        return formats.limited(params, syntax, partial(tokenizer.encode, add_special_tokens=False))

    def _budget_of(self, effort: Effort) -> int:
        """The tokens of thoughts that an effort stands for; -1: as many as the model wants. Where
        the chat template reads efforts, the model knows best; but none is none."""
        source = self.model.chat_template.source or ""
        if effort != "none" and "reasoning_effort" in source:
            return -1
        return _EFFORT_BUDGETS.get(effort, -1)

    async def _tokenise_prediction(self, text: str, info: EngineInfo) -> tuple[int, ...]:
        """Token ids of what an output may be. What is beyond the context is cut off: it could not
        be right."""
        if not text:
            return ()
        tokenizer, most = self.model.tokenizer, info.max_model_len
        longest = tokenizer.longest_token_bytes
        num_chars = most * longest if longest else default_prompt_bytes(most)
        text = text[:num_chars]
        encode = partial(tokenizer.encode, text, add_special_tokens=False, param="prediction")
        is_long = len(text) >= LONG_TEXT_CHARS
        return tuple((await self.long_work.run(encode, is_long=is_long))[:most])

    def resume(
        self,
        request: Request,
        *,
        output_token_ids: Sequence[int],
        shown: Sequence[Piece],
        epoch: int,
        continues_prompt: bool = False,
        output_format: OutputFormat | None = None,
    ) -> Generation:
        """A generation that continues one from the middle, wherever it was started. It is not
        admitted again.

        Args:
            output_token_ids, shown, epoch, output_format: see `Generation`.
            continues_prompt: the text continues the prompt.
        """
        return self._generation(
            msgspec.structs.replace(request, output_token_ids=tuple(output_token_ids)),
            continues_prompt=continues_prompt,
            shown=shown,
            epoch=epoch,
            output_format=output_format,
        )

    async def stop_found(self, source: DeltaSource) -> str | None:
        """The stop string that ended an output, which is over; None: something else did."""
        request, token_ids = source.request, source.output_token_ids(0)
        params = request.sampling_params
        if not params.stop or not token_ids:
            return None
        last = self.model.tokenizer.added_tokens
        for stop in params.stop:
            if last.get(stop.strip()) == token_ids[-1]:
                return stop
        text = self._output_text(params, source.output_format)
        return await self.long_work.run(
            lambda: text.push(token_ids).stop or text.finish().stop,
            is_long=len(token_ids) >= _LONG_TEXT_TOKENS,
        )

    def _output_text(
        self,
        params: SamplingParams,
        output_format: OutputFormat | None,
        context: Sequence[int] = (),
    ) -> OutputText:
        markers = frozenset[int]()
        if output_format is not None:
            markers = frozenset(self.model.formats.marker_tokens(output_format.syntax).values())
        return OutputText(self.model.tokenizer, params, context=context, shown=markers)

    def _generation(
        self,
        request: Request,
        *,
        continues_prompt: bool,
        shown: Sequence[Piece] = (),
        epoch: int = 1,
        reservation: Reservation | None = None,
        output_format: OutputFormat | None = None,
        has_end_logprobs: bool = False,
        tells_every_token: bool = False,
        key_id: str = "",
        comparison: Comparison | None = None,
    ) -> Generation:
        params = request.sampling_params
        context = request.prompt_token_ids[-NUM_CONTEXT_TOKENS:] if continues_prompt else ()
        texts = [
            self._output_text(params, output_format, context) for _ in range(params.num_branches)
        ]
        if self._engine.info is not None:
            self._estimates.begin(self._engine.info)
        generation = Generation(
            self._engine,
            request,
            texts=texts,
            meter=StreamMeter(self._metrics, request.tenant),
            estimates=self._estimates,
            shown=shown,
            output_format=output_format,
            epoch=epoch,
            reservation=reservation,
            has_end_logprobs=has_end_logprobs,
            tells_every_token=tells_every_token,
            ledger=self._ledger,
            key_id=key_id,
            comparison=comparison,
        )
        self.generations.add(generation)
        if reservation is not None:
            # A client may disconnect before the generation is entered or discarded.
            loop = asyncio.get_running_loop()
            weakref.finalize(generation, _release, reservation, loop).atexit = False
        return generation


@lru_cache(maxsize=64)
def _fingerprint(weights: bytes, adapter: str) -> str:
    digest = hashlib.sha256(weights).hexdigest()[:_NAME_CHARS]
    return "_".join(filter(None, ("fp", installed_version(), digest, adapter[:_NAME_CHARS])))


def _no_documents(template: ChatTemplate) -> str:
    """Why a request with documents is refused."""
    able = [repr(name) for name, source in template.named.items() if "documents" in source]
    hint = f"; chat_template may be {' or '.join(able)}" if able else ""
    return f"the chat template shows no documents{hint}"


def _is_plain(message: Mapping[str, Any], *, is_first: bool) -> bool:
    """Whether every template shows it as it is, or refuses it."""
    return (
        isinstance(message.get("content"), str)
        and message.get("role") != "tool"
        and (is_first or message.get("role") != "system")
        and "tool_calls" not in message
        and "tool_call_id" not in message
    )


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of all texts of the messages; a template may show any."""
    num, waiting = 0, list[Any](messages)
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            num += len(each)
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return num


def _constrained(
    options: GenerationOptions,
    offered: OfferedTools,
    output_format: OutputFormat,
    formats: ModelFormats,
) -> GenerationOptions:
    params = options.sampling_params
    grammar = offered.grammar(output_format, formats, params.structured_outputs)
    if grammar == params.structured_outputs:
        return msgspec.structs.replace(options, output_format=output_format)
    assert grammar is not None
    asked = [name for name, _ in options.grammars]
    param = asked[-1] if asked and not output_format.tools else "tools"
    return msgspec.structs.replace(
        options,
        output_format=output_format,
        sampling_params=msgspec.structs.replace(params, structured_outputs=grammar),
        grammars=[*options.grammars, (param, grammar)],
    )


def _fitting_params(
    options: GenerationOptions, num_prompt_tokens: int, *, info: EngineInfo, param: str
) -> SamplingParams:
    max_tokens = output_limit(
        options, num_prompt_tokens, max_model_len=info.max_model_len, param=param
    )
    return fit_branches(
        msgspec.structs.replace(options.sampling_params, max_tokens=max_tokens),
        num_prompt_tokens,
        info=info,
        is_limit_given=options.is_limit_given,
    )


def _release(reservation: Reservation, loop: asyncio.AbstractEventLoop) -> None:
    # The garbage collector may call this in any thread.
    if not (reservation.is_released or loop.is_closed()):
        loop.call_soon_threadsafe(reservation.release)


class LongWork:
    """Runs work on long texts in a few threads, in order of arrival, with a bounded queue. Short
    work runs at once."""

    def __init__(self) -> None:
        num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-text")
        self._num_open = 0

    async def run(self, work: Callable[[], _Result], *, is_long: bool) -> _Result:
        """What `work` returns.

        Raises:
            RequestRefusedError: 503: the queue is full.
        """
        if not is_long:
            return work()
        if self._num_open >= _MAX_OPEN:
            raise RequestRefusedError(
                f"{_MAX_OPEN} long prompts are already being tokenised",
                code="server_overloaded",
                status=503,
            )
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Drop work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _session_key(tenant: str, session: str) -> str:
    """What the engine knows of a session: enough to tell it from others."""
    if not session:
        return ""
    return hashlib.sha256(f"{tenant}\0{session}".encode()).hexdigest()[:_SESSION_CHARS]
