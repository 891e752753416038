"""The stock `openai` client for Python: every call that applies, every object as its types say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from transformers import AutoModel

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text import Tokenizer

from .processes import END_S, ENDLESS_TOKENS, Served

MODEL = "demo"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
QUESTION: list[Any] = [{"role": "user", "content": "What is paged attention?"}]
ENDLESS: dict[str, Any] = {"max_output_tokens": ENDLESS_TOKENS, "extra_body": {"ignore_eos": True}}
PATIENT: Any = {"open_timeout": END_S}
ENDS = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture
def client(demo_server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_server.base_url}/v1", api_key="none") as made:
        yield made


def strict(kind: type[BaseModel], raw: Any) -> Any:
    """The object of a raw answer, if it is one by the letter."""
    kind.model_validate_json(raw.text, strict=True)
    return raw.parse()


def payloads(stream: Any) -> list[str]:
    """What each event of a raw stream says."""
    lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data")]
    return lines[:-1] if lines[-1] == "[DONE]" else lines


def finished(client: OpenAI, response_id: str) -> Response:
    """A background response, once it is over."""
    deadline_s = time.monotonic() + END_S
    while True:
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        assert time.monotonic() < deadline_s, "it never ended"
        time.sleep(0.05)


# -- embeddings --------------------------------------------------------------------------------


def test_embeddings_are_those_of_transformers(client: OpenAI) -> None:
    """The demo model's, by its last token, normalised: as the stock client gets them."""
    texts = ["Hello", "What is paged attention? " * 30, "x"]
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=texts)
    answer = raw.parse()  # it asked for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    CreateEmbeddingResponse.model_validate_json(plain.model_dump_json(), strict=True)
    model = AutoModel.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_directory(DEMO_MODEL_PATH)
    ids = [tokenizer.encode(text) for text in texts]
    by_ids = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for number, token_ids in enumerate(ids):
        with torch.inference_mode():
            hidden = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
        vector = torch.tensor(answer.data[number].embedding)
        assert torch.nn.functional.cosine_similarity(vector, hidden, dim=0) > 0.9999
        assert vector.norm() == pytest.approx(1.0, abs=1e-5)
        assert plain.data[number].embedding == pytest.approx(vector.tolist(), abs=1e-9)
        assert by_ids.data[number].embedding == plain.data[number].embedding
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert torch.tensor(short.data[0].embedding).norm() == pytest.approx(1.0, abs=1e-5)


def test_what_cannot_be_embedded_is_named(client: OpenAI) -> None:
    for asked, code, param in (
        ({"input": ["a", "x " * 40_000]}, "context_length_exceeded", "input[1]"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": "a", "dimensions": 100_000}, "invalid_value", "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, **asked)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == (code, param)


# -- chat completions and completions ----------------------------------------------------------


def test_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, temperature=0
    )
    answer = strict(ChatCompletion, raw)
    assert len(answer.choices[0].message.content) > 20
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streams_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = [
            ChatCompletionChunk.model_validate_json(payload, strict=True)
            for payload in payloads(stream)
        ]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5, "it streams"
    assert chunks[-1].usage == whole.usage


def test_chat_with_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, temperature=0)
    assert parsed.choices[0].message.content == final.choices[0].message.content


