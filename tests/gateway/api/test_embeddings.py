"""Embeddings, rankings, scores and labels: forms of requests and answers, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.protocol.messages import EngineStats
from penstock.engine.request import NO_OUTPUT

from ..conftest import Serve, Served, until
from ..fake_engine import VECTOR
from ..generation.images.test_images import data_url, file_of, small
from .bad_requests import CHAT, COMPLETIONS, RESPONSES, USER

EMBEDDINGS = "/v1/embeddings"
RANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
RANKED = {"query": "q", "documents": ["a", {"text": "b"}]}
TEXTS = {"query": "q", "texts": ["a", "b"]}
LONG = [{"role": "user", "content": "x" * 1025}]
PICTURE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(b"x")}}]}
]
SCORED = {"text_1": "q", "text_2": ["a", "b"]}


def other_model(model_path: Path, tmp_path: Path, architecture: str, **fields: Any) -> Path:
    """The directory of a model of this architecture."""
    path = tmp_path / "other"
    shutil.copytree(model_path, path)
    config = {"architectures": [architecture], "hidden_size": 2, "num_labels": 1, **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("given", ["hello", [5, 6, 7], ["hello", "w"], [[5, 6], [7]]])
async def test_forms_of_input(served: Served, given: Any) -> None:
    body = {"input": given, "model": "tiny", "user": "me", "encoding_format": "base64"}
    answer = (await served.http.post(EMBEDDINGS, json=body)).json()
    requests = list(served.engine.submitted.values())
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    encode = served.tokenizer.encode
    assert [list(each.prompt_token_ids) for each in requests] == [
        encode(each) if isinstance(each, str) else each for each in several
    ]
    assert all(each.sampling_params == NO_OUTPUT for each in requests)
    assert [each["index"] for each in answer["data"]] == list(range(len(several)))
    assert {each["embedding"] for each in answer["data"]} == {base64.b64encode(VECTOR).decode()}
    num_tokens = sum(len(each.prompt_token_ids) for each in requests)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_texts_are_cut_off_if_asked(served: Served) -> None:
    text = "hello " * 2000
    cut: dict[str, Any] = {"input": text, "truncate_prompt_tokens": 5, "truncation_side": "right"}
    await served.http.post(EMBEDDINGS, json=cut)
    refusal = await served.http.post(EMBEDDINGS, json={**cut, "truncation_side": "left"})
    assert refusal.json()["error"]["param"] == "truncation_side"
    await served.http.post(EMBEDDINGS, json={"input": text, "truncate_prompt_tokens": -1})
    ids = served.tokenizer.encode(text)
    found = [list(each.prompt_token_ids) for each in served.engine.submitted.values()]
    assert found == [ids[:5], ids[:1024]]


async def test_a_conversation_is_embedded_as_its_template_writes_it(served: Served) -> None:
    body = {"messages": [*USER, {"role": "assistant", "content": "yes"}]}
    answer = (await served.http.post(EMBEDDINGS, json=body)).json()
    assert served.prompt_of() == "<user>hello\n<assistant>yes\n"
    [vector] = answer["data"]
    assert vector["embedding"] == pytest.approx([0.6, -0.8])
    [request] = served.engine.submitted.values()
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    await served.http.post(EMBEDDINGS, json={**body, "add_generation_prompt": True})
    assert served.prompt_of() == "<user>hello\n<assistant>yes\n<assistant>"
    await served.http.post(EMBEDDINGS, json={"messages": LONG, "truncate_prompt_tokens": 3})
    assert len(list(served.engine.submitted.values())[-1].prompt_token_ids) == 3


async def test_so_is_one_with_a_picture(serve: Serve, vision_path: Path) -> None:
    async with serve(model=ModelConfig(model=str(vision_path))) as served:
        picture = {"type": "image_url", "image_url": {"url": data_url(file_of(small()))}}
        said = [{"role": "user", "content": [picture, {"type": "text", "text": "this"}]}]
        answer = await served.http.post(EMBEDDINGS, json={"messages": said})
        assert answer.status_code == 200, answer.text
        [request] = served.engine.submitted.values()
        [image] = request.images
        assert request.pooling is not None
        place = request.prompt_token_ids[image.offset : image.offset + image.num_tokens]
        assert len(set(place)) == 1
        cut = {"messages": said, "truncate_prompt_tokens": 3}
        error = (await served.http.post(EMBEDDINGS, json=cut)).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"


BAD_REQUESTS: list[tuple[str, dict[str, Any], int, str, str]] = [
    (EMBEDDINGS, {}, 400, "missing_required_parameter", "input"),
    (EMBEDDINGS, {"input": None}, 400, "missing_required_parameter", "input"),
    (EMBEDDINGS, {"input": ["a", ""]}, 400, "invalid_value", "input[1]"),
    (EMBEDDINGS, {"input": ["a", 1]}, 400, "invalid_type", "input[1]"),
    (EMBEDDINGS, {"input": []}, 400, "invalid_value", "input"),
    (EMBEDDINGS, {"input": [[5], []]}, 400, "invalid_value", "input[1]"),
    (EMBEDDINGS, {"input": [[5], [400]]}, 400, "invalid_value", "input[1]"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, 400, "invalid_value", "input"),
    (EMBEDDINGS, {"input": [5] * 1025}, 400, "context_length_exceeded", "input"),
    (EMBEDDINGS, {"input": ["a", "x" * 1025]}, 400, "context_length_exceeded", "input[1]"),
    (EMBEDDINGS, {"input": "a", "dimensions": 3}, 400, "invalid_value", "dimensions"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, 400, "invalid_value", "dimensions"),
    (
        EMBEDDINGS,
        {"input": "a", "encoding_format": "hex"},
        400,
        "invalid_value",
        "encoding_format",
    ),
    (EMBEDDINGS, {"input": "a", "temperature": 1}, 400, "unknown_parameter", "temperature"),
    (EMBEDDINGS, {"input": "a", "model": "other"}, 404, "model_not_found", "model"),
    (EMBEDDINGS, {"input": "a", "priority": 1}, 400, "invalid_value", "priority"),
    ("/rerank", {"query": "q"}, 400, "missing_required_parameter", "documents"),
    ("/rerank", RANKED | {"documents": []}, 400, "invalid_value", "documents"),
    ("/rerank", RANKED | {"query": ""}, 400, "invalid_value", "query"),
    ("/rerank", RANKED | {"top_n": -1}, 400, "invalid_value", "top_n"),
    (
        "/rerank",
        RANKED | {"documents": ["a", "x" * 1025]},
        400,
        "context_length_exceeded",
        "documents[1]",
    ),
    ("/rerank", RANKED | {"instruction": "x"}, 400, "invalid_value", "instruction"),
    ("/rerank", RANKED | {"max_tokens_per_doc": 0}, 400, "invalid_value", "max_tokens_per_doc"),
    ("/rerank", RANKED | {"texts": ["a"]}, 400, "unknown_parameter", "documents"),
    ("/rerank", TEXTS | {"raw_scores": True}, 400, "invalid_value", "raw_scores"),
    ("/rerank", TEXTS | {"texts": ["a", ""]}, 400, "invalid_value", "texts[1]"),
    ("/rerank", TEXTS | {"texts": ["x" * 1025]}, 400, "context_length_exceeded", "texts[0]"),
    (EMBEDDINGS, {"messages": []}, 400, "invalid_value", "messages"),
    (EMBEDDINGS, {"messages": USER, "input": "a"}, 400, "unknown_parameter", "input"),
    (EMBEDDINGS, {"messages": USER, "dimensions": 3}, 400, "invalid_value", "dimensions"),
    (EMBEDDINGS, {"messages": LONG}, 400, "context_length_exceeded", "messages"),
    (
        EMBEDDINGS,
        {"messages": PICTURE},
        400,
        "unsupported_parameter",
        "messages[0].content[0].image_url",
    ),
    ("/classify", {"input": "a"}, 400, "invalid_value", "model"),
    ("/score", {"text_1": "q"}, 400, "invalid_value", "text_2"),
    ("/score", SCORED | {"queries": "q"}, 400, "invalid_value", "text_1"),
    ("/score", SCORED | {"text_1": ["a", "b", "c"]}, 400, "invalid_value", "text_1"),
]


async def test_bad_requests_are_refused_by_name(served: Served) -> None:
    wrong = []
    for path, body, status, code, param in BAD_REQUESTS:
        response = await served.http.post(path, json=body)
        error = response.json().get("error", {})
        seen = (response.status_code, error.get("code"), error.get("param"))
        if seen != (status, code, param):
            wrong.append(f"{path} {body!r:.80}: {seen} instead of {(status, code, param)}")
    assert wrong == []
    assert not served.engine.submitted


@pytest.mark.parametrize("path", RANKS)
async def test_documents_are_ranked(served: Served, path: str) -> None:
    body = {**RANKED, "top_n": 1, "model": "tiny"}
    answer = (await served.http.post(path, json=body)).json()
    [best] = answer["results"]
    assert (best["index"], best["document"]) == (0, {"text": "a"})
    assert best["relevance_score"] == pytest.approx(1.0)
    bare = (await served.http.post(path, json={**RANKED, "return_documents": False})).json()
    assert [each.keys() for each in bare["results"]] == [{"index", "relevance_score"}] * 2


async def test_documents_are_cut_off_if_asked(served: Served) -> None:
    documents = ["hello " * 100, "short", {"text": "wörld " * 100}]
    body = {"query": "q " * 20, "documents": documents, "max_tokens_per_doc": 7}
    answer = (await served.http.post("/v2/rerank", json=body)).json()
    encode = served.tokenizer.encode
    found = [list(each.prompt_token_ids) for each in served.engine.submitted.values()]
    assert found == [
        encode("q " * 20), encode("hello " * 100)[:7], encode("short"), encode("wörld " * 100)[:7]
    ]  # fmt: skip
    # What is answered is whole.
    texts = {each["index"]: each["document"]["text"] for each in answer["results"]}
    assert texts == {0: documents[0], 1: documents[1], 2: "wörld " * 100}


@pytest.mark.parametrize("path", RANKS)
async def test_texts_are_ranked_in_the_form_of_their_clients(served: Served, path: str) -> None:
    """Hugging Face's text-embeddings-inference."""
    answer = (await served.http.post(path, json={**TEXTS, "return_text": True})).json()
    assert [each["index"] for each in answer] == [0, 1]
    assert [each["text"] for each in answer] == ["a", "b"]
    assert [each["score"] for each in answer] == pytest.approx([1.0, 1.0])
    bare = {**TEXTS, "raw_scores": False, "return_text": False, "truncate": False}
    assert [each.keys() for each in (await served.http.post(path, json=bare)).json()] == [
        {"index", "score"}
    ] * 2
    long = {**TEXTS, "texts": ["x" * 1025], "truncate": True, "truncation_direction": "Right"}
    assert (await served.http.post(path, json=long)).status_code == 200
    assert len(list(served.engine.submitted.values())[-1].prompt_token_ids) == 1024


