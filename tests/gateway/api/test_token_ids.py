"""Token ids in and out: `/tokenize`, `/detokenize`, and the parameters that tell or cut them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..conftest import ANSWER, TEMPLATE, Serve, Served
from .bad_requests import CHAT, COMPLETIONS, USER

EOS = 0


def chunks_of(text: str) -> list[dict[str, Any]]:
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n")[:-2]]
    return [json.loads(block) for block in blocks]


async def test_the_tokenizers_configuration(served: Served) -> None:
    info = (await served.http.get("/tokenizer_info")).json()
    assert info == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}


async def test_tokenize_and_back(served: Served) -> None:
    text = "wörld! 😀<|end|>"
    answer = (await served.http.post("/tokenize", json={"model": "tiny", "prompt": text})).json()
    assert answer["tokens"] == served.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert answer["token_strs"] is None
    back = await served.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    named = await served.http.post("/tokenize", json={"prompt": "wö", "return_token_strs": True})
    assert "".join(named.json()["token_strs"]) == "wÃ¶"  # as the vocabulary writes bytes


async def test_a_long_text(served: Served) -> None:
    body = {"prompt": "wörld! " * 20_000, "return_token_strs": True}
    answer = (await served.http.post("/tokenize", json=body)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 20_000
    back = await served.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json()["prompt"] == body["prompt"]


async def test_tokenize_a_conversation(served: Served) -> None:
    async def prompt_of(**more: Any) -> str:
        body = {"messages": [*USER, {"role": "assistant", "content": "well "}], **more}
        answer = (await served.http.post("/tokenize", json=body)).json()
        return served.tokenizer.decode(answer["tokens"])

    assert await prompt_of() == "<user>hello\n<assistant>well \n<assistant>"
    cut = {"add_generation_prompt": False, "continue_final_message": True}
    assert await prompt_of(**cut) == "<user>hello\n<assistant>well "


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {}, 400, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "invalid_type", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400, "unknown_parameter", "prompt"),
        ("/tokenize", {"messages": []}, 400, "invalid_value", "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        (
            "/tokenize",
            {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "invalid_value",
            "continue_final_message",
        ),
        (
            "/tokenize",
            {"messages": USER, "chat_template": "x"},
            400,
            "unsupported_parameter",
            "chat_template",
        ),
        ("/detokenize", {}, 400, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": [1, 399]}, 400, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, 400, "invalid_type", "tokens[0]"),
    ],
)
async def test_bad_requests(
    served: Served, path: str, body: Any, status: int, code: str, param: str
) -> None:
    response = await served.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)


async def test_they_need_the_key(serve: Serve) -> None:
    async with serve(api_keys=("secret",)) as served:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await served.http.post(path, json=body)).status_code == 200
            wrong = {"Authorization": "Bearer x"}
            response = await served.http.post(path, json=body, headers=wrong)
            assert response.status_code == 401


async def test_a_message_is_continued(served: Served) -> None:
    messages = [*USER, {"role": "assistant", "content": "I say: "}]
    body = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    answer = (await served.http.post(CHAT, json=body)).json()
    assert served.prompt_of() == "<user>hello\n<assistant>I say: "
    assert answer["choices"][0]["message"]["content"] == ANSWER


async def test_a_continued_message_needs_no_second_parameter(served: Served) -> None:
    body = {
        "messages": [*USER, {"role": "assistant", "content": "I say: "}],
        "continue_final_message": True,
    }
    assert (await served.http.post(CHAT, json=body)).status_code == 200
    assert served.prompt_of() == "<user>hello\n<assistant>I say: "
    answer = (await served.http.post("/tokenize", json=body)).json()
    assert served.tokenizer.decode(answer["tokens"]) == served.prompt_of()


async def test_a_prompt_is_cut_from_the_right(served: Served) -> None:
    side = {"truncation_side": "right"}
    await served.http.post(CHAT, json={"messages": USER, "truncate_prompt_tokens": 4, **side})
    whole = served.tokenizer.encode("<user>hello\n<assistant>")
    await served.http.post(
        COMPLETIONS, json={"prompt": [1, 2, 3], "truncate_prompt_tokens": 2, **side}
    )
    prompts = [list(each.prompt_token_ids) for each in served.engine.submitted.values()]
    assert prompts == [whole[:4], [1, 2]]
    answer = await served.http.post(CHAT, json={"messages": USER, "truncation_side": "top"})
    assert answer.json()["error"]["param"] == "truncation_side"


async def test_a_prompt_is_cut_from_the_left(served: Served) -> None:
    body = {"messages": USER, "truncate_prompt_tokens": 4}
    await served.http.post(CHAT, json=body)
    whole = served.tokenizer.encode("<user>hello\n<assistant>")
    [request] = served.engine.submitted.values()
    assert list(request.prompt_token_ids) == whole[-4:]
    body = {"prompt": [[7], [1, 2, 3]], "truncate_prompt_tokens": 2, "max_tokens": 1}
    usage = (await served.http.post(COMPLETIONS, json=body)).json()["usage"]
    assert usage["prompt_tokens"] == 1 + 2


async def test_token_ids_of_a_whole_answer(served: Served) -> None:
    served.engine.scripts = {1: [5, 6]}
    body = {"messages": USER, "n": 2, "return_token_ids": True}
    answer = (await served.http.post(CHAT, json=body)).json()
    assert answer["prompt_token_ids"] == served.tokenizer.encode("<user>hello\n<assistant>")
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert ids == [[*served.engine.script, EOS], [5, 6, EOS]]
    body = {"prompt": [[1, 2], [3]], "max_tokens": 2, "return_token_ids": True}
    choices = (await served.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2], [3]]
    assert [choice["token_ids"] for choice in choices] == [served.engine.script[:2]] * 2


async def test_token_ids_of_the_best_branch(served: Served) -> None:
    served.engine.scripts = {1: [5, 6]}
    served.engine.mean_logprobs = {1: -0.1}
    body = {"prompt": "a", "best_of": 2, "max_tokens": 3, "return_token_ids": True}
    [choice] = (await served.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["token_ids"] == [5, 6, EOS]


@pytest.mark.parametrize("asked", [{"messages": USER}, {"prompt": ["a", "b"]}])
async def test_token_ids_of_a_stream(served: Served, asked: dict[str, Any]) -> None:
    path = CHAT if "messages" in asked else COMPLETIONS
    body = {**asked, "stream": True, "n": 2, "max_tokens": 100, "return_token_ids": True}
    chunks = chunks_of((await served.http.post(path, json=body)).text)
    ids: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    num_choices = 2 if path == CHAT else 4
    assert ids == {key: [*served.engine.script, EOS] for key in range(num_choices)}
    if path == CHAT:
        told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert told == [served.tokenizer.encode("<user>hello\n<assistant>")]
    else:
        told = [c for chunk in chunks for c in chunk["choices"] if "prompt_token_ids" in c]
        prompts = {choice["index"]: choice["prompt_token_ids"] for choice in told}
        a, b = served.tokenizer.encode("a"), served.tokenizer.encode("b")
        assert prompts == {0: a, 1: a, 2: b, 3: b}
        assert len(told) == 4


@pytest.mark.parametrize("script", [ANSWER, "x", ""])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_keyed", [False, True])
async def test_ids_logprobs_and_usage_agree(
    served: Served, script: str, path: str, is_keyed: bool
) -> None:
    """The token that ends the output counts, and has an id; so it has logprobs, too."""
    served.engine.script = served.tokenizer.encode(script)
    ids = [*served.engine.script, EOS]
    asked: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "a"}
    body = {**asked, "logprobs": path == CHAT or 1, "return_token_ids": True, "max_tokens": 100}
    body["return_tokens_as_token_ids"] = True
    headers = {"Idempotency-Key": "whole"} if is_keyed else {}
    answer = (await served.http.post(path, json=body, headers=headers)).json()
    [choice] = answer["choices"]
    assert choice["token_ids"] == _told(choice, path) == ids
    assert answer["usage"]["completion_tokens"] == len(ids)
    headers = {"Idempotency-Key": "streamed"} if is_keyed else {}
    text = (await served.http.post(path, json={**body, "stream": True}, headers=headers)).text
    choices = [choice for chunk in chunks_of(text) for choice in chunk["choices"]]
    for each in choices:  # the ids of a chunk are those of its logprobs
        assert each.get("token_ids", []) == _told(each, path)
    assert [token_id for each in choices for token_id in each.get("token_ids", ())] == ids


def _told(choice: dict[str, Any], path: str) -> list[int]:
    logprobs = choice["logprobs"] or {"content": [], "tokens": []}
    names = logprobs["tokens"] if path == COMPLETIONS else [t["token"] for t in logprobs["content"]]
    return [int(name.removeprefix("token_id:")) for name in names]


async def test_without_ids_the_end_has_no_logprobs(served: Served) -> None:
    """As at OpenAI."""
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 100}
    [choice] = (await served.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(served.engine.script)


async def test_logprobs_by_token_id(served: Served) -> None:
    names = [f"token_id:{token_id}" for token_id in served.engine.script]
    more = {"return_tokens_as_token_ids": True}
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, **more}
    choice = (await served.http.post(CHAT, json=body)).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert [token["token"] for token in tokens] == names
    assert tokens[0]["top_logprobs"][1]["token"] == "token_id:7"
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == ANSWER
    body = {"prompt": [1, 2], "logprobs": 2, "echo": True, "max_tokens": 2, **more}
    choice = (await served.http.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2", *names[:2]]
    assert list(choice["logprobs"]["top_logprobs"][2]) == [names[0], "token_id:7"]