def test_chat_with_choices_and_logprobs(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=QUESTION,
        n=3,
        seed=7,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    answer = strict(ChatCompletion, raw)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.finish_reason in ("length", "stop")
        assert 4 <= len(choice.logprobs.content) <= 5
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_message_is_continued(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content or ""
    begun = text[: text.index(" ", len(text) // 2)]
    rest = client.chat.completions.create(
        model=MODEL,
        messages=[*QUESTION, {"role": "assistant", "content": begun}],
        temperature=0,
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    )
    assert begun + (rest.choices[0].message.content or "") == text


def test_completions(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=["Hello", "Good"], max_tokens=4, n=2, echo=True
    )
    answer = strict(Completion, raw)
    starts = [choice.text[:4] for choice in answer.choices]
    assert starts == ["Hell", "Hell", "Good", "Good"]
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="Hello", max_tokens=4, logprobs=2
    )
    assert len(strict(Completion, raw).choices[0].logprobs.tokens) == 4
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=4, stream=True
    ) as stream:
        # A chunk before the last says no reason, which the type, made for whole ones, has not.
        Completion.model_validate_json(payloads(stream)[-1], strict=True)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", suffix="b")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "suffix")


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert strict(Model, client.models.with_raw_response.retrieve(MODEL)).id == MODEL


# -- responses ---------------------------------------------------------------------------------


def test_a_response_and_what_it_was_made_from(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL,
        input="Hi, my name is Quillon.",
        instructions="Be kind.",
        temperature=0,
        metadata={"k": "v"},
        include=["message.output_text.logprobs"],
    )
    first = strict(Response, raw)
    assert (first.status, first.metadata, first.instructions) == (
        "completed",
        {"k": "v"},
        "Be kind.",
    )
    assert strict(Response, client.responses.with_raw_response.retrieve(first.id)) == first
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert "Quillon" in second.output_text
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    items = strict(ResponseItemList, client.responses.input_items.with_raw_response.list(second.id))
    texts = [item.content[0].text for item in items]
    assert texts == ["What is my name?", first.output_text, "Hi, my name is Quillon."]
    page = client.responses.input_items.list(second.id, limit=1, order="asc")
    assert [item.content[0].text for item in page] == texts[::-1]  # over three pages
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_the_events_of_a_response(client: OpenAI) -> None:
    with client.responses.with_streaming_response.create(
        model=MODEL, input="Count to 5.", temperature=0, stream=True
    ) as stream:
        events = [EVENT.validate_json(payload, strict=True) for payload in payloads(stream)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if event.type in ENDS] == [events[-1].type]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    again = list(client.responses.retrieve(events[-1].response.id, stream=True, starting_after=3))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events[4:]]


def test_the_stream_helper(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Count to 5.", temperature=0) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    assert final.status == "completed"
    assert "5" in final.output_text
    with client.responses.stream(response_id=final.id, starting_after=5) as stream:
        numbers = [event.sequence_number for event in stream]
        assert stream.get_final_response().output_text == final.output_text
    assert numbers == [event.sequence_number for event in seen if event.sequence_number > 5]


def test_a_response_in_the_background(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="Count to 5.", temperature=0, background=True
    )
    begun = strict(Response, raw)
    assert begun.status in ("queued", "in_progress", "completed")
    assert begun.background is True
    done = finished(client, begun.id)
    assert done.status == "completed"
    assert "5" in done.output_text


def test_a_background_stream_is_left_and_followed_again(client: OpenAI) -> None:
    stream = client.responses.create(
        model=MODEL, input="Count to 5.", temperature=0, background=True, stream=True
    )
    head = [event for event, _ in zip(stream, range(7), strict=False)]
    stream.close()
    response_id = next(e.response.id for e in head if e.type == "response.created")
    rest = list(
        client.responses.retrieve(response_id, stream=True, starting_after=head[-1].sequence_number)
    )
    events = [*head, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text


def test_a_response_is_cancelled(client: OpenAI) -> None:
    begun = client.responses.create(model=MODEL, input="Go on.", background=True, **ENDLESS)
    raw = client.responses.with_raw_response.cancel(begun.id)
    assert strict(Response, raw).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"


def test_a_broken_off_response_is_continued(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    whole = client.responses.create(input="What is paged attention?", **asked)
    part = client.responses.create(input="What is paged attention?", max_output_tokens=5, **asked)
    assert part.status == "incomplete"
    rest = client.responses.create(
        previous_response_id=part.id, extra_body={"penstock": {"continue": True}}, **asked
    )
    assert part.output_text + rest.output_text == whole.output_text


# The client's own way with a newer `websockets`.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")
def test_responses_over_the_websocket(client: OpenAI) -> None:
    with client.responses.connect(websocket_connection_options=PATIENT) as connection:
        connection.response.create(model=MODEL, input="Count to 5.", temperature=0)
        events = []
        for event in connection:
            events.append(event)
            if event.type in ENDS:
                break
    assert events[-1].type == "response.completed"
    assert "5" in events[-1].response.output_text


# -- conversations -----------------------------------------------------------------------------


def test_a_conversation(client: OpenAI) -> None:
    conversations = client.conversations
    hello: list[Any] = [
        {"type": "message", "role": "user", "content": "Hi, my name is Velora."},
        {"type": "message", "role": "assistant", "content": "Nice to meet you, Velora!"},
    ]
    raw = conversations.with_raw_response.create(items=hello, metadata={"title": "names"})
    made = strict(Conversation, raw)
    response = client.responses.create(
        model=MODEL, input="What is my name?", conversation=made.id, temperature=0
    )
    assert "Velora" in response.output_text
    assert response.conversation is not None
    assert response.conversation.id == made.id
    client.responses.create(model=MODEL, input="Thanks.", conversation={"id": made.id})
    items = strict(ConversationItemList, conversations.items.with_raw_response.list(made.id))
    assert [item.role for item in items] == ["assistant", "user"] * 3
    added = conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "Bye."}]
    )
    item_id = added.data[0].id
    assert conversations.items.retrieve(item_id, conversation_id=made.id).id == item_id
    conversations.items.delete(item_id, conversation_id=made.id)
    page = conversations.items.list(made.id, limit=2, order="asc")
    assert len(list(page)) == 6  # over three pages
    assert conversations.retrieve(made.id).metadata == {"title": "names"}
    assert conversations.update(made.id, metadata={"k": "v"}).metadata == {"k": "v"}
    assert conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        conversations.retrieve(made.id)


def test_the_loser_of_a_race_for_the_head_is_told_once(client: OpenAI) -> None:
    made = client.conversations.create()
    running = client.responses.create(
        model=MODEL, input="Go on.", conversation=made.id, background=True, **ENDLESS
    )
    with pytest.raises(openai.ConflictError) as lost:
        client.responses.create(model=MODEL, input="Me too.", conversation=made.id)
    assert lost.value.code == "conversation_locked"
    assert lost.value.response.headers["x-should-retry"] == "false"
    assert lost.value.request.headers["x-stainless-retry-count"] == "0"
    client.responses.cancel(running.id)


# -- errors ------------------------------------------------------------------------------------


def test_errors_are_typed(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            web_search_options={"search_context_size": "low"},
        )
    told = (refused.value.code, refused.value.param)
    assert told == ("unsupported_parameter", "web_search_options")
    with pytest.raises(openai.BadRequestError) as both:
        client.responses.create(
            model=MODEL, input="a", conversation="conv_1", previous_response_id="resp_1"
        )
    assert both.value.code == "mutually_exclusive_parameters"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert unknown.value.code == "previous_response_not_found"
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call("resp_1")
