"""What an output must match, in OpenAI's forms (`response_format`, `text.format`), in vLLM's
(`structured_outputs`, `guided_*`), llama.cpp's (`json_schema`, `grammar`) and SGLang's (`regex`,
`ebnf`): from any of them to one `StructuredOutputs`.

Only shapes and sizes are checked here; `generation.grammar_check` compiles what is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, model_validator

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs import forms
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.errors import RequestRefusedError

MAX_BYTES = 256 << 10  # of a schema, a grammar, or all choices
MAX_DEPTH = 128  # of a schema's objects and lists; llguidance's
# Keywords of `forms.structured_outputs` that do not say what the output must match, but how.
_WHITESPACE = ("whitespace_pattern", "disable_any_whitespace")
_HOW = (*_WHITESPACE, "disable_additional_properties")
_JSON = ("json_schema", "json_object")
_PARSED = ("json_schema", "structural_tag")
_KINDS = "json, regex, choice, grammar, json_object or structural_tag"

_NAMELESS = "schema"  # what a Response object calls a schema that was sent without a name
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Object = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_Type = Literal["text", "json_object", "json_schema"]
_ChatType = Literal["text", "json_object", "json_schema", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A parameter that says what the output must match, or how.

    Attributes:
        param: its name on the wire.
        keyword: of `forms.structured_outputs`.
        is_strict: what cannot be enforced of a schema is refused.
    """

    param: str
    keyword: str
    value: Any
    is_strict: bool = False

    @property
    def asks(self) -> tuple[str, Any]:
        """What it says, by whichever name, and as an object or in a text."""
        value = self.value
        if self.keyword in _PARSED and isinstance(value, str):
            with contextlib.suppress(orjson.JSONDecodeError):
                value = orjson.loads(value)
        return self.keyword, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an output must match.

    Attributes:
        grammars: what has to compile, with the parameters that it came from.
    """

    structured_outputs: StructuredOutputs | None = None
    grammars: Sequence[tuple[str, StructuredOutputs]] = ()


UNCONSTRAINED = Constraint()


class NamedSchema(Model):
    """OpenAI's; name and description have no effect, and every schema is enforced. With `strict`,
    one of which something cannot be is refused."""

    name: _Name | None = None
    description: str | None = None
    schema_: Annotated[_Object, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Model):
    """`response_format` of chat completions and completions.

    Attributes:
        schema_: llama.cpp's and Fireworks' place of a schema.
        format, structures, triggers: of a structural tag, as vLLM and SGLang have it here.
    """

    type: _ChatType
    json_schema: NamedSchema | None = None
    schema_: Annotated[_Object | None, Field(alias="schema")] = None
    format: _Object | None = None
    structures: list[_Object] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.schema_ is None or self.json_schema is not None:
            _check_fields("response_format", self.type, needed={"json_schema": self.json_schema})
        if self.schema_ is not None and (
            self.json_schema is not None or self.type not in ("json_object", "json_schema")
        ):
            beside = "json_schema" if self.json_schema is not None else f"type {self.type!r}"
            raise invalid("response_format.schema", f"cannot be used with {beside}")
        if self.type != "structural_tag" and self._tag:
            raise invalid(
                f"response_format.{next(iter(self._tag))}",
                f"cannot be used with type {self.type!r}",
            )
        return self

    @property
    def _tag(self) -> _Object:
        fields = ("format", "structures", "triggers")
        given = {name: getattr(self, name) for name in fields}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def asked(self) -> Iterator[Asked]:
        if self.schema_ or (self.schema_ is not None and self.type == "json_schema"):
            param = "response_format.schema"
            yield Asked(param=param, keyword="json_schema", value=self.schema_)
        elif self.type == "json_object":
            yield Asked(param="response_format", keyword="json_object", value=True)
        elif self.type == "structural_tag":
            yield Asked(param="response_format", keyword="structural_tag", value=self._tag)
        elif self.json_schema is not None:
            yield Asked(
                param="response_format.json_schema.schema",
                keyword="json_schema",
                value=self.json_schema.schema_,
                is_strict=bool(self.json_schema.strict),
            )


def _check_fields(
    param: str, kind: str, *, needed: Mapping[str, Any], optional: Mapping[str, Any] = _NOTHING
) -> None:
    """Raises: RequestRefusedError: the type needs another field, or does not have this one."""
    for name, value in {**needed, **optional}.items():
        if kind != "json_schema" and value is not None:
            raise invalid(f"{param}.{name}", f"cannot be used with type {kind!r}")
        if kind == "json_schema" and value is None and name in needed:
            raise RequestRefusedError(
                f"{param}.{name} is required with type 'json_schema'",
                code="missing_required_parameter",
                param=f"{param}.{name}",
            )


class TextFormat(Model):
    """`text.format` of responses."""

    type: _Type
    name: _Name | None = None
    description: str | None = None
    schema_: Annotated[_Object | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        _check_fields(
            "text.format",
            self.type,
            needed={"schema": self.schema_},
            optional={
                "name": self.name,
                "description": self.description,
                "strict": self.strict,
            },
        )
        return self

    @property
    def asked(self) -> Iterator[Asked]:
        if self.type == "json_object":
            yield Asked(param="text.format", keyword="json_object", value=True)
        elif self.schema_ is not None:
            yield Asked(
                param="text.format.schema",
                keyword="json_schema",
                value=self.schema_,
                is_strict=bool(self.strict),
            )


class TextOptions(Model):
    """`text` of responses."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def echo(self) -> dict[str, Any]:
        """These options as the Response object has them."""
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {**self._format_echo(), **verbosity}

    def _format_echo(self) -> dict[str, Any]:
        asked = self.format
        if asked is None or asked.type != "json_schema":
            return {"format": {"type": "text" if asked is None else asked.type}}
        return {
            "format": {
                "type": asked.type,
                "name": asked.name or _NAMELESS,
                "description": asked.description,
                "schema": asked.schema_,
                "strict": asked.strict,
            }
        }


