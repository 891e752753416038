"""What exceeds the context is told in OpenAI's words and with OpenAI's code, by which clients know
that they have to shorten the conversation or ask another model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from ...support.fetched import python_environment
from ..conftest import PATIENCE_S, Serve, Served

LONG = "x" * 2000
SEVERAL_TOKENS_LONG = "x" * 100_000  # longer than 1024 of the longest tokens
START = "This model's maximum context length is 1024 tokens. However, "
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hello"}]


def _says(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, _says(LONG), "messages"),
        (CHAT, _says(SEVERAL_TOKENS_LONG), "messages"),
        (CHAT, {**_says(LONG), "stream": True}, "messages"),
        (CHAT, {**_says("x"), "min_tokens": 1020}, "min_tokens"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 1024}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", SEVERAL_TOKENS_LONG]}, "prompt"),
        (RESPONSES, {"input": LONG}, "input"),
        (RESPONSES, {"input": "x", "instructions": LONG}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": [[5], [5] * 1025]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", SEVERAL_TOKENS_LONG]}, "input[1]"),
        ("/rerank", {"query": LONG, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]"),
        ("/score", {"text_1": "a", "text_2": LONG}, "text_2"),
    ],
)
async def test_every_overflow_is_told_in_the_same_words(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    response = await served.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        param,
    )
    assert error["message"].startswith(START)
    assert error["message"].endswith("(context_length_exceeded)")
    assert re.search(r"(resulted in|requested)( at least)? \d+ tokens", error["message"])


async def test_the_message_has_the_numbers(served: Served) -> None:
    response = await served.http.post(CHAT, json=_says(LONG))
    num_tokens = len(served.tokenizer.encode(f"<user>{LONG}\n<assistant>"))
    assert response.json()["error"]["message"] == (
        f"{START}your messages resulted in {num_tokens} tokens, which leaves no room for output. "
        "Please reduce the length of the messages. (context_length_exceeded)"
    )


async def test_a_conversation_that_has_grown_too_long(served: Served) -> None:
    first = (await served.http.post(RESPONSES, json={"input": "x" * 900})).json()
    more = {"input": "y" * 200, "previous_response_id": first["id"]}
    error = (await served.http.post(RESPONSES, json=more)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(START)
    async with served.connect() as socket:
        await socket.send(json.dumps({"type": "response.create", **more}))
        error = json.loads(await socket.recv())["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(START)


async def test_the_limit_of_bytes_is_an_overflow_too(serve: Serve) -> None:
    async with serve(max_prompt_bytes=1000) as served:
        body = {"prompt": LONG, "truncate_prompt_tokens": 5}
        error = (await served.http.post(COMPLETIONS, json=body)).json()["error"]
        assert error["message"].startswith(START)
        assert "at most 1000 (--max-prompt-bytes)" in error["message"]


_LITELLM = """
import litellm
for ask in (
    lambda **more: litellm.completion(messages=[{"role": "user", "content": LONG}], **more),
    lambda **more: litellm.completion(
        messages=[{"role": "user", "content": LONG}], stream=True, **more
    ),
    lambda **more: litellm.responses(input=LONG, **more),
):
    try:
        ask(model="openai/tiny", api_base=URL, api_key="none")
    except Exception as error:
        print(type(error).__name__)
"""
_LANGCHAIN = """
from langchain_openai import ChatOpenAI
for more in ({}, {"use_responses_api": True}, {"streaming": True}):
    try:
        ChatOpenAI(model="tiny", base_url=URL, api_key="none", **more).invoke(LONG)
    except Exception as error:
        print(*(each.__name__ for each in type(error).__mro__))
"""


@pytest.mark.external
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "program", "name"),
    [
        ("litellm==1.110.2", _LITELLM, "ContextWindowExceededError"),
        ("langchain-openai==1.7.4", _LANGCHAIN, "ContextOverflowError"),
    ],
)
async def test_clients_recognise_it(served: Served, package: str, program: str, name: str) -> None:
    python = await asyncio.to_thread(python_environment, [package])
    start = f"URL, LONG = 'http://127.0.0.1:{served.port}/v1', 'x' * 2000\n"
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", start + program,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    lines = out.decode().splitlines()
    found = [line for line in lines if name in line.split()]
    assert len(found) == 3, f"{lines}, {err.decode()[-2000:]}"
