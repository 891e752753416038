"""From what a user writes to a `StructuredOutputs`: vLLM's `structured_outputs`, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs import look_around
from penstock.engine.structured_outputs.enforceable import enforceable
from penstock.engine.structured_outputs.json_schema import check_schema, subschemas
from penstock.engine.structured_outputs.lark import as_lark, quoted

# Small models end neither white space nor lines by themselves, so that JSON has at most one space
# after a comma or colon, unless asked otherwise.
_COMPACT = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required")
_APPLICATORS = ("$ref", "anyOf", "oneOf")
_ANY_TEXT = r"/(.|\n)*/"
_MAX_TAGS = 256  # of a structural tag; as many triggers
_OTHER_TAGS = ("at_least_one", "stop_after_first")


def structured_outputs(
    *,
    json_schema: Any = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
    whitespace_pattern: str | None = None,
    disable_additional_properties: bool = False,
    strict: bool = False,
    param: str = "structured_outputs",
) -> StructuredOutputs | None:
    """What an output must match; None if nothing is given.

    Args:
        json_schema: a text, an object, or a class that has `model_json_schema`, as pydantic's have.
        json_object: any JSON object.
        regex: the whole output matches it; Rust's syntax. Look-around is rewritten if it can be.
        choice: the output is one of these.
        grammar: in llguidance's dialect of Lark, or in GBNF.
        structural_tag: text that may have JSON between tags, in vLLM's forms.
        whitespace_pattern: a regular expression of what may stand between the parts of JSON; by
            default at most one space after a comma or colon.
        disable_additional_properties: no object has properties that its schema does not name. By
            default an object has them only if its schema speaks of them (`additionalProperties`),
            or is joined with another one.
        strict: `propertyNames`, `uniqueItems`, patterns with look-around and a fractional
            `multipleOf` that cannot be enforced are refused; by default they are dropped.
        param: the parameter that they came from, for messages.

    Raises:
        InvalidRequestError: more than one is given, or one is invalid on its face, or no finite
            output matches it. `param` may go on with the path in a schema.
    """
    wanted = {
        "json": json_schema,
        "json_object": json_object or None,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "structural_tag": structural_tag,
    }
    names = [name for name, value in wanted.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequestError(
            f"{param}: only one of {' and '.join(names)} may be given", param=param
        )
    options = _COMPACT
    if whitespace_pattern is not None:
        options = {"whitespace_flexible": False}
        if whitespace_pattern:
            options = {"whitespace_pattern": whitespace_pattern}
    if json_object:
        json_schema = {"type": "object"}
    if json_schema is not None:
        schema = _parsed(json_schema, param)
        schema = closed(schema, is_forced=disable_additional_properties)
        try:
            schema = enforceable(schema, is_strict=strict)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {error}", param=f"{param}{error.param}") from error
        return StructuredOutputs("json_schema", _with_options(schema, options))
    if regex is not None:
        return StructuredOutputs("regex", _without_look_around(regex))
    if choice is not None:
        return StructuredOutputs("lark", f"start: {_alternatives(choice, param)}")
    if structural_tag is not None:
        return StructuredOutputs("lark", _tagged_text(structural_tag, options, param))
    if grammar is None:
        return None
    try:
        return StructuredOutputs("lark", as_lark(grammar))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from error


def _without_look_around(regex: str) -> str:
    """An expression without look-around that means the same; the given one if there is none."""
    if not look_around.has_look_around(regex):
        return regex
    found = look_around.rewritten(f"^(?:{regex})$", is_whole=True).patterns
    return found[0] if found else regex


def _parsed(schema: Any, param: str) -> Any:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(f"{param} must be a JSON Schema", param=param)
    return schema


def closed(schema: Any, *, is_forced: bool) -> Any:
    """Without properties that it does not name. Models begin one after the other if they may, and
    what is generated matches the schema all the same.

    A schema that is joined with another one stays as it is: its properties are not all.
    """
    if not is_forced and any(_is_joined(each) for _, each in subschemas(schema)):
        return schema
    closed = json.loads(json.dumps(schema))
    for _, each in subschemas(closed):
        if not isinstance(each, dict) or "properties" not in each or "patternProperties" in each:
            continue
        if is_forced or _names_all(each):
            each.setdefault("additionalProperties", False)
    return closed


def _is_joined(schema: Any) -> bool:
    """Whether it says that several schemas hold at the same time."""
    if not isinstance(schema, Mapping):
        return False
    has_own = any(keyword in schema for keyword in _OF_OBJECTS)
    return "allOf" in schema or (has_own and any(each in schema for each in _APPLICATORS))


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether an object can be had of the properties that it names."""
    properties, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return False
    is_free = not any(each in schema for each in ("minProperties", "enum", "const"))
    return is_free and all(isinstance(name, str) and name in properties for name in required)


