"""`POST /v1/responses/compact`: a conversation becomes its users' messages and a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.engine.config import ModelConfig
from penstock.gateway.api.shared.items import INSTRUCTION
from penstock.gateway.storage.sealed_text import unsealed

from ..conftest import ANSWER, Serve, Served
from ..generation.images.test_images import data_url, file_of, small
from .keyed import KEY
from .test_tools import CALL, EVENTS, PARSERS, TOOLS, says

SUMMARY = "Asked for the weather; it is cold."
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "cold"},
    {"role": "user", "content": "d"},
]


async def compacted(served: Served, **values: Any) -> Any:
    return await served.client.responses.compact(
        **{"model": "tiny", "input": CONVERSATION, **values}
    )


async def test_the_users_messages_and_a_summary_are_left(serve: Serve) -> None:
    async with serve(info={"max_model_len": 4096}, **PARSERS) as served:
        says(served, f"<think>\nHm.\n</think>\n\n{SUMMARY}")
        answer = await compacted(served, instructions="Be brief.", extra_body={"tools": TOOLS})
        assert answer.object == "response.compaction"
        prompt = served.prompt_of()
        assert "Be brief." in prompt
        assert "weather" in prompt
        assert prompt.endswith(f"<user>d\n<user>{INSTRUCTION}\n<assistant>")
        first, second, compaction = answer.output
        assert [each.content[0].text for each in (first, second)] == ["a", "d"]
        assert compaction.type == "compaction"
        assert unsealed(compaction.encrypted_content) == SUMMARY
        [request] = served.engine.submitted.values()
        usage = answer.usage
        assert usage.input_tokens == len(request.prompt_token_ids)
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


async def test_a_summary_stands_for_what_was_before(served: Served) -> None:
    says(served, SUMMARY)
    kept = [each.to_dict(warnings=False) for each in (await compacted(served)).output]
    more = {"role": "user", "content": "e"}
    shown = "<user>a\n<user>d\n<user>What was said and done so far was removed. Its summary:\n\n"
    shown += f"{SUMMARY}\n"
    for items, num in (([*kept, more], 0), ([*CONVERSATION, kept[-1], more], 3)):
        first = await served.client.responses.create(model="tiny", input=items)
        assert served.prompt_of() == f"{shown}<user>e\n<assistant>"
        second = await served.client.responses.create(
            model="tiny", input="f", previous_response_id=first.id
        )
        assert served.prompt_of() == f"{shown}<user>e\n<assistant>{SUMMARY}\n<user>f\n<assistant>"
        dropped = second.model_dump()["penstock"]["cache"]["dropped"]
        assert dropped == ({"compaction": num} if num else {})
        listed = await served.client.responses.input_items.list(first.id, order="asc")
        assert "compaction" in [item.type for item in listed.data]
    again = await compacted(served, input=None, previous_response_id=first.id)
    texts = [each.content[0].text for each in again.output[:-1]]
    assert texts == ["a", "d", "e"]
    assert [each.type for each in again.output].count("compaction") == 1


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_trigger_makes_a_response_the_summary(serve: Serve, is_stored: bool) -> None:
    """As Codex asks for it."""
    async with serve(**PARSERS) as served:
        says(served, f"<think>\nHm.\n</think>\n\n{SUMMARY}")
        asked = {"model": "tiny", "store": is_stored}
        asked["input"] = [*CONVERSATION, {"type": "compaction_trigger"}]
        whole = await served.client.responses.create(**asked)
        assert served.prompt_of().endswith(f"<user>d\n<user>{INSTRUCTION}\n<assistant>")
        thought, compaction = whole.output
        assert (thought.type, compaction.type) == ("reasoning", "compaction")
        assert unsealed(compaction.encrypted_content) == SUMMARY
        body = asked | {"stream": True}
        raw = (await served.http.post("/v1/responses", json=body)).text
        told = [json.loads(block.partition("data: ")[2]) for block in raw.split("\n\n")[:-1]]
        events = [EVENTS.validate_python(event) for event in told]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events if getattr(event, "output_index", 0) == 1]
        assert kinds[0] == "response.output_item.added"
        assert set(kinds[1:-1]) == {"response.compaction.compacting"}
        assert kinds[-1] == "response.output_item.done"
        assert "weather; it" not in raw
        assert told[-1]["response"]["output"][1]["type"] == "compaction"
        if is_stored:
            says(served, "Yes.")
            await served.client.responses.create(
                model="tiny", input="e", previous_response_id=whole.id
            )
            assert served.prompt_of().endswith(f"{SUMMARY}\n<user>e\n<assistant>")
            after = await served.http.get(
                f"/v1/responses/{told[-1]['response']['id']}?stream=true&starting_after=3"
            )
            assert raw.endswith(after.text)


async def test_a_trigger_without_thoughts(served: Served) -> None:
    says(served, SUMMARY)
    asked = [*CONVERSATION, {"type": "compaction_trigger"}]
    body = {"model": "tiny", "input": asked, "stream": True}
    raw = (await served.http.post("/v1/responses", json=body)).text
    told = [json.loads(block.partition("data: ")[2]) for block in raw.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    [compaction] = told[-1]["response"]["output"]
    assert unsealed(compaction["encrypted_content"]) == SUMMARY


async def test_images_of_users_are_kept(serve: Serve, vision_path: Path) -> None:
    async with serve(model=ModelConfig(model=str(vision_path))) as served:
        image = {"type": "input_image", "image_url": data_url(file_of(small())), "detail": "auto"}
        says(served, SUMMARY)
        answer = await compacted(served, input=[{"role": "user", "content": [image]}])
        kept = [each.to_dict(warnings=False) for each in answer.output]
        assert kept[0]["content"][0]["image_url"] == image["image_url"]
        await served.client.responses.create(model="tiny", input=kept)
        assert len(list(served.engine.submitted.values())[-1].images) == 1


async def test_what_is_too_long_loses_its_oldest_items(serve: Serve) -> None:
    long = [{"role": "user", "content": ANSWER * 5}, {"role": "assistant", "content": "b"}] * 10
    async with serve() as served:
        says(served, SUMMARY)
        answer = await compacted(served, input=[*long, {"role": "user", "content": "d"}])
        [request] = served.engine.submitted.values()
        room = served.engine.info.max_model_len - len(request.prompt_token_ids)
        assert room >= served.engine.info.max_model_len // 8
        assert served.prompt_of().endswith(f"<user>d\n<user>{INSTRUCTION}\n<assistant>")
        assert len(answer.output) == 12


async def test_with_a_key_it_is_computed_once(served: Served) -> None:
    first, again = [await compacted(served, extra_headers=KEY) for _ in range(2)]
    assert (first.id, len(served.engine.submitted)) == (again.id, 1)
    assert first.output[-1].encrypted_content == again.output[-1].encrypted_content


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stream": True}, "stream"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "compaction_trigger"}, *CONVERSATION]}, "input[0]"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "encrypted_content"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, values: dict[str, Any], message: str) -> None:
    body = {"input": CONVERSATION} | values
    answer = await served.http.post("/v1/responses/compact", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_a_model_that_says_nothing(serve: Serve) -> None:
    async with serve(**PARSERS) as served:
        says(served, "<think>\nHm.\n</think>\n\n")
        with pytest.raises(openai.InternalServerError) as failed:
            await compacted(served)
        assert "no summary" in failed.value.message
        says(served, CALL)  # tools may not be called: then a call is text
        assert (await compacted(served)).output


@pytest.mark.parametrize("is_background", [False, True])
async def test_background_options(served: Served, is_background: bool) -> None:
    async def create(window: str) -> Any:
        return await served.client.responses.create(
            model="tiny",
            input="hello",
            background=is_background,
            extra_body={"background_options": {"completion_window": window}},
        )

    assert (await create("soonest")).id
    if is_background:
        assert (await create("8h")).id
    else:
        with pytest.raises(openai.BadRequestError) as refused:
            await create("8h")
        assert refused.value.param == "background_options.completion_window"
