"""The middle between two texts: `suffix` of completions, and llama.cpp's `/infill`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import tokenizers

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer

from ..conftest import ANSWER, Serve, Served

COMPLETIONS, INFILL = "/v1/completions", "/infill"
MARKERS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
FILES = ("<|repo_name|>", "<|file_sep|>")
GAP = {"input_prefix": "def f(", "input_suffix": "):\n  pass"}


def filling_model(model_path: Path, tmp_path: Path, *added: str) -> Path:
    path = tmp_path / "filling"
    shutil.copytree(model_path, path)
    words = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    words.add_special_tokens(list(added))
    words.save(str(path / "tokenizer.json"))
    return path


@contextlib.asynccontextmanager
async def serve_with_its_tokenizer(serve: Serve, path: Path) -> AsyncIterator[Served]:
    async with serve(model=ModelConfig(model=str(path))) as served:
        served.tokenizer = Tokenizer.from_directory(path)
        yield served


@pytest.fixture
async def filling(serve: Serve, model_path: Path, tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway of a model that fills in the middle."""
    path = filling_model(model_path, tmp_path, *MARKERS)
    async with serve_with_its_tokenizer(serve, path) as served:
        yield served


def ids_of(served: Served, *parts: str) -> list[int]:
    """Of texts that are tokenised apart, and of markers."""
    added = served.tokenizer.added_tokens
    ids: list[int] = []
    for part in parts:
        encoded = served.tokenizer.encode(part, add_special_tokens=False)
        ids += [added[part]] if part in added else encoded
    return ids


def last(served: Served) -> Any:
    return list(served.engine.submitted.values())[-1]


