"""What requests have used: in their answers, and the sums of it by key and day."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.admin.organization import UsageCompletionsResponse

from penstock.engine.request import Spent
from penstock.gateway.storage.usage.ledger import name_of, today

from ..conftest import Serve, Served

KEYS = """
[[keys]]
key = "sk-acme-1"
tenant = "acme"
id = "laptop"

[[keys]]
key = "sk-acme-2"
tenant = "acme"
id = "server"

[[keys]]
key = "sk-small"
tenant = "small"
id = "only"

[[keys]]
sha256 = "{digest}"
tenant = "small"
id = "operator"
admin = true

[tenants.acme]
[tenants.small]
""".replace("{digest}", hashlib.sha256(b"sk-admin").hexdigest())
SPENT = Spent(compute_us=1_234_567, block_us=98_765_432)
MESSAGES = [{"role": "user", "content": "hello"}]
COUNTED = ("prompt_tokens", "output_tokens", "thinking_tokens")
SECONDS = ("compute_seconds", "kv_block_seconds")


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def counts(used: dict[str, Any], num_requests: int = 1) -> Counter[str]:
    return Counter(
        {
            "requests": num_requests,
            **{name: used[name] for name in COUNTED},
            **used["cached_tokens"],
            **{name: round(1e6 * used[name]) for name in SECONDS},
        }
    )


async def told(http: httpx.AsyncClient, path: str, headers: dict[str, str], **body: Any) -> Any:
    """`penstock.usage` of an answer, or of the end of a stream."""
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["penstock"]["usage"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    ends = [event.get("response", event) for event in events]
    (last,) = [end["penstock"] for end in ends if end.get("penstock")]
    return last["usage"]


async def summed(http: httpx.AsyncClient, name: str) -> dict[tuple[str, str], Counter[str]]:
    """Today's sums, by tenant and key."""
    answer = await http.get("/v1/usage", headers=key(name), params={"start_date": name_of(today())})
    assert answer.status_code == 200, answer.text
    (day,) = answer.json()["data"]
    return {
        (each["project_id"], each["api_key_id"]): counts(
            {**each, **each["penstock"], "prompt_tokens": each["input_tokens"]},
            each["num_model_requests"],
        )
        for each in day["results"]
    }


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The settings of a store."""
    if request.param == "memory":
        return {"data_dir": "none"}
    if request.param == "disk":
        (tmp_path / "data").mkdir(mode=0o700)
        return {"data_dir": str(tmp_path / "data")}
    return {"redis_url": request.getfixturevalue("redis_server").patient_url}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


async def test_sums_are_those_that_answers_told(
    serve: Serve, store: dict[str, Any], keys: str
) -> None:
    async with serve(api_keys_file=keys, **store) as served:
        served.engine.spent = SPENT
        http, acme, other = served.http, key("sk-acme-1"), key("sk-acme-2")
        chat, stream = "/v1/chat/completions", {"stream": True}
        with_usage = {**stream, "stream_options": {"include_usage": True}}
        used = [
            await told(http, chat, acme, messages=MESSAGES),
            await told(http, chat, acme, messages=MESSAGES, n=2, **with_usage),
            await told(http, "/v1/completions", acme, prompt=["one", "two"], max_tokens=3),
            await told(http, "/v1/responses", acme, input="hello"),
            await told(http, "/v1/responses", acme, input="hello", **stream),
            await told(http, "/v1/responses", acme, input="hello", store=False),
            await told(http, "/v1/messages", acme, messages=MESSAGES, max_tokens=4, **stream),
            await told(http, "/v1/messages", acme, messages=MESSAGES, max_tokens=4),
        ]
        once = {**acme, "Idempotency-Key": "7c4a8d09"}
        again = [await told(http, chat, once, messages=MESSAGES) for _ in range(2)]
        assert again[0] == again[1]
        expected = sum(map(counts, [*used, again[0]]), Counter({"requests": 1}))  # two prompts
        sums = await summed(http, "sk-acme-1")
        assert sums == {("acme", "laptop"): expected}
        assert used[1]["compute_seconds"] == 2 * SPENT.compute_us / 1e6

        answer = await http.post("/v1/embeddings", json={"input": "x"}, headers=other)
        assert answer.status_code == 200, answer.text
        embedded = Counter(
            {
                "requests": 1,
                "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
                "device": 1,
                "compute_seconds": SPENT.compute_us,
                "kv_block_seconds": SPENT.block_us,
            }
        )
        small = counts(await told(http, chat, key("sk-small"), messages=MESSAGES))
        of_acme = {("acme", "laptop"): expected, ("acme", "server"): embedded}
        assert await summed(http, "sk-acme-2") == of_acme
        assert await summed(http, "sk-small") == {("small", "only"): small}
        assert await summed(http, "sk-admin") == {**of_acme, ("small", "only"): small}

    async with serve(api_keys_file=keys, **store) as served:  # another process
        kept = {} if store.get("data_dir") == "none" else of_acme
        assert await summed(served.http, "sk-acme-2") == kept


async def test_what_its_client_left_counts_as_far_as_it_came(serve: Serve, keys: str) -> None:
    async with serve(api_keys_file=keys) as served:
        served.engine.holds_in = 3
        body = {"messages": MESSAGES, "stream": True}
        acme = key("sk-acme-1")
        async with served.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=acme
        ) as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line:
                    break
        await served.aborted()
        await served.submitted()
        sums = await summed(served.http, "sk-acme-1")
        assert 1 <= sums["acme", "laptop"]["output_tokens"] <= 3


async def test_the_stock_client_reads_the_page(serve: Serve, keys: str) -> None:
    async with serve(api_keys_file=keys) as served:
        await told(served.http, "/v1/responses", key("sk-acme-1"), input="hello")
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{served.port}/v1", api_key="sk-acme-1", max_retries=0
        )
        async with client:
            page = await client.get("/usage", cast_to=UsageCompletionsResponse)
        assert len(page.data) == 31
        assert page.data[-1].end_time - page.data[-1].start_time == 86400
        (result,) = page.data[-1].results
        assert result.object == "organization.usage.completions.result"
        assert (result.project_id, result.api_key_id) == ("acme", "laptop")
        assert result.num_model_requests == 1
        assert not page.data[0].results


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start_date": "yesterday"}, "start_date"),
        ({"start_date": "2026-02-30"}, "start_date"),
        ({"start_date": "20260201"}, "start_date"),
        ({"end_date": "1"}, "end_date"),
        ({"end_date": ""}, "end_date"),
        ({"start_date": "2026-02-02", "end_date": "2026-02-01"}, "start_date"),
        ({"start_date": "2025-01-01", "end_date": "2025-12-31"}, "start_date"),
        ({"start_date": "9999-12-31"}, "start_date"),
        ({"days": "3"}, "days"),
    ],
)
async def test_a_bad_range_is_refused_by_name(
    served: Served, query: dict[str, str], param: str
) -> None:
    answer = await served.http.get("/v1/usage", params=query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_days_that_are_not_kept_are_left_out(serve: Serve) -> None:
    async with serve(usage_days=2) as served:
        days = (await served.http.get("/v1/usage")).json()["data"]
        assert [day["date"] for day in days] == [name_of(today() - 1), name_of(today())]
        old = {"start_date": "2001-01-01", "end_date": "2001-01-02"}
        assert (await served.http.get("/v1/usage", params=old)).json()["data"] == []


async def test_tenants_have_metrics_of_it(serve: Serve, keys: str) -> None:
    async with serve(api_keys_file=keys) as served:
        served.engine.spent = SPENT
        used = await told(served.http, "/v1/responses", key("sk-acme-1"), input="hello")
        text = (await served.http.get("/metrics", headers=key("sk-admin"))).text
        numbers = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if 'tenant="acme"' in line
        }
        cached = sum(used["cached_tokens"].values())
        assert numbers["penstock:tenant_prompt_tokens_cached_total"] == cached
        seconds = numbers["penstock:tenant_request_compute_seconds_total"]
        assert seconds == pytest.approx(used["compute_seconds"])
        blocks = numbers["penstock:tenant_request_kv_block_seconds_total"]
        assert blocks == pytest.approx(used["kv_block_seconds"])
        assert numbers["penstock:tenant_thinking_tokens_total"] == 0
