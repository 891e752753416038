"""`tools`, `tool_choice` and `reasoning` of chat completions and responses: from their two shapes
to one `OfferedTools`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.engine.chat_formats import CUSTOM_INPUT, OfferedTools, Tool
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.api.schema.structured_outputs import MAX_BYTES, MAX_DEPTH, depth_of
from penstock.gateway.errors import RequestRefusedError

_MAX_TOOLS = 512
_MAX_DESCRIPTION_CHARS = 64 << 10
_NAMESPACE_MARK = "__"  # between a namespace and a name, as the model sees them
_T = TypeVar("_T", bound=Model)

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
_Description = Annotated[str, Field(max_length=_MAX_DESCRIPTION_CHARS)]
_Mode = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if v is not None and k != "cache_control"}


class _Lenient(Model):
    """Fields that are null count as absent."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return _without_nulls(value)


def _schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "must be a JSON Schema: an object")
    if depth_of(value) > MAX_DEPTH:
        raise PydanticCustomError(
            "value_error", "is nested more than {max} deep", {"max": MAX_DEPTH}
        )
    if len(orjson.dumps(value)) > MAX_BYTES:
        raise PydanticCustomError(
            "value_error", "has more than {max} bytes as JSON", {"max": MAX_BYTES}
        )
    return value


_Parameters = Annotated[dict[str, Any], BeforeValidator(_schema)]


class FunctionDefinition(_Lenient):
    name: _Name
    description: _Description = ""
    parameters: _Parameters | None = None
    strict: bool = False


class _Grammar(_Lenient):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=MAX_BYTES)]


class _CustomFormat(_Lenient):
    """OpenAI's two shapes: responses have the grammar's fields beside the type, chat has them in
    `grammar`."""

    type: Literal["text", "grammar"] = "text"
    grammar: _Grammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(max_length=MAX_BYTES)] | None = None

    @property
    def regex(self) -> str | None:
        if self.grammar is not None:
            return self.grammar.definition if self.grammar.syntax == "regex" else None
        return self.definition if self.syntax == "regex" else None


class CustomDefinition(_Lenient):
    name: _Name
    description: _Description = ""
    format: _CustomFormat = _CustomFormat()


def _supported(kinds: Sequence[str]) -> BeforeValidator:
    def check(kind: Any) -> Any:
        if isinstance(kind, str) and kind not in kinds:
            raise PydanticCustomError(
                "unsupported_parameter",
                "this server runs no tools of its own; {kind} is not supported, only {kinds}",
                {"kind": repr(kind), "kinds": " and ".join(map(repr, kinds))},
            )
        return kind

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class _Defined:
    """A tool of either API."""

    definition: FunctionDefinition | CustomDefinition
    namespace: str = ""

    @property
    def alias(self) -> str:
        name = self.definition.name
        return f"{self.namespace}/{name}" if self.namespace else name

    @property
    def is_custom(self) -> bool:
        return isinstance(self.definition, CustomDefinition)

    @property
    def tool(self) -> Tool:
        """As the model sees it."""
        definition = self.definition
        name = seen_name(definition.name, self.namespace)
        if isinstance(definition, FunctionDefinition):
            return Tool(
                name=name,
                description=definition.description,
                parameters=definition.parameters,
                strict=definition.strict,
            )
        value: dict[str, Any] = {"type": "string"}
        if definition.format.regex is not None:
            value["pattern"] = f"^(?:{definition.format.regex})$"
        return Tool(
            name=name,
            description=definition.description,
            parameters={
                "type": "object",
                "properties": {CUSTOM_INPUT: value},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            },
            strict=definition.format.regex is not None,
        )


def seen_name(name: str, namespace: str | None) -> str:
    """A tool's name as the model sees it."""
    return f"{namespace}{_NAMESPACE_MARK}{name}" if namespace else name


# -- chat ----------------------------------------------------------------------------------------


class ChatTool(_Lenient):
    type: Annotated[Literal["function", "custom"], _supported(("function", "custom"))] = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ChatTool:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "a tool needs `{kind}`", {"kind": self.type})
        return self

    @property
    def defined(self) -> _Defined:
        definition = self.function if self.type == "function" else self.custom
        assert definition is not None
        return _Defined(definition)


class _Named(_Lenient):
    name: _Name


class _AllowedInChat(_Lenient):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChatChoice], Field(min_length=1, max_length=_MAX_TOOLS)]


