"""The base of all request schemas."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from penstock.gateway.errors import RequestRefusedError

_MAX_KEYS = 128  # of one object


class Model(BaseModel):
    """Validation stops at a list's first error and at an object with too many keys, so that a body
    full of errors costs no more than a valid one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, value: Any) -> Any:
        return bounded(value, _MAX_KEYS)


def bounded(value: Any, max_keys: int) -> Any:
    if isinstance(value, dict) and len(value) > max_keys:
        raise PydanticCustomError("too_long", "at most {max} keys", {"max": max_keys})
    return value


def invalid(param: str, rule: str) -> RequestRefusedError:
    return RequestRefusedError(f"{param} {rule}", code="invalid_value", param=param)
