"""The tools that a request offers to the model, and what that means for prompt and output: how they
are rendered, how calls are found, and which grammar enforces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec

from penstock.engine.chat_formats.call_format import CallFormat
from penstock.engine.chat_formats.formats import tool_format_of
from penstock.engine.chat_formats.grammar import after_thoughts, call_grammar, is_marked
from penstock.engine.chat_formats.output_format import OutputFormat
from penstock.engine.chat_formats.parser import Tool
from penstock.engine.chat_formats.reasoning import ReasoningFormat
from penstock.engine.chat_formats.syntax import OutputSyntax, syntax_of, texts_of
from penstock.engine.chat_formats.system_messages import placed
from penstock.engine.chat_formats.template_facts import ModelFacts, TemplateFacts
from penstock.engine.chat_formats.thought_end import thought_limit
from penstock.engine.chat_formats.tools_in_text import (
    FALLBACK_FORMAT,
    Messages,
    Tools,
    scope_of,
    with_tools_in_text,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import SamplingParams, StructuredOutputs
from penstock.engine.structured_outputs.enforceable import enforceable
from penstock.engine.structured_outputs.json_schema import check_schema

ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """How a model writes calls and thoughts, and what its template shows.

    Attributes:
        tools, reasoning: formats, or their names; empty: it writes none.
        added_tokens: of its tokenizer.
        facts: of its templates.
        sentence: around the end of a thought that is cut short.
    """

    tools: CallFormat | str = ""
    reasoning: ReasoningFormat | str = ""
    added_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    facts: ModelFacts = field(default_factory=ModelFacts)
    sentence: tuple[str, str] = ("", "")

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        added_tokens: Mapping[str, int],
        *,
        tools: str | None = None,
        reasoning: str | None = None,
        sentence: tuple[str, str] = ("", ""),
    ) -> ModelFormats:
        """The formats that a model's chat templates show.

        Args:
            sentence: as of the model.
            tools, reasoning: formats that are used instead; None: those of the template.
        """
        found = facts.with_tools.calls
        if not found and tools is None:  # its own calls would not be found
            hidden = replace(facts.with_tools, shows_tools=False, shows_calls=False)
            facts = replace(facts, with_tools=hidden)
        return cls(
            tools=(found or FALLBACK_FORMAT) if tools is None else tools,
            reasoning=_reasoning_of(facts.plain) if reasoning is None else reasoning,
            added_tokens=added_tokens,
            facts=facts,
            sentence=sentence,
        )

    @property
    def described(self) -> str:
        """In a phrase, for whoever starts a server."""
        share = round(100 * self.facts.with_tools.rewritten)
        again = f"; {share} % of a turn is computed again" if share else ""
        return f"{self._written}{again}"

    @property
    def _written(self) -> str:
        calls = "no calls"
        if self.tools:
            own = isinstance(self.tools, CallFormat)
            name = self.tools.described if isinstance(self.tools, CallFormat) else self.tools
            calls = f"calls {name}{'' if own or self.facts.with_tools.calls else ' (in text)'}"
        thoughts = OutputSyntax(reasoning=self.reasoning).thoughts
        if thoughts is None:
            return calls if self.reasoning == "" else f"{calls}, thoughts {self.reasoning}"
        return f"{calls}, thoughts {thoughts.begins[0]}"

    def facts_for(self, *, has_tools: bool, template: TemplateFacts | None = None) -> TemplateFacts:
        """Those of the template that renders a conversation.

        Args:
            template: of the request's own template.
        """
        if template is not None:
            return template
        return self.facts.with_tools if has_tools else self.facts.plain

    def for_template(
        self,
        messages: Messages,
        tools: Tools | None,
        *,
        template: TemplateFacts | None = None,
        keeps_places: bool = False,
    ) -> tuple[Messages, Tools | None]:
        """Messages and tools of which a chat template shows everything.

        Args:
            template: as for `facts_for`.
            keeps_places: no system message may be shown elsewhere.
        """
        facts = self.facts_for(has_tools=bool(tools), template=template)
        if facts.late_system == "lost" or (keeps_places and facts.late_system == "moved"):
            messages = placed(messages)
        calls = self._calls(template)
        return with_tools_in_text(
            messages,
            tools,
            scope=scope_of(facts, has_tools=bool(tools)),
            tool_format=calls or FALLBACK_FORMAT,
        )

    def _calls(self, template: TemplateFacts | None) -> CallFormat | str:
        return (template.calls if template is not None else "") or self.tools

    def syntax_after(
        self, prompt: str, *, has_tools: bool, template: TemplateFacts | None = None
    ) -> OutputSyntax:
        """How the output after this prompt is written.

        Args:
            has_tools: the output may have tool calls.
            template: as for `facts_for`.
        """
        facts = self.facts_for(has_tools=has_tools, template=template)
        reasoning = (_reasoning_of(template) if template is not None else "") or self.reasoning
        calls = self._calls(template) if has_tools else ""
        syntax = syntax_of(calls, reasoning, prompt, facts.answer)
        if not syntax.begins_in_reasoning and facts.opens_thoughts:
            # The prompt would have begun the thought.
            return OutputSyntax(syntax.tools, answer=syntax.answer)
        return syntax

    def limited(
        self, params: SamplingParams, syntax: OutputSyntax, encode: Callable[[str], Sequence[int]]
    ) -> SamplingParams:
        """Parameters with what their `thinking_token_budget` means in an output.

        Args:
            encode: to tokens, in which markers are special ones.
        """
        budget, sentence = params.thinking_token_budget, self.sentence
        if budget < 0:
            return params
        if params.structured_outputs is not None and self._has_tokens(sentence[0]):
            sentence = "", sentence[1]  # a grammar knows thoughts as text
        limit = thought_limit(
            syntax, encode, tokens=self.marker_tokens(syntax), budget=budget, sentence=sentence
        )
        return msgspec.structs.replace(params, thought_limit=limit)

    def _has_tokens(self, text: str) -> bool:
        return any(_is_marker(token) and token in text for token in self.added_tokens)

    def marker_tokens(self, syntax: OutputSyntax) -> Mapping[str, int]:
        """The markers of thoughts and calls that are tokens of their own."""
        return _marker_tokens(self, syntax)


def _reasoning_of(facts: TemplateFacts) -> ReasoningFormat | str:
    return "openai_gptoss" if facts.calls == "openai" else facts.thoughts or ""


@lru_cache(maxsize=64)
def _marker_tokens(formats: ModelFormats, syntax: OutputSyntax) -> Mapping[str, int]:
    texts = texts_of(syntax)
    return {
        token: token_id
        for token, token_id in formats.added_tokens.items()
        if _is_marker(token) and any(token in text for text in texts)
    }


def _is_marker(token: str) -> bool:
    """Whether an added token may mark something: some tokenizers add plain words and space."""
    return len(token) > 2 and not token.isspace() and not token.isalnum()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request.

    Attributes:
        tools: as the model sees them.
        custom, aliases: see `OutputFormat`.
        choice: `none`: they are only shown; `required`: there is at least one call.
        named: the one tool that must be called.
        allowed: the tools that may be called; None: all.
        is_parallel: whether an output may have several calls, where none is named.
    """

    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    choice: ToolMode = "auto"
    named: str = ""
    allowed: frozenset[str] | None = None
    is_parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.choice == "none":
            return ()
        if self.named:
            return tuple(tool for tool in self.tools if tool.name == self.named)
        if self.allowed is not None:
            return tuple(tool for tool in self.tools if tool.name in self.allowed)
        return self.tools

    @property
    def has_one_call(self) -> bool:
        """Whether an output has at most one call. OpenAI promises it of a tool that is named."""
        return bool(self.named) or not self.is_parallel

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates expect them."""
        if not self.tools:
            return None
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters or {"type": "object", "properties": {}},
                },
            }
            for tool in self.tools
        ]

    def output_format(
        self, formats: ModelFormats, prompt: str, *, template: TemplateFacts | None = None
    ) -> OutputFormat | None:
        """How the output of a prompt is read; None if it is one message.

        Args:
            template: see `ModelFormats.facts_for`.

        Raises:
            InvalidRequestError: no calls are read.
        """
        tools = self.callable
        syntax = formats.syntax_after(prompt, has_tools=bool(tools), template=template)
        if tools and not syntax.tools:
            raise InvalidRequestError(
                "this server does not read calls of tools: --tool-call-parser is none",
                param="tools",
            )
        if syntax == OutputSyntax():
            return None
        return self._format(syntax)

    def _format(self, syntax: OutputSyntax) -> OutputFormat:
        return OutputFormat(
            syntax=syntax,
            tools=self.callable,
            custom=self.custom,
            aliases=self.aliases,
            max_calls=1 if self.has_one_call else None,
        )

    def format_within_message(self, formats: ModelFormats) -> OutputFormat | None:
        """How an output is read that continues a message; None if it is all text.

        Raises:
            InvalidRequestError: a call is required, which cannot follow text in this format.
        """
        tools = self.callable if formats.tools else ()
        if tools and not tool_format_of(formats.tools).starts:
            return self._format(OutputSyntax(formats.tools))
        if self.choice == "required":
            raise InvalidRequestError(
                "this model cannot call a tool in the middle of a message", param="tool_choice"
            )
        return None

    def grammar(
        self,
        output_format: OutputFormat,
        formats: ModelFormats,
        asked: StructuredOutputs | None,
    ) -> StructuredOutputs | None:
        """What the output must match; None: anything.

        A call that is required is enforced; what else is asked is without effect then. Where a call
        is possible, the output is either calls or what is asked; and where nothing is asked, a
        grammar begins with the mark of a call, so that it is one of a tool that is offered.

        Args:
            asked: what the output must match otherwise.

        Raises:
            InvalidRequestError: a strict tool's schema cannot be enforced.
        """
        syntax = output_format.syntax
        tokens = formats.marker_tokens(syntax)
        is_required = bool(self.named) or self.choice == "required"
        is_limited = self.allowed is not None or any(tool.strict for tool in output_format.tools)
        if not output_format.tools:
            return None if asked is None else after_thoughts(syntax, asked, tokens)
        if is_required or is_limited or asked is not None:
            for tool in output_format.tools:
                _check(tool)
            try:
                return call_grammar(
                    syntax,
                    output_format.tools,
                    required=is_required,
                    parallel=not self.has_one_call,
                    tokens=tokens,
                    otherwise=asked,
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(str(error), param="tools") from error
        if not is_marked(syntax):
            return None
        try:
            return call_grammar(
                syntax,
                output_format.tools,
                required=False,
                parallel=not self.has_one_call,
                tokens=tokens,
                is_lazy=True,
            )
        except InvalidRequestError:  # of a tool whose calls nobody asked to enforce
            return None


def _check(tool: Tool) -> None:
    """
    Raises:
        InvalidRequestError: no arguments match the tool's schema, or it is strict and cannot be
            enforced.
    """
    kind = "strict tool" if tool.strict else "tool"
    try:
        schema = enforceable(dict(tool.parameters or {}), is_strict=tool.strict)
        if tool.strict:
            check_schema(schema)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"the parameters of the {kind} {tool.name!r} are not supported: {error}",
            param="tools",
        ) from error