async def test_texts_are_classified(serve: Serve, model_path: Path, tmp_path: Path) -> None:
    labels = {"0": "joy", "1": "anger"}
    architecture = "BertForSequenceClassification"
    path = other_model(model_path, tmp_path, architecture, id2label=labels)
    async with serve(model=ModelConfig(model=str(path))) as served:
        bodies: list[dict[str, Any]] = [
            {"input": "hello"},
            {"input": ["hello", "w"], "model": "tiny", "truncate_prompt_tokens": -1},
            {"input": [[5, 6], [7]]},
            {"messages": USER},
        ]
        for body in bodies:
            answer = (await served.http.post("/classify", json=body)).json()
            several = body.get("input", "")
            num = len(several) if isinstance(several, list) else 1
            assert answer["object"] == "list"
            assert answer["data"] == [
                {
                    "index": index,
                    "label": "joy",
                    "probs": pytest.approx([0.6, -0.8]),
                    "num_classes": 2,
                }
                for index in range(num)
            ]
            requests = list(served.engine.submitted.values())[-num:]
            assert all(each.pooling and each.pooling.task == "classify" for each in requests)
            num_tokens = sum(len(each.prompt_token_ids) for each in requests)
            assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        for route, other in ((EMBEDDINGS, {"input": "a"}), ("/rerank", RANKED), ("/score", SCORED)):
            error = (await served.http.post(route, json=other)).json()["error"]
            assert error["param"] == "model"
            assert "classifies texts" in error["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_pairs_are_scored(served: Served, path: str) -> None:
    answer = (await served.http.post(path, json=SCORED)).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0, 1.0])
    same = {"queries": ["q", "r"], "documents": ["a", "b"]}
    answer = (await served.http.post(path, json=same)).json()
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert [served.prompt_of(index) for index in range(-4, 0)] == ["q", "r", "a", "b"]


