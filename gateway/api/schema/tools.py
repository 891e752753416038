"""`tools`, `tool_choice` and `reasoning` of chat completions and responses: from their two shapes
to one `OfferedTools`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.engine.chat_formats import CUSTOM_INPUT, NAMESPACE_END, OfferedTools, Tool
from penstock.engine.structured_outputs.patterns import is_balanced
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.api.schema.structured_outputs import MAX_BYTES, MAX_DEPTH, depth_of
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.context_limits import Effort

_MAX_TOOLS = 512
_MAX_DESCRIPTION_CHARS = 64 << 10
_NAMESPACE_MARK = "__"  # between a namespace and a name, as the model sees them
_Mode = Literal["none", "auto", "required"]
_T = TypeVar("_T", bound=Model)

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
_Description = Annotated[str, Field(max_length=_MAX_DESCRIPTION_CHARS)]
Verbosity = Literal["low", "medium", "high"]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None}


class _Lenient(Model):
    """Fields that are null count as absent, and those that clients add have no effect."""

    model_config = ConfigDict(extra="ignore")

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
    properties, required = value.get("properties"), value.get("required")
    if properties is not None and not (
        isinstance(properties, dict)
        and all(isinstance(each, dict | bool) for each in properties.values())
    ):
        raise PydanticCustomError("value_error", "`properties` must be an object of schemas")
    if required is not None and not (
        isinstance(required, list) and all(isinstance(each, str) for each in required)
    ):
        raise PydanticCustomError("value_error", "`required` must be a list of names")
    return value


ToolSchema = Annotated[dict[str, Any], BeforeValidator(_schema)]


class FunctionDefinition(_Lenient):
    name: _Name
    description: _Description = ""
    parameters: ToolSchema | None = None
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

    @model_validator(mode="after")
    def _check_grammar(self) -> _CustomFormat:
        is_flat = self.syntax is not None and self.definition is not None
        is_given = self.syntax is not None or self.definition is not None
        if self.type == "text" and (is_given or self.grammar is not None):
            raise PydanticCustomError("value_error", "has a grammar only with the type 'grammar'")
        if self.type == "grammar" and (is_given if self.grammar is not None else not is_flat):
            raise PydanticCustomError(
                "value_error", "needs `syntax` and `definition`, or both in `grammar`"
            )
        if self.regex is not None and not is_balanced(self.regex):
            raise PydanticCustomError(
                "value_error", "is not a regular expression: see its brackets"
            )
        return self

    @property
    def regex(self) -> str | None:
        """What the input must match."""
        syntax, definition = self._written
        return definition if syntax == "regex" else None

    @property
    def hint(self) -> str:
        """What the model is told."""
        syntax, definition = self._written
        return f"The input must match this {syntax} grammar:\n{definition}" if syntax else ""

    @property
    def _written(self) -> tuple[str | None, str | None]:
        if self.grammar is not None:
            return self.grammar.syntax, self.grammar.definition
        return self.syntax, self.definition


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
class DefinedTool:
    """A tool of either API.

    Attributes:
        place: where it stands in the request.
    """

    definition: FunctionDefinition | CustomDefinition
    place: str
    namespace: str = ""
    about_namespace: str = ""

    @property
    def alias(self) -> str:
        """The caller's name of it."""
        name = self.definition.name
        return f"{self.namespace}{NAMESPACE_END}{name}" if self.namespace else name

    @property
    def is_custom(self) -> bool:
        return isinstance(self.definition, CustomDefinition)

    @property
    def tool(self) -> Tool:
        """The tool as the model sees it."""
        definition = self.definition
        name = seen_name(definition.name, self.namespace)
        hint = definition.format.hint if isinstance(definition, CustomDefinition) else ""
        about = (self.about_namespace, definition.description, hint)
        description = "\n\n".join(filter(None, about))
        if isinstance(definition, FunctionDefinition):
            return Tool(
                name=name,
                description=description,
                parameters=definition.parameters,
                strict=definition.strict,
            )
        value: dict[str, Any] = {"type": "string"}
        if definition.format.regex is not None:
            value["pattern"] = f"^(?:{definition.format.regex})$"
        return Tool(
            name=name,
            description=description,
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

    def defined(self, place: str) -> DefinedTool:
        definition = self.function if self.type == "function" else self.custom
        assert definition is not None
        return DefinedTool(definition, place)


class _Named(_Lenient):
    name: _Name


class _AllowedInChat(_Lenient):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChatChoice], Field(min_length=1, max_length=_MAX_TOOLS)]


# Mistral's and Anthropic's `any` is OpenAI's `required`.
_MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


