"""What `LLM` returns, collected from the core's iterations: text, stop strings, `best_of`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.engine.chat_formats import OutputFormat, OutputItem, OutputReader, items_of
from penstock.engine.errors import EngineError
from penstock.engine.pooling.settings import numbers_of
from penstock.engine.request import FinishReason, Request, RequestOutput, TokenLogprobs
from penstock.engine.text import OutputText, Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, in vLLM's form.

    Attributes:
        rank: 1 for the likeliest token.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One output of one prompt.

    Attributes:
        index: with beam search and `best_of` the rank, likeliest first; else the branch.
        text: without the stop string or stop token, unless `include_stop_str_in_output`; of a chat
            with thoughts or tool calls, only that of its messages.
        token_ids: including the token that ended the output; tokens after a stop string are
            dropped.
        logprobs: for each token its own, then those of the likeliest by id; None unless requested.
        cumulative_logprob: their sum; None if log-probabilities were not computed.
        score: of a beam search (see `BeamSearch.length_penalty`); else None.
        finish_reason: `stop` or `length`.
        stop_reason: the stop string, EOS id or stop token id that ended the output, or
            "repetition"; None at the length limit.
        items: of a chat: its messages, thoughts ("reasoning") and tool calls ("function_call", with
            a name and the arguments as JSON text), in order; empty if they are not looked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    score: float | None
    finish_reason: str
    stop_reason: str | int | None
    items: tuple[OutputItem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutput:
    """All outputs of one prompt.

    Attributes:
        prompt: its text (of a conversation, as rendered); None if it was given as token ids.
        prompt_logprobs: as `logprobs`, for each token of the prompt; None for the first, before
            which there is nothing. None unless requested.
        num_cached_tokens: prompt tokens whose KV was reused instead of computed.
        finished: always True, since calls return when all outputs have ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class _Branch:
    """One output while it grows."""

    decoder: OutputText
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, output: RequestOutput, *, shows_stop_token: bool) -> None:
        # A token that ended the branch counts, but carries no text.
        is_hidden = output.stop_token_id is not None and not shows_stop_token
        shown = output.token_ids[:-1] if is_hidden else output.token_ids
        pushed = self.decoder.push(shown)
        self.text += pushed.text
        if pushed.stop is not None:
            self._keep(output, pushed.num_tokens)
            self._end(FinishReason.STOP, pushed.stop)
            return
        self._keep(output, len(output.token_ids))
        self.score = output.score
        if output.finish_reason is not None:
            rest = self.decoder.finish()
            self.text += rest.text
            if rest.stop is None:
                self._end(output.finish_reason, output.stop_token_id)
            else:
                self._end(FinishReason.STOP, rest.stop)

    def _keep(self, output: RequestOutput, num_tokens: int) -> None:
        self.token_ids += output.token_ids[:num_tokens]
        self.logprobs += output.logprobs[:num_tokens]

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        self.finish_reason = reason
        self.stop_reason = reason.value if reason is FinishReason.REPETITION else stop


class VectorCollector:
    """The vector or score of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_done = False
        self._vector = b""

    def add(self, output: RequestOutput) -> bool:
        """Add what the core reported. Raises `EngineError` if it gave up on the request. False:
        nothing remains to be aborted."""
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine gave no reason")
        self.is_done = output.is_last
        self._vector = output.vector or b""
        return False

    def result(self) -> array[float]:
        """The vector, or the one number of a score, once `is_done`."""
        return numbers_of(self._vector)


class OutputCollector:
    """The outputs of one request while they grow.

    Args:
        prompt: its text, if there is one.
        context: ids that precede the outputs' text (see `OutputText`).
        output_format: how thoughts and tool calls are found; None: the output is one message.
        shown: special tokens that mark them.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        prompt: str | None = None,
        context: Sequence[int] = (),
        output_format: OutputFormat | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.is_done = False
        self._prompt = prompt
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_cached_tokens = 0
        num_branches = params.n if params.beam_search is not None else params.num_branches
        self._branches = [
            _Branch(OutputText(tokenizer, params, context=context, shown=shown))
            for _ in range(num_branches)
        ]
        self._output_format = output_format
        self._tokenizer = tokenizer

    def add(self, output: RequestOutput) -> bool:
        """Add one iteration's output of one branch.

        Returns:
            whether the branch ended at a stop string while the core still runs it.

        Raises:
            EngineError: the request failed in the engine.
        """
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the request failed in the engine")
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._prompt_logprobs += output.prompt_logprobs
        branch = self._branches[output.index]
        params = self.request.sampling_params
        branch.add(output, shows_stop_token=params.include_stop_str_in_output)
        has_ended = branch.finish_reason is not None
        self.is_done = output.is_last or all(item.finish_reason for item in self._branches)
        return has_ended and output.finish_reason is None

    def result(self) -> PromptOutput:
        """Everything, once `is_done`."""
        params = self.request.sampling_params
        outputs = [
            self._output(index, item)
            for index, item in enumerate(self._branches)
            if item.finish_reason is not None  # a small vocabulary may give fewer beams
        ]
        return PromptOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else [None, *map(self._by_token, self._prompt_logprobs)],
            outputs=_likeliest(outputs, params.n),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _output(self, index: int, branch: _Branch) -> CompletionOutput:
        assert branch.finish_reason is not None
        params = self.request.sampling_params
        text, items, reason = branch.text, list[OutputItem](), branch.finish_reason
        if self._output_format is not None:
            reader = OutputReader(self._output_format)
            is_cut = reason is not FinishReason.STOP or isinstance(branch.stop_reason, str)
            items = items_of([*reader.push(text), *reader.end(is_cut=is_cut)])
            if reader.is_calling and reason in (FinishReason.STOP, FinishReason.REPETITION):
                reason = FinishReason.LENGTH  # a call that a stop string cut off must not be run
            text = "\n".join(item.text for item in items if item.kind == "message")
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(branch.token_ids),
            logprobs=None
            if params.logprobs is None
            else [self._by_token(entry) for entry in branch.logprobs],
            cumulative_logprob=None
            if params.num_logprobs is None
            else sum(entry.logprob for entry in branch.logprobs),
            score=branch.score,
            finish_reason=reason.told,
            stop_reason=branch.stop_reason,
            items=tuple(items),
        )

    def _by_token(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            if token_id not in found:
                found[token_id] = Logprob(logprob, rank, text(token_id))
        return found


def _likeliest(outputs: list[CompletionOutput], num: int) -> list[CompletionOutput]:
    """The `num` of highest mean log-probability per token, as OpenAI defines `best_of`."""
    if len(outputs) <= num:
        return outputs
    ranked = sorted(outputs, key=lambda output: -_mean_logprob(output))
    return [replace(output, index=rank) for rank, output in enumerate(ranked[:num])]


def _mean_logprob(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / max(1, len(output.token_ids))