async def test_a_long_query_is_refused_before_every_document_is_read(
    serve: Serve, model_path: Path, tmp_path: Path
) -> None:
    """Cut off with its document, it would be tokenised two thousand times."""
    path = other_model(model_path, tmp_path, "Qwen3ForSequenceClassification")
    async with serve(model=ModelConfig(model=str(path))) as served:
        body = {"query": "hello " * 20_000, "documents": ["a"] * 2000, "truncate_prompt_tokens": -1}
        answer = await served.http.post("/rerank", json=body)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "query")
        body = {"query": "hello", "documents": ["a" * 2000], "truncate_prompt_tokens": -1}
        assert (await served.http.post("/rerank", json=body)).status_code == 200
        [request] = served.engine.submitted.values()
        assert len(request.prompt_token_ids) == 1024


async def test_they_need_the_key_and_count_as_prompt_tokens(serve: Serve) -> None:
    async with serve(api_keys=("secret",)) as served:
        wrong = {"Authorization": "Bearer x"}
        paths = {EMBEDDINGS: {"input": ["hello", "w"]}, **dict.fromkeys(RANKS, RANKED)}
        for path, body in {**paths, "/score": SCORED, "/v1/score": SCORED}.items():
            refused = await served.http.post(path, json=body, headers=wrong)
            assert refused.status_code == 401
            assert not served.engine.submitted
        answer = (await served.http.post(EMBEDDINGS, json=paths[EMBEDDINGS])).json()
        text = (await served.http.get("/metrics")).text
        num_tokens = answer["usage"]["prompt_tokens"]
        assert f'penstock:prompt_tokens_total{{model_name="tiny"}} {num_tokens}.0' in text
        assert (
            'penstock:request_success_total{finished_reason="stop",model_name="tiny"} 1.0' in text
        )


