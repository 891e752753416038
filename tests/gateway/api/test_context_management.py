"""`context_management` of responses: a conversation that is too long is compacted before it is
answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.request import Request
from penstock.gateway.api.shared.items import INSTRUCTION
from penstock.gateway.storage.sealed_text import unsealed
from tests.support.tiers import tiered

from ...redis_server import RedisServer
from ..conftest import ANSWER, Serve, Served, until
from ..generation.images.test_images import data_url, file_of, small
from .keyed import KEY
from .test_compaction import CONVERSATION, SUMMARY
from .test_idempotency_redis import another
from .test_tools import CALL, EVENTS, PARSERS, TOOLS, says

LARGE: dict[str, Any] = {"info": {"max_model_len": 4096}}
AT = [{"type": "compaction", "compact_threshold": 20}]
SHOWN = (
    "<user>a\n<user>d\n<user>What was said and done so far was removed. Its summary:\n\n"
    f"{SUMMARY}\n"
)


def summarises(served: Served, text: str = SUMMARY) -> None:
    """The engine's other answers are as they were."""
    tokens = served.tokenizer.encode(text)

    def script_of(request: Request) -> list[int] | None:
        return tokens if "_summary" in request.request_id else None

    served.engine.script_of = script_of


async def create(served: Served, **values: Any) -> Any:
    body = {"context_management": AT, **values}
    asked = {name: body.pop(name) for name in ("input", "extra_headers") if name in body}
    return await served.client.responses.create(
        **{"model": "tiny", "input": CONVERSATION, "extra_body": body, **asked}
    )