class StructuredOutputsParams(Model):
    """vLLM's."""

    json_: Annotated[str | _Object | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | _Object | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = Field(default=False, description="Accepted without effect.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}

    @model_validator(mode="after")
    def _check_kind(self) -> StructuredOutputsParams:
        if next(self.asked, None) is None:
            raise invalid("structured_outputs", f"needs one of {_KINDS}")
        return self

    @property
    def asked(self) -> Iterator[Asked]:
        values = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        return given("structured_outputs.", values)

    @property
    def how(self) -> Iterator[Asked]:
        """How what they ask is to be matched."""
        values = {
            "whitespace_pattern": self.whitespace_pattern,
            "disable_any_whitespace": self.disable_any_whitespace or None,
            "disable_additional_properties": self.disable_additional_properties or None,
        }
        return given("structured_outputs.", values)


_KEYWORDS = {"json": "json_schema", "ebnf": "grammar"}


def given(prefix: str, values: Mapping[str, Any]) -> Iterator[Asked]:
    """The parameters that are not None, by vLLM's names or SGLang's."""
    for name, value in values.items():
        if value is not None:
            keyword = _KEYWORDS.get(name, name)
            yield Asked(param=prefix + name, keyword=keyword, value=value)


def constraint_of(asked: Sequence[Asked]) -> Constraint:
    """
    Several that ask for the same are no contradiction: clients send a newer and an older name.

    Args:
        asked: one at least.

    Raises:
        RequestRefusedError: they contradict each other, or one is invalid on its face.
    """
    what = [each for each in asked if each.keyword not in _HOW]
    how = [each for each in asked if each.keyword in _HOW]
    for several in (what, [each for each in how if each.keyword in _WHITESPACE]):
        if any(each.asks != several[0].asks for each in several):
            first, *_, last = [each.param for each in several]
            raise RequestRefusedError(
                f"only one of {first} and {last} may be given", code="invalid_value", param=last
            )
    if how and not any(each.keyword in _JSON for each in what):
        raise invalid(how[0].param, "needs a JSON Schema or json_object beside it")
    strictest = max(what, key=lambda each: each.is_strict)
    return _made(strictest, list({each.keyword: each for each in reversed(how)}.values()))


def _made(what: Asked, how: Sequence[Asked]) -> Constraint:
    keywords = {what.keyword: _checked(what)}
    grammars = []
    for each in how:
        keyword, value = each.keyword, each.value
        if keyword == "disable_any_whitespace":
            keyword, value = "whitespace_pattern", ""
        elif keyword == "whitespace_pattern":
            grammars.append((each.param, StructuredOutputs("regex", _checked(each))))
        keywords[keyword] = value
    try:
        made = forms.structured_outputs(**keywords, strict=what.is_strict, param=what.param)
    except InvalidRequestError as error:
        raise _refused(what, str(error), param=error.param) from error
    assert made is not None
    return Constraint(structured_outputs=made, grammars=[*grammars, (what.param, made)])


def _checked(asked: Asked) -> Any:
    """The value, parsed if it is JSON in a text, and of bounded size and depth.

    Raises: RequestRefusedError.
    """
    value = asked.value
    if asked.keyword in _PARSED and isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise _refused(asked, f"{asked.param} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise _refused(asked, f"{asked.param} must be a JSON object")
    if depth_of(value) > MAX_DEPTH:
        raise _refused(asked, f"{asked.param} is nested more than {MAX_DEPTH} deep")
    if len(orjson.dumps(value)) > MAX_BYTES:
        raise _refused(asked, f"{asked.param} has more than {MAX_BYTES} bytes as JSON")
    return value


def depth_of(value: Any) -> int:
    """How deeply it is nested, up to one more than the limit."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level and depth <= MAX_DEPTH:
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for each in inner for item in each if isinstance(item, dict | list)]
        depth += 1
    return depth


def _refused(asked: Asked, message: str, *, param: str | None = None) -> RequestRefusedError:
    code = "invalid_json_schema" if asked.keyword == "json_schema" else "invalid_value"
    is_within = param is not None and param.startswith(asked.param)
    return RequestRefusedError(message, code=code, param=param if is_within else asked.param)
