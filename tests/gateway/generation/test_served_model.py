"""What the options of `serve` say of the model: its names, its template, its defaults."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.generation.served_model import load_model
from penstock.kernels.cpu.build import CACHE_VARIABLE

from ..conftest import ANSWER, Serve, Served, listen
from ..fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "Hello"}]


@contextlib.asynccontextmanager
async def served_as(
    names: tuple[str, ...], model_path: Path, tokenizer: Tokenizer, folder: Path
) -> AsyncIterator[httpx.AsyncClient]:
    address = f"{folder}/engine.sock"
    config = GatewayConfig(
        engine_address=address,
        served_model_names=names,
        model=ModelConfig(model=str(model_path)),
    )
    async with (
        FakeEngine(address, tokenizer.encode(ANSWER)),
        listen(create_app(config), config) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        yield http


async def test_any_name_is_taken_if_that_is_said(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with served_as(("tiny", "*"), model_path, tokenizer, tmp_path) as http:
        for name in ("gpt-4o", "tiny", "*"):
            body = {"model": name, "messages": HELLO}
            answer = await http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert (await http.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["tiny"]
        document = (await http.get("/openapi.json")).json()
        model = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
        assert model == {"anyOf": [{"type": "string"}, {"type": "null"}]}


async def test_any_name_alone_leaves_the_model_its_own(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with served_as(("*",), model_path, tokenizer, tmp_path) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == [str(model_path)]
        answer = await http.post("/v1/completions", json={"prompt": "x"})
        assert answer.json()["model"] == str(model_path)


async def test_another_name_gets_those_there_are(served: Served) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "gpt-4o", "prompt": "x"})
    assert answer.status_code == 404
    assert "this server has tiny" in answer.json()["error"]["message"]


TEMPLATE = (
    "[{{ mood or 'plain' }}]{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where directories are made of others."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("is_file", [True, False])
async def test_another_template(
    serve: Serve, model_path: Path, tmp_path: Path, is_file: bool
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    given = str(file) if is_file else TEMPLATE
    defaults = '{"mood": "calm"}'
    model = ModelConfig(model=str(model_path), chat_template=given)
    async with serve(model=model, default_chat_template_kwargs=defaults) as served:
        for more, mood in (
            ({}, "calm"),
            ({"chat_template_kwargs": {"mood": "glad"}}, "glad"),
            ({"chat_template_kwargs": {"mood": None}}, "plain"),
        ):
            await served.http.post("/v1/chat/completions", json={"messages": HELLO, **more})
            assert served.prompt_of() == f"[{mood}]Hello>"
        await served.http.post("/v1/responses", json={"input": "Hello"})
        assert served.prompt_of() == "[calm]Hello>"
        body = {"messages": HELLO, "add_generation_prompt": True}
        tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
        assert served.tokenizer.decode(tokens) == "[calm]Hello>"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("missing.jinja", "--chat-template: there is no file 'missing.jinja'"),
        ("x" * 5000, "--chat-template: there is no file"),
        ("{% for", "--chat-template: the chat template is broken"),
    ],
)
def test_what_is_no_template(model_path: Path, given: str, said: str) -> None:
    model = ModelConfig(model=str(model_path), chat_template=given)
    with pytest.raises(ConfigError, match=said):
        load_model(GatewayConfig(engine_address="unused", model=model))


async def test_other_sampling_defaults(serve: Serve, model_path: Path) -> None:
    model = ModelConfig(
        model=str(model_path),
        override_generation_config=(
            '{"temperature": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 7}'
        ),
    )
    async with serve(model=model) as served:
        for more, temperature in (({}, 0.25), ({"temperature": 1}, 1.0)):
            await served.http.post("/v1/completions", json={"prompt": "x", **more})
            params = list(served.engine.submitted.values())[-1].sampling_params
            assert (params.temperature, params.top_k) == (temperature, 20)
            assert (params.repetition_penalty, params.max_tokens) == (1.5, 7)
        for asked, limit in ((3, 3), (100, 7)):
            body = {"messages": HELLO, "max_tokens": asked}
            await served.http.post("/v1/chat/completions", json=body)
            params = list(served.engine.submitted.values())[-1].sampling_params
            assert params.max_tokens == limit


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ('{"max_tokens": 5}', "--override-generation-config has no field 'max_tokens'"),
        ('{"max_new_tokens": 0}', "--override-generation-config: max_new_tokens: expected an int"),
        ('{"top_k": "many"}', "--override-generation-config: top_k: expected a number"),
        ('{"top_p": 0}', r"^--override-generation-config: top_p must be in \(0, 1\]"),
    ],
)
def test_sampling_defaults_that_are_none(model_path: Path, overrides: str, said: str) -> None:
    model = ModelConfig(model=str(model_path), override_generation_config=overrides)
    with pytest.raises(ConfigError, match=said):
        load_model(GatewayConfig(engine_address="unused", model=model))


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        (None, {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}),
        ({"eos_token_id": 0}, {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}),
        (
            {"repetition_penalty": 1.05},
            {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
    ],
)
async def test_how_chats_are_sampled(
    serve: Serve,
    model_path: Path,
    tmp_path: Path,
    recommended: dict[str, Any] | None,
    expected: dict[str, float],
) -> None:
    """The server says it of each model, for its page and for `penstock chat`. Who asks the API and
    says nothing gets the model's own defaults, and OpenAI's for the rest."""
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    (path / "generation_config.json").unlink()
    if recommended is not None:
        (path / "generation_config.json").write_text(json.dumps(recommended))
    async with serve(model=ModelConfig(model=str(path))) as served:
        [card] = (await served.http.get("/v1/models")).json()["data"]
        assert card["chat_sampling"] == expected
        await served.http.post("/v1/chat/completions", json={"messages": HELLO})
        params = list(served.engine.submitted.values())[-1].sampling_params
        own = recommended or {}
        assert params.temperature == own.get("temperature", 1.0)
        assert (params.top_p, params.min_p) == (own.get("top_p", 1.0), 0.0)
    model = ModelConfig(model=str(path), override_generation_config='{"temperature": 1}')
    async with serve(model=model) as served:
        [card] = (await served.http.get("/v1/models")).json()["data"]
        own = {name: value for name, value in own.items() if name != "eos_token_id"}
        assert card["chat_sampling"] == {**own, "temperature": 1.0}


async def test_alternatives_may_be_fewer(serve: Serve) -> None:
    async with serve(max_logprobs=3) as served:
        for body, status in (
            ({"prompt": "x", "logprobs": 3}, 200),
            ({"prompt": "x", "logprobs": 4}, 400),
            ({"prompt": "x", "prompt_logprobs": 4}, 400),
        ):
            answer = await served.http.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert "at most 3 (--max-logprobs)" in error["message"]


async def test_a_seed_decides_those_of_requests_without(serve: Serve, model_path: Path) -> None:
    async def drawn(seed: int | None) -> list[int]:
        model = ModelConfig(model=str(model_path), seed=seed)
        async with serve(model=model) as served:
            for more in ({}, {"seed": 5}, {}):
                await served.http.post("/v1/completions", json={"prompt": "x", **more})
            return [each.sampling_params.seed for each in served.engine.submitted.values()]

    first, again, other = await drawn(7), await drawn(7), await drawn(8)
    assert first == again
    assert first[1] == other[1] == 5
    assert len({first[0], first[2], other[0], other[2], *(await drawn(None))[::2]}) == 6