async def test_a_suffix_makes_the_prompt_of_a_gap(filling: Served) -> None:
    body = {"prompt": ["def f(", "x"], "suffix": "):", "max_tokens": 100}
    answer = (await filling.http.post(COMPLETIONS, json=body)).json()
    assert [each["text"] for each in answer["choices"]] == [ANSWER] * 2
    prefix, suffix, middle, _ = MARKERS
    first, second = filling.engine.submitted.values()
    assert list(first.prompt_token_ids) == ids_of(filling, prefix, "def f(", suffix, "):", middle)
    assert list(second.prompt_token_ids) == ids_of(filling, prefix, "x", suffix, "):", middle)
    assert set(first.sampling_params.stop_token_ids) == {*ids_of(filling, *MARKERS)}
    # Of token ids, and beside the caller's own ends.
    body = {"prompt": [5, 6], "suffix": "):", "stop_token_ids": [9], "max_tokens": 2}
    await filling.http.post(COMPLETIONS, json=body)
    around = ids_of(filling, suffix, "):", middle)
    assert list(last(filling).prompt_token_ids) == [*ids_of(filling, prefix), 5, 6, *around]
    assert set(last(filling).sampling_params.stop_token_ids) == {9, *ids_of(filling, *MARKERS)}
    # Without the end tokens, nothing ends it.
    await filling.http.post(COMPLETIONS, json={**body, "ignore_eos": True})
    assert last(filling).sampling_params.stop_token_ids == (9,)
    # An empty one asks for nothing.
    await filling.http.post(COMPLETIONS, json={"prompt": "ab", "suffix": "", "max_tokens": 2})
    assert list(last(filling).prompt_token_ids) == ids_of(filling, "ab")


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "suffix": 7}, "invalid_type", "suffix"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b", "echo": True}, "invalid_value", "echo"),
        (
            COMPLETIONS,
            {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 1},
            "invalid_value",
            "truncate_prompt_tokens",
        ),
        (COMPLETIONS, {"prompt": "x" * 2000, "suffix": "b"}, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "a", "suffix": "x" * 99_999}, "context_length_exceeded", "suffix"),
        (INFILL, {"input_suffix": "a"}, "missing_required_parameter", "input_prefix"),
        (INFILL, {"input_prefix": "a"}, "missing_required_parameter", "input_suffix"),
        (INFILL, {**GAP, "input_prefix": 7}, "invalid_type", "input_prefix"),
        (INFILL, {**GAP, "input_extra": [{}]}, "missing_required_parameter", "input_extra[0].text"),
        (INFILL, {**GAP, "n_predict": -2}, "invalid_value", "n_predict"),
        (INFILL, {**GAP, "n_predict": 2000, "min_tokens": 2000}, "context_length_exceeded",
         "min_tokens"),
        (COMPLETIONS, {"prompt": "x" * 700, "suffix": "y" * 700}, "context_length_exceeded",
         "prompt"),
        (INFILL, {**GAP, "n": 2}, "invalid_value", "n"),
        (INFILL, {**GAP, "logprobs": 1}, "invalid_value", "logprobs"),
        (INFILL, {**GAP, "suffix": "x"}, "invalid_value", "suffix"),
        (INFILL, {**GAP, "mood": 1}, "unknown_parameter", "mood"),
    ],
)  # fmt: skip
async def test_what_cannot_be_filled_is_refused_by_name(
    filling: Served, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    response = await filling.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert not filling.engine.submitted


async def test_a_model_without_the_tokens_says_so(served: Served) -> None:
    for path, body, param in (
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (INFILL, GAP, "input_suffix"),
    ):
        error = (await served.http.post(path, json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", param)
        assert "<|fim_prefix|>" in error["message"]


async def test_infill_as_editors_ask_it(filling: Served) -> None:
    body = {
        **GAP,
        "prompt": "a, ",
        "n_predict": 100,
        "top_k": 40,
        "temperature": 0.0,
        "samplers": ["top_k", "infill"],
        "cache_prompt": True,
        "t_max_predict_ms": 500,
    }
    answer = (await filling.http.post(INFILL, json=body)).json()
    prefix, suffix, middle, _ = MARKERS
    parts = (prefix, "def f(", "a, ", suffix, "):\n  pass", middle)
    assert list(last(filling).prompt_token_ids) == ids_of(filling, *parts)
    assert last(filling).sampling_params.top_k == 40
    num_predicted = len(filling.engine.script) + 1
    timings = answer.pop("timings")
    assert timings["predicted_n"] == num_predicted
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]
    assert answer == {
        "index": 0,
        "content": ANSWER,
        "tokens": [],
        "stop": True,
        "model": "tiny",
        "tokens_predicted": num_predicted,
        "tokens_evaluated": len(ids_of(filling, *parts)),
        "tokens_cached": 2,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "penstock": ANY,
    }
    fields = ["content", "timings/predicted_n", "truncated", "no/such"]
    answer = (await filling.http.post(INFILL, json={**body, "response_fields": fields})).json()
    assert answer == {
        "content": ANSWER,
        "timings/predicted_n": num_predicted,
        "truncated": False,
    }


@pytest.mark.parametrize(
    ("more", "stop_type"), [({"n_predict": 3}, "limit"), ({"stop": ["fake"]}, "word")]
)
async def test_why_it_ended(filling: Served, more: dict[str, Any], stop_type: str) -> None:
    answer = (await filling.http.post(INFILL, json={**GAP, **more})).json()
    assert answer["stop_type"] == stop_type


async def test_n_predict_0_only_computes_the_prompt(filling: Served) -> None:
    """As editors do ahead of the cursor."""
    answer = await filling.http.post(INFILL, json={**GAP, "n_predict": 0})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["content"], answer.json()["tokens_predicted"]) == ("", 0)
    assert last(filling).sampling_params.max_tokens == 0


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
async def test_minus_1_is_no_limit(filling: Served, name: str) -> None:
    answer = await filling.http.post(INFILL, json={**GAP, name: -1})
    assert answer.status_code == 200, answer.text
    limited = last(filling).sampling_params.max_tokens
    await filling.http.post(INFILL, json=GAP)
    assert limited == last(filling).sampling_params.max_tokens > 0


async def test_it_streams(filling: Served) -> None:
    response = await filling.http.post(INFILL, json={**GAP, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")[:-1]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert "".join(event["content"] for event in events) == ANSWER
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos"


def around(token_ids: Sequence[int], served: Served) -> tuple[int, int]:
    """How many tokens are before and after the gap."""
    prefix, suffix, middle = ids_of(served, *MARKERS[:3])
    ids = list(token_ids)
    begin, between, end = ids.index(prefix), ids.index(suffix), ids.index(middle)
    return between - begin - 1, end - between - 1


async def test_long_texts_are_cut_to_the_context(filling: Served) -> None:
    body = {"input_prefix": "x" * 5000, "input_suffix": "y" * 5000, "n_predict": 24}
    answer = (await filling.http.post(INFILL, json=body)).json()
    assert answer["truncated"] is True
    request = last(filling)
    assert len(request.prompt_token_ids) == 1024 - 24
    num_before, num_after = around(request.prompt_token_ids, filling)
    assert (num_before, num_after) == (748, 249)  # three quarters, and one
    await filling.http.post(INFILL, json={**body, "input_prefix": "x"})
    assert around(last(filling).prompt_token_ids, filling) == (1, 996)
    await filling.http.post(INFILL, json={**body, "input_suffix": "y"})
    assert around(last(filling).prompt_token_ids, filling) == (996, 1)


@pytest.mark.parametrize("added", [(), FILES], ids=["text", "tokens"])
async def test_other_files_come_first(
    serve: Serve, model_path: Path, tmp_path: Path, added: tuple[str, ...]
) -> None:
    path = filling_model(model_path, tmp_path, *MARKERS, *added)
    async with serve_with_its_tokenizer(serve, path) as served:
        extra = [{"text": "one", "filename": "a.py"}, {"text": "two"}]
        await served.http.post(INFILL, json={**GAP, "input_extra": extra, "n_predict": 4})
        prefix, suffix, middle, _ = MARKERS
        gap = (prefix, "def f(", suffix, "):\n  pass", middle)
        snippet = "\n\n--- snippet ---\n\n"
        files = (snippet, "one", snippet, "two")
        if added:
            files = (
                FILES[0], "myproject\n", FILES[1], "a.py\n", "one", FILES[1], "tmp\n", "two",
                FILES[1], "filename\n",
            )  # fmt: skip
        wanted = ids_of(served, *files, *gap)
        assert list(last(served).prompt_token_ids) == wanted
        # They have the room that is left: their end is next to the gap.
        extra = [{"text": "z" * 3000}]
        await served.http.post(INFILL, json={**GAP, "input_extra": extra, "n_predict": 24})
        found = list(last(served).prompt_token_ids)
        assert len(found) == 1000
        assert found[-len(ids_of(served, *gap)) :] == ids_of(served, *gap)