class ChatChoice(_Lenient):
    """A `tool_choice` of chat completions that is an object."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        _supported(("function", "custom", "allowed_tools")),
    ] = "function"
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedInChat | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ChatChoice:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "needs `{kind}`", {"kind": self.type})
        return self

    @property
    def choice(self) -> Choice:
        if self.allowed_tools is not None:
            names = [name for each in self.allowed_tools.tools for name in each.choice.names]
            return Choice(self.allowed_tools.mode, names)
        named = self.function or self.custom
        assert named is not None
        return Choice("required", [named.name], is_named=True)


# -- responses -----------------------------------------------------------------------------------


class ResponsesTool(_Lenient):
    """A function, a custom tool, or several in a namespace."""

    type: Annotated[
        Literal["function", "custom", "namespace"], _supported(("function", "custom", "namespace"))
    ]
    name: _Name
    description: _Description = ""
    parameters: _Parameters | None = None
    strict: bool = False
    format: _CustomFormat = _CustomFormat()
    tools: Annotated[list[ResponsesTool], Field(max_length=_MAX_TOOLS)] = Field(
        default_factory=list
    )
    defer_loading: bool = False  # accepted without effect: all tools are shown at once

    @property
    def defined(self) -> Iterator[_Defined]:
        if self.type == "namespace":
            for tool in self.tools:
                for inner in tool.defined:
                    yield _Defined(inner.definition, self.name)
        elif self.type == "custom":
            yield _Defined(
                CustomDefinition(name=self.name, description=self.description, format=self.format)
            )
        else:
            yield _Defined(
                FunctionDefinition(
                    name=self.name,
                    description=self.description,
                    parameters=self.parameters,
                    strict=self.strict,
                )
            )


class ResponsesChoice(_Lenient):
    """A `tool_choice` of responses that is an object."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        _supported(("function", "custom", "allowed_tools")),
    ]
    name: _Name | None = None
    namespace: _Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ResponsesChoice], Field(max_length=_MAX_TOOLS)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _check_kind(self) -> ResponsesChoice:
        if self.type == "allowed_tools" and not self.tools:
            raise PydanticCustomError("missing", "needs `tools`")
        if self.type != "allowed_tools" and self.name is None:
            raise PydanticCustomError("missing", "needs `name`")
        return self

    @property
    def choice(self) -> Choice:
        if self.type == "allowed_tools":
            return Choice(self.mode, [name for each in self.tools for name in each.choice.names])
        assert self.name is not None
        return Choice("required", [seen_name(self.name, self.namespace)], is_named=True)


class ReasoningOptions(_Lenient):
    """`reasoning` of responses. Summaries are never made; thoughts are shown as they are."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    def echo(self) -> dict[str, Any]:
        return {"effort": self.effort, "summary": self.summary}


# -- both ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """What `tool_choice` says: a mode, and the tools that it is about (as the model sees them)."""

    mode: _Mode
    names: Sequence[str] = ()
    is_named: bool = False


def offered(
    defined: Iterable[_Defined], choice: Choice | None, *, is_parallel: bool
) -> OfferedTools:
    """The tools of a request.

    Raises:
        RequestRefusedError: two have the same name, or the choice names one that is not offered.
    """
    all_defined = list(defined)
    tools = [each.tool for each in all_defined]
    if len(tools) > _MAX_TOOLS:
        raise invalid("tools", f"must be at most {_MAX_TOOLS}")
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}]", f"has the name of another tool: {name!r}")
    choice = choice or Choice("auto" if tools else "none")
    if not tools and (choice.mode == "required" or choice.names):
        raise invalid("tool_choice", "needs tools")
    for name in choice.names:
        if name not in names:
            raise RequestRefusedError(
                f"tool_choice names {name!r}, which is not among tools",
                code="invalid_value",
                param="tool_choice",
            )
    return OfferedTools(
        tools=tuple(tools),
        custom=frozenset(
            tool.name for tool, d in zip(tools, all_defined, strict=True) if d.is_custom
        ),
        aliases={
            tool.name: each.alias
            for tool, each in zip(tools, all_defined, strict=True)
            if each.alias != tool.name
        },
        choice=choice.mode,
        named=choice.names[0] if choice.is_named else "",
        allowed=frozenset(choice.names) if choice.names and not choice.is_named else None,
        is_parallel=is_parallel,
    )


def choice_of(value: str | ChatChoice | ResponsesChoice | None) -> Choice | None:
    """The choice that a request's `tool_choice` makes."""
    if value is None:
        return None
    return Choice(value) if isinstance(value, str) else value.choice  # type: ignore[arg-type]


def echo_of(value: Any) -> Any:
    """What a Response object repeats of a tool or a choice: what was sent, and for functions
    OpenAI's required fields."""
    if not isinstance(value, ResponsesTool | ResponsesChoice):
        return value
    given = value.model_dump(exclude_unset=True)
    if isinstance(value, ResponsesTool):
        if value.type == "namespace":
            given["tools"] = [echo_of(tool) for tool in value.tools]
        elif value.type == "function":
            given = {"description": None, "parameters": None, "strict": False, **given}
    return given


def reasoning_kwargs(effort: Effort | None) -> dict[str, Any]:
    """What an effort means to chat templates: gpt-oss reads the first, Qwen3 the second, DeepSeek
    and Granite the third."""
    if effort is None:
        return {}
    is_on = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": is_on, "thinking": is_on}
