"""Runs the tools that a model calls: ask, call what the answer calls, send the outputs, until an
answer calls nothing.

Each call is executed once, however often the connection is lost: a round's calls are read from its
terminal event, and its outputs are kept until the next round has them.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, Union, get_args, get_origin

from .errors import raise_if_failed
from .event_stream import EventStream
from .events import ResponseEvent
from .objects import Response
from .operation import AsyncRunner, R, Resource, SyncRunner, operation
from .steps import Invoke, Steps

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON Schema of its named arguments.
        call: gets them; may be a coroutine function with `AsyncClient`.
        strict: the server makes arguments match the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Any]
    strict: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A function's tool: its name, its documentation, and a schema of its annotations. A
        parameter that is annotated with a pydantic model gets one."""
        hints = typing.get_type_hints(function)
        properties, required = {}, []
        definitions: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            properties[name] = _hoisted(schema_of(hints.get(name, str)), definitions)
            if parameter.default is inspect.Parameter.empty:
                required.append(name)
        parameters = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
            **({"$defs": definitions} if definitions else {}),
        }
        models = {name: each for name, each in hints.items() if hasattr(each, "model_validate")}
        return cls(
            name=function.__name__,
            description=inspect.getdoc(function) or "",
            parameters=parameters,
            call=_with_models(function, models) if models else function,
        )

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in a request."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
            "strict": self.strict,
        }


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON Schema of a type.

    Raises:
        TypeError: it has none here; make a `Tool` with a schema.
    """
    if annotation is Any:
        return {}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _TYPES or origin is dict:
        return {"type": _TYPES[origin or annotation]}
    if annotation in (list, tuple) or origin in (list, tuple, Sequence):
        return {"type": "array", "items": schema_of(arguments[0]) if arguments else {}}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in arguments]}
    if annotation is type(None):
        return {"type": "null"}
    if hasattr(annotation, "model_json_schema"):
        schema: dict[str, Any] = annotation.model_json_schema()
        return schema
    raise TypeError(f"no JSON Schema is known of {annotation!r}; make a Tool with one")


def _hoisted(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema without its `$defs`, which references look for at the root."""
    if isinstance(schema, list):
        return [_hoisted(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    definitions.update(schema.get("$defs") or {})
    return {key: _hoisted(each, definitions) for key, each in schema.items() if key != "$defs"}


def _with_models(function: Callable[..., Any], models: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, called with models made of plain values."""

    def made(given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: models[name].model_validate(value) if name in models else value
            for name, value in given.items()
        }

    @functools.wraps(function)
    async def call_async(**given: Any) -> Any:
        return await function(**made(given))

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        return function(**made(given))

    return call_async if inspect.iscoroutinefunction(function) else call


class ToolRun(Resource[R], Generic[R]):
    """The events of all answers of a run, in order, and after each answer one of the type
    `penstock.tool_output` per call (`call_id`, `name`, `output`).

    Attributes:
        responses: of the rounds so far.
        stream: of the current round.
    """

    def __init__(
        self,
        runner: R,
        ask: Callable[[Mapping[str, Any]], EventStream[R]],
        body: Mapping[str, Any],
        tools: Sequence[Tool],
        *,
        max_rounds: int,
    ) -> None:
        super().__init__(runner)
        self.responses: list[Response] = []
        self.stream = ask(body)
        self._ask = ask
        self._body = dict(body)
        self._tools = {tool.name: tool for tool in tools}
        self._max_rounds = max_rounds
        self._outputs: list[ResponseEvent] = []  # that were not shown yet

    @operation
    def final(self) -> Steps[Response]:
        """Run to the end, and return the last response.

        Raises:
            ResponseFailedError: it failed.
        """
        while (yield from self._next()) is not None:
            pass
        raise_if_failed(self.responses[-1])
        return self.responses[-1]

    def __iter__(self) -> Self:
        return self

    def __next__(self: ToolRun[SyncRunner]) -> ResponseEvent:
        event = self._runner.run(self._next())
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self: ToolRun[AsyncRunner]) -> ResponseEvent:
        event = await self._runner.run(self._next())
        if event is None:
            raise StopAsyncIteration
        return event

    def _next(self) -> Steps[ResponseEvent | None]:
        while not self._outputs:
            event = yield from self.stream.next_steps()
            if event is not None:
                return event
            response = self.stream.response
            if response is None or (self.responses and self.responses[-1] is response):
                return None
            self.responses.append(response)
            calls = calls_of(response)
            if not calls or len(self.responses) >= self._max_rounds:
                return None
            outputs = yield from run_calls(calls, self._tools)
            self._go_on(response, outputs)
        return self._outputs.pop(0)

    def _go_on(self, response: Response, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Begin the next round."""
        body = self._body
        relax_choice(body)
        if body.get("store") is False:
            said = body.get("input") or []
            said = [{"role": "user", "content": said}] if isinstance(said, str) else said
            body["input"] = [*said, *response["output"], *outputs]
        else:
            body["input"] = outputs
            if "conversation" not in body:
                body["previous_response_id"] = response["id"]
        self.stream = self._ask(body)
        names = {call["call_id"]: call["name"] for call in calls_of(response)}
        self._outputs = [
            {
                "type": "penstock.tool_output",
                "call_id": each["call_id"],
                "name": names[each["call_id"]],
                "output": each["output"],
            }
            for each in outputs
        ]


def relax_choice(body: dict[str, Any]) -> None:
    """A call that was required has been made; which tools may be called stays."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        body["tool_choice"] = {**choice, "mode": "auto"}
    elif choice != "none":
        body.pop("tool_choice", None)


def calls_of(response: Response) -> list[Mapping[str, Any]]:
    """The function calls of a response; none if it did not complete: the last may be cut off."""
    if response["status"] != "completed":
        return []
    return [item for item in response["output"] if item["type"] == "function_call"]


def run_calls(
    calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Tool]
) -> Steps[list[Mapping[str, Any]]]:
    """The output items of calls. A call that fails has its error as its output, for the model."""
    outputs: list[Mapping[str, Any]] = []
    for call in calls:
        tool = tools.get(call["name"])
        if tool is None:
            output = f"error: there is no tool {call['name']!r}"
        else:
            output = yield from _output_of(tool, call["arguments"])
        outputs.append(
            {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        )
    return outputs


def _output_of(tool: Tool, arguments: str) -> Steps[str]:
    try:
        named = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not valid JSON: {error}"
    if not isinstance(named, dict):
        return "error: the arguments must be a JSON object"
    try:
        value = yield Invoke(tool.call, named)
    except Exception as error:  # whatever a tool raises, the model is told
        return f"error: {type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
