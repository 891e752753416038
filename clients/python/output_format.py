"""Outputs that match a class or a JSON Schema: what is sent to request one, and how it is parsed.

Anything with pydantic's methods will do: a `BaseModel` class (`model_json_schema`,
`model_validate_json`) or a `TypeAdapter` (`json_schema`, `validate_json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .errors import UnfinishedOutputError, raise_if_failed
from .objects import ChatCompletion, Response, output_text

# A pydantic class, a `TypeAdapter`, a JSON Schema, or the API's own form (its `type` is none of
# JSON Schema's).
OutputType: TypeAlias = Any

_OWN_FORMS: Mapping[object, Callable[[str], Any]] = {
    "json_object": json.loads,
    "json_schema": json.loads,
    "text": str,
}


class OutputFormat:
    """The format of an output.

    Raises:
        ValueError: `kind` is none of `OutputType`.
    """

    def __init__(self, kind: OutputType) -> None:
        self._parse: Callable[[str], Any] = json.loads
        self._own_form: Mapping[str, Any] | None = None
        name = "output"
        if isinstance(kind, Mapping):
            schema = kind
            # `type` may be a list
            if isinstance(kind.get("type"), str) and kind["type"] in _OWN_FORMS:
                self._own_form, self._parse = kind, _OWN_FORMS[kind["type"]]
        elif hasattr(kind, "model_json_schema"):
            name, schema = getattr(kind, "__name__", name), kind.model_json_schema()
            self._parse = kind.model_validate_json
        elif hasattr(kind, "json_schema"):
            schema, self._parse = kind.json_schema(), kind.validate_json
        else:
            raise ValueError(f"{kind!r} is not a pydantic class, a TypeAdapter or a JSON Schema")
        name = re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]
        self._json_schema = {"name": name, "strict": True, "schema": schema}

    def response_format(self) -> Mapping[str, Any]:
        """The parameter of chat completions."""
        return self._own_form or {"type": "json_schema", "json_schema": self._json_schema}

    def text(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The parameter of responses, with what else was `given` for it."""
        form = self._own_form or {"type": "json_schema", **self._json_schema}
        return {**(given or {}), "format": form}

    def parse_chat(self, answer: ChatCompletion) -> ChatCompletion:
        """Add `parsed` to the message of each choice.

        Raises:
            UnfinishedOutputError: a choice did not end with `stop`.
            ValueError: a text does not pass what the class checks beyond its schema.
        """
        for choice in answer["choices"]:
            if choice["finish_reason"] != "stop":
                raise UnfinishedOutputError(str(choice["finish_reason"]), answer=answer)
        for choice in answer["choices"]:
            choice["message"]["parsed"] = self._parse(choice["message"]["content"])
        return answer

    def parse_response(self, response: Response) -> Response:
        """Add `output_parsed` to the response.

        Raises:
            ResponseFailedError: it failed.
            UnfinishedOutputError: it did not complete.
            ValueError: the text does not pass what the class checks beyond its schema.
        """
        raise_if_failed(response)
        if response["status"] != "completed":
            details = response["incomplete_details"]
            reason = details["reason"] if details else response["status"]
            raise UnfinishedOutputError(reason, answer=response)
        response["output_parsed"] = self._parse(output_text(response))
        return response