KEYS = """
[[keys]]
key = "sk-small"
tenant = "small"

[tenants.small]
tokens_per_minute = 50
"""


async def test_a_tenants_limit_counts_all_texts_of_a_request(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    async with serve(api_keys_file=str(file)) as served:
        key = {"Authorization": "Bearer sk-small"}
        body = {"input": [[5] * 10] * 4}
        first = await served.http.post(EMBEDDINGS, json=body, headers=key)
        assert first.status_code == 200
        # 40 tokens, less the one of each text that this engine had cached.
        assert first.headers["x-ratelimit-remaining-tokens"] == "14"
        second = await served.http.post(EMBEDDINGS, json=body, headers=key)
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert len(served.engine.submitted) == 4


async def test_a_full_queue_refuses_and_a_caller_who_leaves_is_not_served(serve: Serve) -> None:
    async with serve(max_queue_tokens=20) as served:
        body = {"input": [[5] * 10] * 4}
        served.engine.stats = EngineStats(num_requests_waiting=1, num_tokens_waiting=15)
        await until(lambda: served.app.state.engine.stats.num_tokens_waiting == 15)
        full = await served.http.post(EMBEDDINGS, json=body)
        assert full.status_code == 503
        assert not served.engine.submitted
    async with serve() as served:
        served.engine.may_speak.clear()
        asking = asyncio.create_task(served.http.post(EMBEDDINGS, json=body))
        await served.submitted(4)
        asking.cancel()
        await served.aborted(4)
        served.engine.may_speak.set()


async def test_an_engine_that_dies_is_waited_for(serve: Serve) -> None:
    async with serve() as served:
        served.engine.dies_in = 2
        task = served.http.post(EMBEDDINGS, json={"input": ["a", "b", "c"]})

        async def revived() -> None:
            await until(lambda: served.engine.num_deaths > 0)
            served.engine.restart()

        answer, _ = await asyncio.gather(task, revived())
        assert len(answer.json()["data"]) == 3


@pytest.mark.parametrize(
    ("architecture", "does"), [("Qwen3Model", "embed"), ("BertForSequenceClassification", "score")]
)
async def test_a_model_does_only_what_it_can(
    serve: Serve, model_path: Path, tmp_path: Path, architecture: str, does: str
) -> None:
    path = other_model(model_path, tmp_path, architecture)
    async with serve(model=ModelConfig(model=str(path))) as served:
        bodies = {
            "generate": {
                CHAT: {"messages": USER},
                COMPLETIONS: {"prompt": "a"},
                RESPONSES: {"input": "a"},
            },
            "embed": {EMBEDDINGS: {"input": "a"}},
        }
        for task, cases in bodies.items():
            for route, body in cases.items():
                response = await served.http.post(route, json=body)
                if task == does:
                    assert response.status_code == 200
                    continue
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "model"), route
        ranked = (await served.http.post("/rerank", json=RANKED)).json()["results"]
        assert math.isclose(
            ranked[0]["relevance_score"], 1.0 if does == "embed" else 0.6, rel_tol=1e-6
        )
