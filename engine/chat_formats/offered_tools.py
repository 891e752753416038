"""The tools that a request offers to the model, and what that means for prompt and output: how they
are rendered, how calls are found, and which grammar enforces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from penstock.engine.chat_formats.formats import TOOL_FORMATS
from penstock.engine.chat_formats.grammar import after_thoughts, call_grammar
from penstock.engine.chat_formats.output_format import OutputFormat
from penstock.engine.chat_formats.parser import Tool
from penstock.engine.chat_formats.syntax import (
    OutputSyntax,
    formats_of,
    markers_of,
    opens_thoughts,
    syntax_of,
)
from penstock.engine.chat_formats.tools_in_text import (
    ALL_SHOWN,
    FALLBACK_FORMAT,
    Messages,
    TemplateScope,
    Tools,
    scope_in,
    scope_of,
    with_tools_in_text,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.enforceable import enforceable
from penstock.engine.structured_outputs.json_schema import check_schema
from penstock.engine.text.chat_template import ChatTemplate

ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """How a model writes calls and thoughts.

    Attributes:
        tools, reasoning: names of formats; empty: it writes none.
        template: the source of its chat template.
        added_tokens: of its tokenizer.
        scope: what its template shows.
        scope_with_tools: what the template for conversations with tools shows.
    """

    tools: str = ""
    reasoning: str = ""
    template: str | None = None
    added_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    scope: TemplateScope = ALL_SHOWN
    scope_with_tools: TemplateScope = ALL_SHOWN

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        added_tokens: Mapping[str, int],
        *,
        tools: str | None = None,
        reasoning: str | None = None,
    ) -> ModelFormats:
        """The formats that a model's chat template shows, and what else it shows.

        Args:
            tools, reasoning: formats that are used instead; None: those of the template.
        """
        source = template.source_for(None, has_tools=True)
        formats = cls.found_in(template.source, added_tokens)
        found = formats_of(source)[0]
        scope, with_tools = (scope_of(template, has_tools=each) for each in (False, True))
        if not found and tools is None:  # its own calls would not be found
            with_tools = replace(with_tools, tools=False, calls=False)
        return replace(
            formats,
            tools=(found or FALLBACK_FORMAT) if tools is None else tools,
            reasoning=formats.reasoning if reasoning is None else reasoning,
            scope=scope,
            scope_with_tools=with_tools,
        )

    @classmethod
    def found_in(cls, template: str | None, added_tokens: Mapping[str, int]) -> ModelFormats:
        """The formats that a chat template shows; the fallback's for calls if it shows none."""
        tools, reasoning = formats_of(template)
        return cls(
            tools=tools or FALLBACK_FORMAT,
            reasoning=reasoning,
            template=template,
            added_tokens=added_tokens,
        )

    def for_template(
        self, messages: Messages, tools: Tools | None, *, template: str | None = None
    ) -> tuple[Messages, Tools | None]:
        """Messages and tools of which a chat template shows everything.

        Args:
            template: the source of the chat template, if it is not the model's.
        """
        scope = self.scope_with_tools if tools else self.scope
        named = self.tools
        if template is not None:
            scope, named = scope_in(template), formats_of(template)[0] or named
        return with_tools_in_text(
            messages, tools, scope=scope, tool_format=named or FALLBACK_FORMAT
        )

    def syntax_after(
        self, prompt: str, *, has_tools: bool, template: str | None = None
    ) -> OutputSyntax:
        """How the output after this prompt is written.

        Args:
            has_tools: the output may have tool calls.
            template: the chat template that rendered the prompt, if it is not the model's.
        """
        tools, reasoning, source = self.tools, self.reasoning, self.template
        if template is not None:
            found, source = formats_of(template), template
            tools, reasoning = found[0] or tools, found[1] or reasoning
        syntax = syntax_of(tools if has_tools else "", reasoning, prompt)
        if not syntax.begins_in_reasoning and opens_thoughts(source):
            return OutputSyntax(syntax.tools)  # the prompt would have begun the thought
        return syntax

    def marker_tokens(self, syntax: OutputSyntax) -> Mapping[str, int]:
        """The markers of thoughts and calls that are tokens of their own."""
        return _marker_tokens(self, syntax)


@lru_cache(maxsize=64)
def _marker_tokens(formats: ModelFormats, syntax: OutputSyntax) -> Mapping[str, int]:
    known = formats.added_tokens
    return {marker: known[marker] for marker in markers_of(syntax) if marker in known}


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
        self, formats: ModelFormats, prompt: str, *, template: str | None = None
    ) -> OutputFormat | None:
        """How the output of a prompt is read; None if it is one message.

        Args:
            template: see `ModelFormats.syntax_after`.

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
        if tools and not TOOL_FORMATS[formats.tools].starts:
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

        A call that is required is enforced, and so are limits to which tools may be called; what
        else is asked is without effect where a call is required. Where a call
        is possible, the output is either calls or what is asked.

        Args:
            asked: what the output must match otherwise.

        Raises:
            InvalidRequestError: a strict tool's schema cannot be enforced.
        """
        syntax = output_format.syntax
        tokens = formats.marker_tokens(syntax)
        is_required = bool(self.named) or self.choice == "required"
        is_limited = self.allowed is not None or any(tool.strict for tool in output_format.tools)
        if (
            is_required
            or (is_limited and output_format.tools)
            or (asked is not None and output_format.tools)
        ):
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
        return None if asked is None else after_thoughts(syntax, asked, tokens)


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