async def stream(served: Served, **values: Any) -> tuple[str, list[dict[str, Any]]]:
    body = {"model": "tiny", "input": CONVERSATION, "context_management": AT, **values}
    answer = await served.http.post("/v1/responses", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return answer.text, told_in(answer.text)


def told_in(text: str) -> list[dict[str, Any]]:
    told = [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n")[:-1]]
    for event in told:
        EVENTS.validate_python(event)
    return told


def items_in(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream, without their ids."""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == [
        item["id"] for item in events[-1]["response"]["output"]
    ]
    return [
        {name: value for name, value in item.items() if not name.endswith("id")} for item in done
    ]


async def test_below_the_threshold_nothing_changes(served: Served) -> None:
    for rule in ({"type": "compaction"}, {"type": "compaction", "compact_threshold": 10_000}):
        answer = await create(served, context_management=[rule])
        assert [item.type for item in answer.output] == ["message"]
    assert len(served.engine.submitted) == 2


async def test_a_summary_comes_before_the_answer(served: Served) -> None:
    summarises(served)
    answer = await create(served, instructions="Be brief.", stop=["cold"], max_output_tokens=5)
    compaction, message = answer.output
    assert unsealed(compaction.encrypted_content) == SUMMARY
    assert message.content[0].text == answer.output_text == ANSWER[: len(answer.output_text)]
    first, second = served.engine.submitted.values()
    assert served.prompt_of(0).startswith("<system>Be brief.\n<user>a\n<assistant>b\n")
    assert served.prompt_of(0).endswith(f"<user>d\n<user>{INSTRUCTION}\n<assistant>")
    assert served.prompt_of(1) == f"<system>Be brief.\n{SHOWN}<assistant>"
    assert second.sampling_params.max_tokens == 5
    prompts = [len(request.prompt_token_ids) for request in (first, second)]
    assert answer.usage.input_tokens == sum(prompts)
    num_said = len(served.tokenizer.encode(SUMMARY)) + 1
    assert answer.usage.output_tokens == num_said + 5
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_the_stream_has_it_as_its_first_item(served: Served) -> None:
    summarises(served)
    raw, told = await stream(served)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    kinds = [event["type"] for event in told if event.get("output_index") == 0]
    assert kinds[0] == "response.output_item.added"
    assert set(kinds[1:-1]) == {"response.compaction.compacting"}
    assert kinds[-1] == "response.output_item.done"
    others = [event["type"] for event in told if event.get("output_index") == 1]
    assert others[:2] == ["response.output_item.added", "response.content_part.added"]
    assert others[-1] == "response.output_item.done"
    assert SUMMARY not in raw
    response_id = told[-1]["response"]["id"]
    for after in range(-1, len(told), 7):
        path = f"/v1/responses/{response_id}?stream=true&starting_after={after}"
        assert raw.endswith((await served.http.get(path)).text)


@pytest.mark.parametrize("how", ["previous", "conversation", "input", "dropped"])
async def test_the_conversation_goes_on_after_it(served: Served, how: str) -> None:
    summarises(served)
    more: dict[str, Any] = {"input": "e"}
    asked: dict[str, Any] = {}
    if how == "conversation":
        asked = {"conversation": (await served.client.conversations.create()).id}
        more |= asked
    answer = await create(served, **asked)
    output = [item.to_dict(warnings=False) for item in answer.output]
    if how == "previous":
        more["previous_response_id"] = answer.id
    elif how == "input":
        more["input"] = [*CONVERSATION, *output, {"role": "user", "content": "e"}]
    elif how == "dropped":
        users = [item for item in CONVERSATION if item.get("role") == "user"]
        more["input"] = [*users, *output, {"role": "user", "content": "e"}]
    await served.client.responses.create(model="tiny", **more)
    assert served.prompt_of() == f"{SHOWN}<assistant>{ANSWER}\n<user>e\n<assistant>"
    [*_, second, third] = served.engine.submitted.values()
    whole = [*second.prompt_token_ids, *served.tokenizer.encode(ANSWER)]
    assert list(third.prompt_token_ids[: len(whole)]) == whole


async def test_thoughts_and_calls(serve: Serve) -> None:
    """The summary's thoughts are not shown, and it calls no tool; the answer does as ever."""
    async with serve(**LARGE, **PARSERS) as served:
        summarises(served, f"<think>\nHm.\n</think>\n\n{SUMMARY}")
        says(served, f"<think>\nSo.\n</think>\n\n{CALL}")
        _, told = await stream(served, tools=TOOLS, tool_choice="required")
        compaction, thought, call = items_in(told)
        assert unsealed(compaction["encrypted_content"]) == SUMMARY
        assert thought["content"][0]["text"] == "So."
        assert call["name"] == "weather"
        first, second = served.engine.submitted.values()
        assert first.sampling_params.structured_outputs is None
        assert second.sampling_params.structured_outputs is not None
        details = told[-1]["response"]["usage"]["output_tokens_details"]
        assert details["reasoning_tokens"] > 0


async def test_over_a_websocket(served: Served) -> None:
    summarises(served)
    async with served.connect() as socket:

        async def ask(**values: Any) -> dict[str, Any]:
            await socket.send(json.dumps({"type": "response.create", "model": "tiny", **values}))
            while True:
                event = json.loads(await socket.recv())
                if event["type"] == "response.completed":
                    return event["response"]

        for stores in (True, False):
            first = await ask(input=CONVERSATION, context_management=AT, store=stores)
            kinds = [item["type"] for item in first["output"]]
            assert kinds == ["compaction", "message"]
            await ask(input="e", previous_response_id=first["id"], store=stores)
            assert served.prompt_of() == f"{SHOWN}<assistant>{ANSWER}\n<user>e\n<assistant>"


async def test_what_does_not_fit_is_compacted_whatever_the_threshold(served: Served) -> None:
    summarises(served)
    long = [{"role": "user", "content": ANSWER * 8}, {"role": "assistant", "content": "b"}] * 10
    rule = [{"type": "compaction", "compact_threshold": 1_000_000}]
    asked = [*long, {"role": "user", "content": "d"}]
    answer = await create(served, input=asked, context_management=rule)
    assert [item.type for item in answer.output] == ["compaction", "message"]
    _, second = served.engine.submitted.values()
    room = served.engine.info.max_model_len - len(second.prompt_token_ids)
    assert room >= served.engine.info.max_model_len // 8
    assert served.prompt_of().endswith(f"{SUMMARY}\n<assistant>")


async def test_images_stay(serve: Serve, vision_path: Path) -> None:
    async with serve(model=ModelConfig(model=str(vision_path))) as served:
        summarises(served)
        image = {"type": "input_image", "image_url": data_url(file_of(small())), "detail": "auto"}
        asked = [{"role": "user", "content": [image]}, *CONVERSATION]
        answer = await create(served, input=asked)
        first, second = served.engine.submitted.values()
        assert first.images == second.images != ()
        await served.client.responses.create(
            model="tiny", input="e", previous_response_id=answer.id
        )
        assert list(served.engine.submitted.values())[-1].images == first.images


async def test_a_key_gives_it_again(served: Served) -> None:
    summarises(served)
    first, again = [await create(served, extra_headers=KEY) for _ in range(2)]
    assert first.output == again.output
    assert len(served.engine.submitted) == 2


async def test_cancelled_in_the_summary(serve: Serve) -> None:
    """What there is of it stands for nothing."""
    async with serve(step_s=0.001) as served:
        served.engine.holds_in = 5
        summarises(served)
        response = await create(served, background=True)
        await until(lambda: not served.engine.may_speak.is_set())
        cancelled = await served.client.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        stored = await served.app.state.conversations.turn("default", response.id)
        assert not stored.output_token_ids  # of the answer, which had not begun
        served.engine.may_speak.set()
        assert len(served.engine.submitted) == 1
        await served.client.responses.create(
            model="tiny", input="e", previous_response_id=response.id
        )
        assert served.prompt_of().startswith("<user>a\n<assistant>b\n")
        assert "summary" not in served.prompt_of()


async def test_a_model_that_writes_no_summary(served: Served) -> None:
    summarises(served, " ")
    with pytest.raises(openai.InternalServerError) as failed:
        await create(served)
    assert "no summary" in failed.value.message
    assert len(served.engine.submitted) == 1


async def test_a_template_that_does_not_show_it(serve: Serve) -> None:
    template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    async with serve(chat_template=template) as served:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(served)
        assert refused.value.param == "context_management"


async def test_a_trigger_and_a_count_are_as_they_were(served: Served) -> None:
    says(served, SUMMARY)
    asked = [*CONVERSATION, {"type": "compaction_trigger"}]
    assert [item.type for item in (await create(served, input=asked)).output] == ["compaction"]
    body = {"input": CONVERSATION, "context_management": AT}
    counted = await served.http.post("/v1/responses/input_tokens", json=body)
    assert counted.json()["input_tokens"] > AT[0]["compact_threshold"]
    assert len(served.engine.submitted) == 1


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ([{"type": "other"}], "context_management[0].type"),
        ([{"type": "compaction", "compact_threshold": 0}], "context_management[0]"),
        ({"type": "compaction"}, "context_management"),
        ([{"type": "compaction", "keep": 1}], "context_management[0].keep"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, value: Any, param: str) -> None:
    body = {"input": CONVERSATION, "context_management": value}
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


# -- what it survives -----------------------------------------------------------------------------

WRITTEN = f"<think>\nHm, let me see.\n</think>\n\n{SUMMARY}"
ANSWERED = f"<think>\nSo it is.\n</think>\n\nLet me see.\n{CALL}"
CUTS = tiered((1, 5, 9, 20, 33, 60, 90), (5, 60))  # steps of summary and answer


@pytest.mark.usefixtures("soon_alarmed")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("has_formats", [False, True])
async def test_the_death_of_an_engine(serve: Serve, cut: int, has_formats: bool) -> None:
    settings: dict[str, Any] = PARSERS if has_formats else {}
    async with serve(step_s=0.001, **LARGE, **settings) as served:
        summarises(served, WRITTEN)
        says(served, ANSWERED)
        tools = {"tools": TOOLS} if has_formats else {}
        _, whole = await stream(served, **tools)
        served.engine.dies_in = cut
        reading = asyncio.create_task(stream(served, **tools))
        await until(lambda: served.engine.num_deaths > 0)
        served.engine.restart()
        _, told = await reading
        assert items_in(told) == items_in(whole)


@pytest.mark.redis
@pytest.mark.usefixtures("patient_logs")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("has_formats", [False, True])
async def test_a_gateway_that_leaves(
    serve: Serve,
    model_path: Path,
    tmp_path: Path,
    redis_server: RedisServer,
    cut: int,
    has_formats: bool,
) -> None:
    settings: dict[str, Any] = PARSERS if has_formats else {}
    settings = settings | {"redis_url": redis_server.patient_url}
    async with (
        serve(step_s=0.001, **LARGE, **settings) as served,
        another(model_path, tmp_path, **settings) as other,
    ):
        summarises(served, WRITTEN)
        says(served, ANSWERED)
        body = {"model": "tiny", "input": CONVERSATION, "context_management": AT, "stream": True}
        body |= {"tools": TOOLS} if has_formats else {}
        whole = told_in((await served.http.post("/v1/responses", json=body)).text)
        served.engine.holds_in = cut
        reading = asyncio.create_task(served.http.post("/v1/responses", json=body))
        await until(lambda: not served.engine.may_speak.is_set())
        [*_, response_id] = [
            name.removesuffix("_summary")
            for name in served.engine.submitted
            if name.startswith("resp_")
        ]
        await served.app.state.log_store.hand_over()
        served.engine.may_speak.set()
        path = f"/v1/responses/{response_id}?stream=true"
        told = told_in((await other.http.get(path)).text)
        assert items_in(told) == items_in(whole)
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert told[-1]["type"] == "response.completed"
        asked = {"model": "tiny", "input": "e", "previous_response_id": response_id}
        await other.http.post("/v1/responses", json=asked)
        assert f"Its summary:\n\n{SUMMARY if has_formats else WRITTEN}\n" in served.prompt_of()
        reading.cancel()