def _choice_in_shape(value: Any, *, is_flat: bool) -> Any:
    """A `tool_choice` in the shape of its API: also where the mode is the `type` of an object, and
    where the name is in the other API's place, or in Anthropic's.

    Args:
        is_flat: the name is beside the type, as in responses.
    """
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str):
        return value
    if kind in _MODES:
        return _MODES[kind]
    inner = value.get(kind) if isinstance(value, dict) else None
    if kind not in ("function", "custom", "tool") or not isinstance(value, dict):
        return value
    named = inner if isinstance(inner, dict) else value
    if "name" not in named:
        return value
    kind = "custom" if kind == "custom" else "function"
    return {**named, "type": kind} if is_flat else {"type": kind, kind: named}


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
        if sum(each is not None for each in (self.function, self.custom, self.allowed_tools)) > 1:
            raise PydanticCustomError("value_error", "may only have `{kind}`", {"kind": self.type})
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


_FIELD_OF = {
    "parameters": "function",
    "strict": "function",
    "format": "custom",
    "tools": "namespace",
}


class ResponsesTool(_Lenient):
    """A function, a custom tool, or several in a namespace."""

    type: Annotated[
        Literal["function", "custom", "namespace"], _supported(("function", "custom", "namespace"))
    ]
    name: _Name
    description: _Description = ""
    parameters: ToolSchema | None = None
    strict: bool = False
    format: _CustomFormat = _CustomFormat()
    tools: Annotated[list[ResponsesTool], Field(max_length=_MAX_TOOLS)] = Field(
        default_factory=list
    )
    defer_loading: bool = False  # accepted without effect: all tools are shown at once

    @model_validator(mode="after")
    def _check_fields(self) -> ResponsesTool:
        for field, kind in _FIELD_OF.items():
            if kind != self.type and field in self.model_fields_set and getattr(self, field):
                raise PydanticCustomError(
                    "value_error",
                    "a tool of the type {type} has no `{field}`",
                    {"type": repr(self.type), "field": field},
                )
        if any(tool.type == "namespace" for tool in self.tools):
            raise PydanticCustomError("value_error", "a namespace cannot be in another one")
        return self

    def defined(self, place: str) -> Iterator[DefinedTool]:
        if self.type == "namespace":
            for index, tool in enumerate(self.tools):
                for inner in tool.defined(f"{place}.tools[{index}]"):
                    yield replace(inner, namespace=self.name, about_namespace=self.description)
        elif self.type == "custom":
            yield DefinedTool(
                CustomDefinition(name=self.name, description=self.description, format=self.format),
                place,
            )
        else:
            yield DefinedTool(
                FunctionDefinition(
                    name=self.name,
                    description=self.description,
                    parameters=self.parameters,
                    strict=self.strict,
                ),
                place,
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


_Described = Literal["none", "auto", "required", "any"]
ChatToolChoice = Annotated[
    _Mode | ChatChoice | None,
    BeforeValidator(
        partial(_choice_in_shape, is_flat=False),
        json_schema_input_type=_Described | ChatChoice | None,
    ),
]
ResponsesToolChoice = Annotated[
    _Mode | ResponsesChoice | None,
    BeforeValidator(
        partial(_choice_in_shape, is_flat=True),
        json_schema_input_type=_Described | ResponsesChoice | None,
    ),
]


class ReasoningOptions(_Lenient):
    """`reasoning` of responses. With `summary`, or its older name, thoughts are in `summary`, as
    they are; nothing is summarised."""

    model_config = ConfigDict(extra="forbid")

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    def echo(self) -> dict[str, Any]:
        return {"effort": self.effort, "summary": self.summary or self.generate_summary}


# -- both ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """What `tool_choice` says: a mode, and the tools that it is about (as the model sees them)."""

    mode: _Mode
    names: Sequence[str] = ()
    is_named: bool = False


def offered(
    defined: Iterable[DefinedTool], choice: Choice | None, *, is_parallel: bool
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
            raise invalid(all_defined[index].place, f"has the name of another tool: {name!r}")
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


def check_thinking(thinks: bool | None, effort: Effort | None, param: str) -> None:
    """
    Raises:
        RequestRefusedError: there is to be thinking, with the effort `none`. No thinking with some
            effort is no thinking: clients send a default effort with every request.
    """
    if thinks and effort == "none":
        raise RequestRefusedError(
            f"enable_thinking {thinks} and {param} {effort!r} contradict each other; send only one "
            "of them",
            code="mutually_exclusive_parameters",
            param=param,
        )


def template_kwargs(
    effort: Effort | None, *, thinks: bool | None, verbosity: Verbosity | None, budget: int = -1
) -> dict[str, Any]:
    """What they mean to chat templates. Of thoughts, gpt-oss reads the first, Qwen3 the second,
    DeepSeek and Granite the third, Seed-OSS the budget.

    Args:
        budget: tokens of thoughts; -1: no limit.
    """
    kwargs: dict[str, Any] = {}
    if budget > 0:
        kwargs["thinking_budget"] = budget
    if budget == 0 and thinks is None and effort is None:
        thinks = False
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        thinks = effort != "none" and thinks is not False
    if thinks is not None:
        kwargs |= {"enable_thinking": thinks, "thinking": thinks}
    return kwargs if verbosity is None else kwargs | {"verbosity": verbosity}