def _with_options(schema: Any, options: Mapping[str, Any]) -> str:
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    others = {keyword: value for keyword, value in schema.items() if keyword != "x-guidance"}
    return json.dumps({**others, "x-guidance": options})


def _alternatives(choice: Sequence[str], param: str) -> str:
    if not choice or not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequestError(f"{param} must be a list of texts, none empty", param=param)
    if any("\ud800" <= char <= "\udfff" for each in choice for char in each):
        raise InvalidRequestError(f"{param} has half of a surrogate pair", param=param)
    return " | ".join(quoted(each) for each in choice)


def _tagged_text(tag: str | Mapping[str, Any], options: Mapping[str, Any], param: str) -> str:
    """Any text in which a trigger begins a tag: its begin, JSON of a schema, its end."""
    rules = []
    triggers, tags = _triggers_and_tags(_parsed(tag, param), param)
    for number, (begin, schema, end) in enumerate(tags):
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise InvalidRequestError(
                f"{param}: no trigger is the beginning of {begin!r:.80}", param=param
            )
        parts = [quoted(begin[len(trigger) :]) if begin != trigger else ""]
        parts += [f"%json {_with_options(schema, options)}", quoted(end) if end else ""]
        rules.append(f"trigger_{number}[lazy]: TEXT {quoted(trigger)}")
        rules.append(f"tag_{number}: trigger_{number} {' '.join(parts)}")
    names = " | ".join(f"tag_{number}" for number in range(len(tags)))
    return "\n".join([f"start: ({names})* text", "text: TEXT", f"TEXT: {_ANY_TEXT}", *rules])


def _triggers_and_tags(
    tag: Mapping[str, Any], param: str
) -> tuple[Sequence[str], Sequence[tuple[str, Any, str]]]:
    try:
        kind = tag.get("format", {}).get("type", "triggered_tags")
        if kind != "triggered_tags":
            raise InvalidRequestError(
                f"{param} has a format of type {kind!r:.60}; only 'triggered_tags' is supported",
                param=param,
            )
        found = tag.get("format", tag)
        for name in _OTHER_TAGS:
            if found.get(name):
                raise InvalidRequestError(f"{param}: {name} is not supported", param=param)
        for each in ("tags", "structures", "triggers"):
            if len(found.get(each, ())) > _MAX_TAGS:
                message = f"{param} has more than {_MAX_TAGS} {each}"
                raise InvalidRequestError(message, param=param)
        tags = list(_tags(found, param))
        triggers = found["triggers"]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"{param} must have triggers, and tags with begin, schema and end", param=param
        ) from error
    is_list = isinstance(triggers, list | tuple)
    if not (tags and is_list and all(isinstance(each, str) and each for each in triggers)):
        raise InvalidRequestError(f"{param} needs a tag, and a list of triggers", param=param)
    return triggers, tags


def _tags(tag: Mapping[str, Any], param: str) -> Iterator[tuple[str, Any, str]]:
    for each in tag["tags"] if "tags" in tag else tag["structures"]:
        content = each.get("content", {"type": "json_schema", "json_schema": each.get("schema")})
        if content["type"] != "json_schema":
            raise InvalidRequestError(
                f"{param}: content of type {content['type']!r:.60} is not supported", param=param
            )
        begin, end = each["begin"], each["end"]
        if not (isinstance(begin, str) and isinstance(end, str)):
            raise TypeError
        try:
            schema = enforceable(content["json_schema"], is_strict=False)
            check_schema(schema)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {begin!r:.80}: {error}", param=param) from error
        yield begin, schema, end
