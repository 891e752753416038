"""Texts on which a tokenizer's regular expression gives up, and parameters that allow no token."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import websockets
from tokenizers import Regex, pre_tokenizers

from penstock.engine.config import ModelConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.offline.prompts import tokenise
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from ..conftest import PATIENCE_S, Serve, Served, listen
from ..fake_engine import FakeEngine

HARD = "x" * 40
LONG = "x y " * 20_000 + HARD
REASON = (
    "the model's tokenizer cannot process this text (Onig: Regex search error: "
    "retry-limit-in-match over)"
)
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def hard_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer tries exponentially often on a run of x without a z."""
    path = tmp_path_factory.mktemp("hard") / "model"
    shutil.copytree(model_path, path)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(r"(x+x+)+z|\s+(?!\S)|\s+|\S"), "isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, rest])
    backend.save(str(path / "tokenizer.json"))
    return path


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_a_text_that_the_tokenizer_gives_up_on(
    hard_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    address = f"{tmp_path}/engine.sock"
    config = GatewayConfig(
        engine_address=address, served_model_names=("tiny",),
        model=ModelConfig(model=str(hard_model)),
    )  # fmt: skip
    tokenizer = Tokenizer.from_directory(hard_model)
    script = tokenizer.encode("hello there")
    app = create_app(config)
    async with (
        FakeEngine(address, script, step_s=0.01) as engine,
        listen(app, config) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http,
    ):
        engine.may_speak.clear()
        other = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "hello"}))
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        item = {"type": "message", "role": "user", "content": HARD}
        held = {"items": [item]}  # stored as it is: only a turn is tokenised
        assert (await http.post(f"/v1/conversations/{conversation}/items", json=held)).is_success
        for path, body, param in (
            (CHAT, said(HARD), "messages"),
            (CHAT, said(LONG) | {"truncate_prompt_tokens": 5}, "messages"),
            (CHAT, said(HARD) | {"stream": True}, "messages"),
            (COMPLETIONS, {"prompt": HARD}, "prompt"),
            (COMPLETIONS, {"prompt": ["fine", HARD], "stream": True}, "prompt"),
            (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 5}, "prompt"),
            (RESPONSES, {"input": HARD}, "input"),
            (RESPONSES, {"input": HARD, "stream": True}, "input"),
            (RESPONSES, {"input": HARD, "background": True}, "input"),
            (RESPONSES, {"input": "fine", "instructions": HARD}, "input"),
            (RESPONSES, {"input": "fine", "conversation": conversation}, "input"),
            ("/tokenize", {"prompt": HARD}, "prompt"),
            ("/tokenize", {"prompt": LONG}, "prompt"),
            ("/tokenize", said(HARD), "messages"),
        ):
            answer = await http.post(path, json=body)
            error = {
                "message": REASON, "type": "invalid_request_error", "param": param,
                "code": "invalid_value",
            }  # fmt: skip
            assert (answer.status_code, answer.json()) == (400, {"error": error}), (path, param)
        url = f"ws://127.0.0.1:{port}/v1/responses"
        async with websockets.connect(url, open_timeout=PATIENCE_S) as socket:
            await socket.send(json.dumps({"type": "response.create", "input": HARD}))
            event = json.loads(await socket.recv())
            assert (event["status"], event["error"]["param"]) == (400, "input")
        engine.may_speak.set()
        assert (await other).json()["choices"][0]["text"].startswith("hello")
        assert (await http.post("/tokenize", json={"prompt": "xxz"})).json()["count"] == 3
    _check_log(caplog, capfd, num_requests=17)


def _check_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], *, num_requests: int
) -> None:
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 2048
    lines = [each for each in caplog.records if each.name == "penstock.access"]
    assert len(lines) <= num_requests + 3  # one for each
    out, err = capfd.readouterr()
    for word in ("panicked", "Traceback", "backtrace", "Onig"):
        assert word not in out + err


def test_offline_too(hard_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_directory(hard_model)
    with pytest.raises(InvalidRequestError) as caught:
        tokenise(["fine", HARD], tokenizer, vocab_size=400)
    assert (str(caught.value), caught.value.param) == (REASON, "prompts")
    assert "panicked" not in capfd.readouterr().err


async def test_min_tokens_must_leave_a_token(serve: Serve) -> None:
    async with serve(info={"vocab_size": 300}) as served:
        for path, body in (
            (CHAT, said("x")), (CHAT, said("x") | {"stream": True}),
            (CHAT, said("x") | {"ignore_eos": True}), (CHAT, said("x") | {"n": 2}),
            (CHAT, said("x") | {"use_beam_search": True, "n": 2}),
            (COMPLETIONS, {"prompt": "x", "max_tokens": 5}), (RESPONSES, {"input": "x"}),
        ):  # fmt: skip
            every = {"stop_token_ids": [*range(300)], "min_tokens": 2}
            await _check_refused(served, path, body | every, "whole vocabulary of 300 tokens")
            every["stop_token_ids"] = [*range(1, 300)]  # 0 is the end of the model's answers
            await _check_refused(served, path, body | every, "whole vocabulary of 300 tokens")
            every["stop_token_ids"] = [300]
            await _check_refused(served, path, body | every, "300 is not in the vocabulary")
            every["stop_token_ids"] = [*range(2, 300)]
            assert (await served.http.post(path, json=body | every)).status_code == 200
            every |= {"stop_token_ids": [*range(300)], "min_tokens": 0}
            assert (await served.http.post(path, json=body | every)).status_code == 200
            every = {"logit_bias": dict.fromkeys(map(str, range(300)), -100)}
            if "use_beam_search" not in body:  # all are as likely as before
                assert (await served.http.post(path, json=body | every)).status_code == 200


async def _check_refused(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    answer = await served.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "stop_token_ids")
    assert words in error["message"]
