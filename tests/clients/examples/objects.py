"""LangChain's `with_structured_output` in its three methods, from the server at PENSTOCK_URL."""

from __future__ import annotations

import os
from typing import Any, Literal

import httpx
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    name: str = Field(max_length=12)
    kind: Literal["town", "city"]


class Trip(BaseModel):
    """A trip."""

    begin: Place
    stops: list[Place] = Field(max_length=2)
    days: int = Field(ge=1, le=30)
    note: str | None = Field(max_length=20)


QUESTION = "Plan a trip, as JSON."
SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo",
        base_url=os.environ["PENSTOCK_URL"] + "/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        **{"max_tokens": 400, **options},
    )


def refusal(chain: Runnable[Any, Any]) -> Exception:
    try:
        chain.invoke(QUESTION)
    except Exception as error:
        return error
    raise AssertionError("nothing was refused")


def by_schema(**options: Any) -> None:
    chain = model(**options).with_structured_output(Trip, method="json_schema")
    whole = chain.invoke(QUESTION)
    assert isinstance(whole, Trip)
    *_, last = chain.stream(QUESTION)
    assert last == whole
    of_mapping = model(**options).with_structured_output(SCHEMA, method="json_schema", strict=True)
    Place.model_validate(of_mapping.invoke(QUESTION))
    raw = model(**options).with_structured_output(Trip, method="json_schema", include_raw=True)
    told = raw.invoke(QUESTION)
    assert (told["parsed"], told["parsing_error"]) == (whole, None)
    short = model(**{**options, "max_tokens": 5}).with_structured_output(Trip, method="json_schema")
    error = refusal(short)
    assert "length" in str(error) or "EOF" in str(error), error


def by_json_mode() -> None:
    """The built-in model would not end a string that is free to go on."""
    body = {"model": "demo", "prompt": "}", "add_special_tokens": False}
    told = httpx.post(os.environ["PENSTOCK_URL"] + "/tokenize", json=body, timeout=60).json()
    ends_soon = model(logit_bias=dict.fromkeys(told["tokens"], 100))
    chain = ends_soon.with_structured_output(None, method="json_mode")
    assert chain.invoke(QUESTION) == {}


def by_functions() -> None:
    """A function that must be called, whose arguments are the object."""
    for options in ({}, {"use_responses_api": True}):
        chain = model(**options).with_structured_output(Trip, method="function_calling")
        whole = chain.invoke(QUESTION)
        assert isinstance(whole, Trip)
        *_, last = chain.stream(QUESTION)
        assert last == whole


by_schema()
by_schema(use_responses_api=True)
by_json_mode()
by_functions()
print("done")
