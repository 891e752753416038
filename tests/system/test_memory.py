"""KV memory seen from outside: turns that find their past, streams that are parked and go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import websockets

from .processes import END_S, Served, idle, metric, serve

NUM_STREAMS = 14
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
QUESTIONS = [
    "What is paged attention?",
    "And what is a KV block?",
    "Tell me a story about a fox.",
    "What is continuous batching?",
]


def test_turn_four_computes_only_its_new_tokens(demo_server: Served) -> None:
    """Each turn finds all that was computed before: the last prompt and its answer, of which the
    last token was never computed."""
    client = openai.OpenAI(base_url=f"{demo_server.base_url}/v1", api_key="none")
    salt = {"cache_salt": "of this test"}
    messages: list[Any] = []
    known = 1
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=40, temperature=0, extra_body=salt
        )
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == known - 1
        known = usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    previous, known = None, 1
    for question in QUESTIONS:
        response = client.responses.create(
            model="demo",
            input=f"Please tell me: {question}",
            max_output_tokens=40,
            temperature=0,
            previous_response_id=previous,
            extra_body=salt,
        )
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens in (
            # The first begins as the conversation above did.
            {known - 1} if previous else range(12)
        )
        previous, known = response.id, response.usage.total_tokens


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Blocks for one context and no more, in fp32."""
    log = tmp_path_factory.mktemp("small") / "log"
    with serve(
        *("--dtype", "float32", "--num-blocks", "64", "--max-model-len", "1024"),
        *("--preemption", "swap"),
        log=log,
    ) as served:
        yield served


async def stream(socket: websockets.ClientConnection, lanes: dict[str, dict[str, Any]]) -> Any:
    """The events of several responses, by lane."""
    events: dict[str, list[dict[str, Any]]] = {lane: [] for lane in lanes}
    for lane, body in lanes.items():
        await socket.send(json.dumps({"type": "response.create", "stream_id": lane, **body}))
    num_open = len(lanes)
    while num_open:
        event = json.loads(await socket.recv())
        events[event["stream_id"]].append(event)
        num_open -= event["type"] in TERMINAL
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


@pytest.mark.exhaustive
async def test_a_parked_stream_goes_on_where_it_was(small_server: Served) -> None:
    bodies = {
        f"s{number}": {
            "model": "demo",
            "input": f"My name is Zorin{number}. Tell me a story about a fox and a clock.",
            "temperature": 0,
            "ignore_eos": True,
            "max_output_tokens": 150 + 5 * number,
            "store": False,
            **({"penstock": {"events": ["preempted", "resumed"]}} if number % 2 else {}),
        }
        for number in range(NUM_STREAMS)
    }
    address = small_server.base_url.replace("http", "ws") + "/v1/responses"
    async with (
        asyncio.timeout(280),
        websockets.connect(address, open_timeout=END_S) as socket,
        httpx.AsyncClient(base_url=small_server.base_url, timeout=END_S) as client,
    ):
        alone = {lane: (await stream(socket, {lane: body}))[lane] for lane, body in bodies.items()}
        assert await metric(client, "num_preemptions_total") == 0
        together = await stream(socket, bodies)
        await idle(client)  # its last report may be a moment away
        assert await metric(client, "num_preemptions_total") > 0
        exposition = (await client.get("/metrics")).text
        assert await metric(client, "num_requests_swapped") == 0
    assert 'kind="swap",model_name="demo"} 0.0' not in exposition
    assert 'kind="recompute",model_name="demo"} 0.0' in exposition
    num_told = 0
    for lane, events in together.items():
        assert text_of(events) == text_of(alone[lane])
        numbered = [event for event in events if not event["type"].startswith("penstock.")]
        assert [e["sequence_number"] for e in numbered] == list(range(len(numbered)))
        told = [event["type"] for event in events if event["type"].startswith("penstock.")]
        asked = "penstock" in bodies[lane]
        assert told == ["penstock.preempted", "penstock.resumed"] * (len(told) // 2) * asked
        num_told += len(told)
    assert num_told > 0


@pytest.mark.exhaustive
async def test_samples_and_beams_end_though_memory_is_short(small_server: Served) -> None:
    async with (
        asyncio.timeout(280),
        openai.AsyncOpenAI(base_url=f"{small_server.base_url}/v1", api_key="none") as client,
        httpx.AsyncClient(base_url=small_server.base_url, timeout=END_S) as http,
    ):
        before = await metric(http, "num_preemptions_total")
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="demo",
                    prompt=f"Once there was a fox called Mira{number},",
                    n=4,
                    max_tokens=100,
                    seed=number,
                    extra_body={"ignore_eos": True, "use_beam_search": number % 3 == 0},
                )
                for number in range(6)
            )
        )
        assert await metric(http, "num_preemptions_total") > before
    for answer in answers:
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert all(choice.finish_reason == "length" for choice in answer.choices)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4 * 100


def test_what_can_never_fit_is_refused_at_once(small_server: Served) -> None:
    client = openai.OpenAI(base_url=f"{small_server.base_url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="64") as refused:
        client.completions.create(model="demo", prompt="Hello", n=8, max_tokens=900, stream=True)
    assert refused.value.param == "n"
