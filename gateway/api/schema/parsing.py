"""From bytes to a typed request, or to a `RequestRefusedError` that names the wrong parameter.

JSON is parsed here, with its pitfalls, and pydantic's errors become the API's
(`messages[0].content`). `parameters` says how those are treated that the schema does not
read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.gateway.api.schema.fields import SamplingRequest
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.parameters import honoured
from penstock.gateway.errors import RequestRefusedError

_MAX_DIAGNOSED_BYTES = 64 << 10
# A body of 4 MB may hold a million lists; creating and freeing them took 0.2 s under Python's lock.
# The largest realistic body, 4096 messages in parts, has 50,000 of these.
MAX_JSON_PARTS = 200_000  # objects, lists, and strings, keys among them
MAX_JSON_NUMBERS = 1 << 20
# orjson reads 1024 objects and lists within each other, and writes 254: what is stored or sent on
# is put into a few more.
MAX_JSON_DEPTH = 200
_MAX_WRITTEN_DEPTH = 254
_NO_MARKS = bytes(set(range(256)) - set(b'"[{,'))
_Request = TypeVar("_Request", bound=SamplingRequest)
_Model = TypeVar("_Model", bound=Model)


def parse_json(data: bytes | str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestRefusedError: the data is not UTF-8, not JSON (NaN and Infinity are not), not an
            object, has too many parts, or is nested too deeply.
    """
    _check_num_parts(data)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        param = _parameter_that_is_no_number(data)
        if param is not None:
            raise RequestRefusedError(
                f"{param}: NaN and Infinity are not valid JSON", code="invalid_value", param=param
            ) from error
        raise RequestRefusedError(f"not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRefusedError("the body must be a JSON object", code="invalid_json")
    if _is_nested_too_deeply(body, data):
        raise RequestRefusedError(
            f"the body is nested more than {MAX_JSON_DEPTH} deep", code="invalid_json"
        )
    return body


def _is_nested_too_deeply(body: dict[str, Any], data: bytes | str) -> bool:
    brackets = (b"{", b"[") if isinstance(data, bytes) else ("{", "[")
    if sum(map(data.count, brackets)) <= MAX_JSON_DEPTH:  # type: ignore[arg-type]
        return False
    within: Any = body
    for _ in range(_MAX_WRITTEN_DEPTH - MAX_JSON_DEPTH):
        within = [within]
    try:
        orjson.dumps(within)  # in a tenth of the time that looking would take
    except orjson.JSONEncodeError:
        return True
    return False


def _check_num_parts(data: bytes | str) -> None:
    """Refuse JSON that would take long to parse, without parsing it.

    Raises:
        RequestRefusedError: the JSON has too many parts.
    """
    if len(data) < MAX_JSON_PARTS:
        return
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    if len(raw.translate(None, _NO_MARKS)) <= MAX_JSON_PARTS:  # true of nearly all; takes 1 ms
        return
    # Strings may contain these characters: split at the quotes, every second piece is outside.
    raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = raw.count(b'"') // 2
    if num_strings <= MAX_JSON_PARTS:
        outside = b"".join(raw.split(b'"')[::2])
        num_parts = num_strings + outside.count(b"[") + outside.count(b"{")
        if num_parts <= MAX_JSON_PARTS and outside.count(b",") <= MAX_JSON_NUMBERS:
            return
    raise RequestRefusedError(
        f"the body has more than {MAX_JSON_PARTS} objects, lists and strings, or more than "
        f"{MAX_JSON_NUMBERS} numbers",
        code="request_too_large",
        status=413,
    )


def _parameter_that_is_no_number(data: bytes | str) -> str | None:
    """The parameter whose value is NaN or Infinity, if that is what is wrong with a small body.
    Python's `json` module writes such values."""
    if len(data) > _MAX_DIAGNOSED_BYTES:
        return None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    values = body.items() if isinstance(body, dict) else ()
    return next((k for k, v in values if isinstance(v, float) and not math.isfinite(v)), None)


def parse_request(kind: type[_Request], body: Mapping[str, Any]) -> _Request:
    """A typed request from a JSON object.

    Raises:
        RequestRefusedError: a parameter is unknown, unsupported, missing or wrong.
    """
    parameters = honoured(kind.endpoint, kind.model_fields, body)
    try:
        return parse_fields(kind, parameters.values)
    except RequestRefusedError as error:
        if not parameters.names:
            raise
        raise _as_sent(error, parameters.names) from error


def _as_sent(error: RequestRefusedError, names: Mapping[str, str]) -> RequestRefusedError:
    """An error that says what the request calls the parameters in it.

    Args:
        names: by our names.
    """
    message = str(error)
    sent = [f"{name} was sent as {alias}" for name, alias in names.items() if name in message]
    return RequestRefusedError(
        f"{message} ({', '.join(sent)})" if sent else message,
        code=error.code,
        param=names.get(error.param or "", error.param),
        status=error.status,
    )


def parse_fields(kind: type[_Model], values: Mapping[str, Any]) -> _Model:
    """A model of any schema from the fields that are given.

    Raises:
        RequestRefusedError: a field is unknown, missing or wrong.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(_most_telling(error.errors(include_url=False))) from error


def _most_telling(details: Sequence[ErrorDetails]) -> ErrorDetails:
    """The error to report. Every arm of a union reports errors; the arm whose validation got
    furthest is the one that the caller meant."""
    first = details[0]["loc"][:1]
    return max(
        (detail for detail in details if detail["loc"][:1] == first),
        key=lambda detail: (
            len(detail["loc"]),
            [part for part in detail["loc"] if isinstance(part, int)],
            not detail["type"].endswith("_type"),
        ),
    )


def _refusal(detail: ErrorDetails) -> RequestRefusedError:
    param = _path(detail["loc"])
    kind = detail["type"]
    if kind in ("extra_forbidden", "none_required"):  # a field that is none here, or is known
        is_known = kind == "none_required"
        code = "unsupported_parameter" if is_known else "unknown_parameter"
        message = f"{'unsupported' if is_known else 'unknown'} parameter: {param!r}"
        return RequestRefusedError(message, code=code, param=param)
    if kind == "missing":
        code = "missing_required_parameter"
    elif kind in ("unknown_parameter", "unsupported_parameter", "invalid_type"):
        code = kind
    else:
        code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return RequestRefusedError(f"{param}: {detail['msg']}", code=code, param=param or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`, without pydantic's names for the
    arms of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "bool"):
            path += f".{part}" if path else part
    return path
