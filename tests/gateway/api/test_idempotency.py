"""`Idempotency-Key`: chat completions and completions that may be asked for again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from ..conftest import ANSWER, Serve, Served
from .keyed import BODIES, CHAT, COMPLETIONS, KEY, chunks_of, post, read_chunks, text_of


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_whole_answer_is_given_again(served: Served, path: str) -> None:
    first = await post(served.http, path)
    again = await post(served.http, path)
    assert again.content == first.content
    assert len(served.engine.submitted) == 1
    [choice] = first.json()["choices"]
    assert (choice.get("text") or choice["message"]["content"]) == ANSWER
    assert choice["finish_reason"] == "stop"
    assert first.json()["usage"]["completion_tokens"] == len(served.engine.script) + 1
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert first.json()["id"].startswith({CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}[path])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2, "return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stop": ["fake"], "include_stop_str_in_output": True},
        {"max_tokens": 5},
        {"return_tokens_as_token_ids": True, "logprobs": 0},
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_key_changes_nothing_of_the_answer(
    served: Served, path: str, options: dict[str, Any], is_streamed: bool
) -> None:
    if path == CHAT and "logprobs" in options:
        options = options | {"logprobs": True, "top_logprobs": options["logprobs"]}
    options = options | {"stream": is_streamed}
    plain = await post(served.http, path, {}, **options)
    keyed = [await post(served.http, path, **options) for _ in range(2)]
    assert keyed[0].content == keyed[1].content
    assert len(served.engine.submitted) == 2
    if is_streamed:
        assert said(chunks_of(keyed[0].text)) == said(chunks_of(plain.text))
    else:
        assert said([keyed[0].json()]) == said([plain.json()])


def said(objects: list[dict[str, Any]]) -> Any:
    """What chunks (or a whole answer) say in sum, however it is cut."""
    first = objects[0]
    sums: dict[str, Any] = {"usage": objects[-1].get("usage"), "object": first["object"]}
    sums |= {name: first[name] for name in ("model", "system_fingerprint")}
    for choice in [choice for each in objects for choice in each["choices"]]:
        for name, value in {**choice, **choice.get("delta", {})}.items():
            if isinstance(value, dict) and name == "logprobs":
                for inner, values in value.items():
                    told = f"logprobs.{inner}"
                    sums[told] = (sums.get(told) or []) + (values or [])
            elif isinstance(value, (str, list)):
                sums[name] = (sums.get(name) or value[:0]) + value
            elif name not in ("delta", "logprobs"):
                sums[name] = value
    return sums


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_cut_stream_runs_on_and_is_replayed_from_the_start(
    serve: Serve, path: str, num_chunks: int
) -> None:
    async with serve(step_s=0.01) as served:
        body = BODIES[path] | {"stream": True}
        async with served.http.stream("POST", path, json=body, headers=KEY) as response:
            begun = await read_chunks(response, num_chunks)
        again = await post(served.http, path, stream=True)
        assert again.text.startswith(begun[: begun.rindex("\n\n")])
        assert text_of(chunks_of(again.text)) == ANSWER
        assert len(served.engine.submitted) == 1
        [request_id] = served.engine.submitted
        assert (await post(served.http, path, stream=True)).text == again.text
        assert len(served.engine.submitted) == 1, request_id


async def test_several_read_one_answer_at_once(served: Served) -> None:
    served.engine.may_speak.clear()
    posts = [asyncio.create_task(post(served.http, stream=True)) for _ in range(5)]
    await served.submitted()
    served.engine.may_speak.set()
    texts = {(await each).text for each in posts}
    assert len(texts) == len(served.engine.submitted) == 1


async def test_who_left_before_the_first_token_finds_the_whole_answer(served: Served) -> None:
    served.engine.may_speak.clear()
    call = asyncio.create_task(post(served.http))
    await served.submitted()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    served.engine.may_speak.set()
    answer = await post(served.http)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    assert len(served.engine.submitted) == 1


async def test_another_body_is_refused_for_good(served: Served) -> None:
    await post(served.http)
    for extra in ({"seed": 1}, {"stream": True}):
        refused = await post(served.http, **extra)
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
        assert refused.headers["x-should-retry"] == "false"
    assert len(served.engine.submitted) == 1


async def test_the_order_of_parameters_does_not_matter(served: Served) -> None:
    body = BODIES[CHAT] | {"seed": 1, "max_tokens": 5}
    for content in (json.dumps(body), json.dumps(dict(reversed(body.items())), indent=1)):
        answer = await served.http.post(CHAT, content=content, headers=KEY)
        assert answer.status_code == 200
    assert len(served.engine.submitted) == 1


async def test_endpoints_do_not_share_keys(served: Served) -> None:
    for path in (CHAT, COMPLETIONS):
        assert (await post(served.http, path)).status_code == 200
    assert len(served.engine.submitted) == 2


async def test_tenants_do_not_share_keys(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    names = ("acme", "small")
    keys.write_text(
        "".join(f'[[keys]]\nkey = "sk-{n}"\ntenant = "{n}"\n[tenants.{n}]\n' for n in names)
    )
    async with serve(api_keys_file=keys) as served:
        for name in names * 2:
            headers = KEY | {"Authorization": f"Bearer sk-{name}"}
            extra = {"seed": names.index(name)}  # the same key with another body of another's
            assert (await post(served.http, CHAT, headers, **extra)).status_code == 200
        tenants = [request.tenant for request in served.engine.submitted.values()]
        assert tenants == list(names)


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"use_beam_search": True}),
        (CHAT, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"best_of": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
    ],
)
async def test_only_a_single_output_can_be_had_under_a_key(
    served: Served, path: str, extra: dict[str, Any]
) -> None:
    refused = await post(served.http, path, **extra)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"
    assert next(iter(extra)).rstrip("s") in refused.json()["error"]["message"]
    assert not served.engine.submitted


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", "\xe9"])
async def test_what_is_no_key(served: Served, key: str) -> None:
    headers: Any = [(b"idempotency-key", key.encode("latin-1"))]
    refused = await served.http.post(CHAT, json=BODIES[CHAT], headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_nobody_comes_back(serve: Serve) -> None:
    async with serve(step_s=0.01, disconnect_grace_s=0.5) as served:
        served.engine.script *= 100
        body = BODIES[CHAT] | {"stream": True}
        async with served.http.stream("POST", CHAT, json=body, headers=KEY) as response:
            await read_chunks(response, 2)
        await served.aborted()
        # Whoever comes later all the same has another try.
        async with served.http.stream("POST", CHAT, json=body, headers=KEY) as response:
            assert '"role"' in await read_chunks(response, 1)
        assert len(served.engine.submitted) == 2


async def test_a_failed_answer_is_tried_again(served: Served) -> None:
    served.engine.failure = "no luck"
    failed = await post(served.http)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "generation_failed")
    streamed = await post(served.http, stream=True)  # still another body
    assert streamed.status_code == 409
    served.engine.failure = None
    assert (await post(served.http)).json()["choices"][0]["message"]["content"] == ANSWER
    assert len(served.engine.submitted) == 2


async def test_a_refused_request_leaves_nothing_behind(served: Served) -> None:
    assert (await post(served.http, max_tokens=0)).status_code == 400
    assert (await post(served.http, max_tokens=5)).status_code == 200


async def test_after_its_time_a_key_begins_anew(serve: Serve) -> None:
    async with serve(response_log_ttl_s=0.1) as served:
        seeds = set()
        for _ in range(2):
            assert (await post(served.http)).status_code == 200
            seeds |= {each.sampling_params.seed for each in served.engine.submitted.values()}
            await asyncio.sleep(0.15)
        assert len(seeds) == 2


async def test_it_is_no_response(served: Served) -> None:
    await post(served.http)
    [response_id] = served.engine.submitted
    for query in ("", "?stream=true"):
        answer = await served.http.get(f"/v1/responses/{response_id}{query}")
        assert answer.status_code == 404


async def test_the_stock_client(served: Served) -> None:
    create = served.client.chat.completions.create
    options: Any = BODIES[CHAT] | {"model": "tiny"}
    first = await create(**options, stream=True, extra_headers=KEY)
    async for _ in first:
        break
    await first.close()
    again = await create(**options, stream=True, extra_headers=KEY)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in again])
    assert text == ANSWER
    with pytest.raises(openai.ConflictError):
        await served.client.with_options(max_retries=2).chat.completions.create(
            **options, seed=1, extra_headers=KEY
        )
    assert len(served.engine.submitted) == 1
