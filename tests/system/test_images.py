"""Images through the whole stack: by the stock client, in a conversation, across a dead engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from PIL import Image

from penstock.clients.python import Client
from penstock.gateway.storage.conversations.ids import tree_of
from tests.clients.packages import PACKAGES
from tests.engine.vision_models import picture, save_model
from tests.redis_server import RedisServer

from .processes import END_S, Served, serve
from .stream_checker import CheckedStream

pytestmark = pytest.mark.redis

TEXT = "what is this?"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("images") / "redis") as server:
        yield server


@pytest.fixture(scope="module")
def arguments(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of `serve`."""
    path = tmp_path_factory.mktemp("llava")
    save_model("llava", path)
    name = ("--served-model-name", "llava", "--redis-url", redis.url)
    return str(path), "--dtype", "float32", "--num-blocks", "200", *name


@pytest.fixture(scope="module")
def server(
    arguments: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serve(*arguments, log=tmp_path_factory.mktemp("server") / "log") as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as made:
        yield made


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(client: OpenAI, *files: bytes, text_first: bool = False, **options: Any) -> Any:
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url_of(file), "detail": "high"}}
        for file in files
    ]
    parts.insert(0 if text_first else len(parts), {"type": "text", "text": TEXT})
    return client.chat.completions.create(
        model="llava",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        **{"max_tokens": 24} | options,
    )


def test_the_stock_client_sends_images(client: OpenAI) -> None:
    one = chat(client, picture(0))
    assert one.choices[0].message.content
    assert one.usage.prompt_tokens - chat(client).usage.prompt_tokens == 16
    again = chat(client, picture(0))
    assert again.choices[0].message.content == one.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert chat(client, picture(1)).choices[0].message.content != one.choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, picture(0), stream=True)
    )
    assert streamed == one.choices[0].message.content
    with pytest.raises(BadRequestError) as caught:
        chat(client, picture(0), picture(0)[:-100])
    assert caught.value.param == "messages[0].content[1].image_url"
    assert caught.value.code == "invalid_image"


def test_a_conversation_keeps_its_images(client: OpenAI) -> None:
    """And is deleted with them."""
    conversation = client.conversations.create().id
    sent: Any = {"type": "input_image", "image_url": url_of(picture(2)), "detail": "auto"}
    first: Any = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}, sent]}]
    options: Any = {"model": "llava", "temperature": 0, "max_output_tokens": 8}
    one = client.responses.create(input=first, conversation=conversation, **options)
    two = client.responses.create(input="And now?", conversation=conversation, **options)
    assert two.usage
    assert one.usage
    assert two.usage.input_tokens_details.cached_tokens >= one.usage.input_tokens - 1
    three = client.responses.create(input="Still?", previous_response_id=two.id, **options)
    assert three.usage
    assert three.usage.input_tokens > two.usage.input_tokens
    for items in (
        client.conversations.items.list(conversation, order="asc"),
        client.responses.input_items.list(two.id, order="asc"),
    ):
        listed: Any = next(iter(items))
        shown = next(part for part in listed.content if part.type == "input_image")
        assert base64.b64decode(shown.image_url.partition(",")[2]) == picture(2)
    client.conversations.delete(conversation)


def test_our_client_takes_files_bytes_and_pictures(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(picture(3))
    answers = set()
    with Client(server.base_url) as ours:
        for image in (file, file.read_bytes(), Image.open(io.BytesIO(file.read_bytes()))):
            asked: Any = [{"role": "user", "content": [TEXT, image]}]
            said = ours.chat.create(model="llava", messages=asked, temperature=0, max_tokens=8)
            answers.add(said["choices"][0]["message"]["content"])
            response = ours.responses.create(model="llava", input=asked, max_output_tokens=2)
            assert response["status"] == "incomplete"
        with pytest.raises(ValueError, match="PNG, JPEG, GIF or WebP"):
            ours.chat.create(model="llava", messages=[{"role": "user", "content": [b"no image"]}])
    assert len(answers) == 1


def _check_third_party(server: Served, command: Sequence[str | Path], *, cwd: Path) -> None:
    """The answers of a script of a third-party client, of which each way sends the same pictures,
    are those of the stock client."""
    one, other = (base64.b64encode(picture(number)).decode() for number in (6, 7))
    pictures = {"PENSTOCK_URL": server.base_url, "PICTURE": one, "OTHER_PICTURE": other}
    done = subprocess.run(
        command, env=os.environ | pictures, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, list[str]] = json.loads(done.stdout)
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
        asked = [chat(client, picture(number), max_tokens=16, text_first=True) for number in (6, 7)]
    first, second = (answer.choices[0].message.content for answer in asked)
    assert first != second
    assert len(said) >= 3
    assert all(answers == [first, second, first] for answers in said.values())


@pytest.mark.node
def test_the_ai_sdk_sends_images(server: Served, node_modules: Path) -> None:
    shutil.copy(PACKAGES / "images.mjs", node_modules)
    _check_third_party(server, ["node", "images.mjs"], cwd=node_modules)


@pytest.mark.exhaustive
def test_langchain_sends_images(server: Served, langchain: Path, tmp_path: Path) -> None:
    _check_third_party(server, [langchain, PACKAGES / "images.py"], cwd=tmp_path)


def test_the_terminal_sends_an_image(server: Served, tmp_path: Path) -> None:
    """With the next message and when that is asked again."""
    (tmp_path / "a.png").write_bytes(picture(5))
    program = "import sys; from penstock.gateway.launch.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "chat", "--base-url", server.base_url]

    def num_prompt_tokens(lines: str) -> int:
        before = _prompt_tokens(server)
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert ("cannot send" in done.stderr) == ("none.png" in lines)
        return _prompt_tokens(server) - before

    without = num_prompt_tokens(f"/image {tmp_path}/none.png\n{TEXT}\n/retry\n/quit\n")
    both = num_prompt_tokens(f"/image {tmp_path}/a.png\n{TEXT}\n/retry\n/quit\n")
    assert both == without + 2 * 16


def _prompt_tokens(server: Served) -> int:
    told = httpx.get(f"{server.base_url}/metrics").text
    lines = [each for each in told.splitlines() if each.startswith("penstock:prompt_tokens_total")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def test_a_stream_with_an_image_survives_its_engine(server: Served, client: OpenAI) -> None:
    """It is given the image again."""
    options: Any = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
    whole = chat(client, picture(4), **options).choices[0].message.content
    engines = [
        each
        for each in psutil.Process(server.process.pid).children(recursive=True)
        if "engine" in " ".join(each.cmdline()) or "engine" in each.name()
    ]
    (engine,) = engines
    text = ""
    for number, chunk in enumerate(chat(client, picture(4), stream=True, **options)):
        text += chunk.choices[0].delta.content or ""
        if number == 3:
            engine.kill()
            assert chunk.choices[0].finish_reason is None
    assert text == whole


async def test_another_gateway_goes_on_with_images(
    server: Served, redis: RedisServer, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """With a conversation, and with a stream after its gateway and engine were killed."""
    text, image = {"type": "input_text", "text": TEXT}, {"type": "input_image", "detail": "auto"}
    image["image_url"] = url_of(picture(8))
    asked: Any = [{"role": "user", "content": [text, image]}]
    options: Any = {"model": "llava", "temperature": 0}

    async def talk(first: AsyncOpenAI, second: AsyncOpenAI) -> tuple[str, list[str]]:
        """A conversation that begins at one gateway and goes on at another."""
        talk = (await first.conversations.create()).id
        settings: Any = {**options, "conversation": talk, "max_output_tokens": 8}
        one = await first.responses.create(input=asked, **settings)
        two = await second.responses.create(input="And now?", **settings)
        assert two.usage
        assert one.usage
        assert two.usage.input_tokens > one.usage.input_tokens + 8
        return talk, [one.output_text, two.output_text]

    long = {**options, "input": asked, "ignore_eos": True, "max_output_tokens": 900}
    with serve(*arguments, log=tmp_path / "log") as doomed:
        async with (
            AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none") as here,
            AsyncOpenAI(base_url=f"{doomed.base_url}/v1", api_key="none") as there,
        ):
            talked, said = await talk(there, here)
            assert (await talk(here, here))[1] == said
        with redis.client() as looking:
            chunks: Any = looking.hvals(f"penstock:{{{tree_of(talked)}}}:token_ids")
        assert chunks.count(picture(8)) == 1  # of two turns that have it
        undisturbed, stream = (
            CheckedStream(body=long, begins_at=each, resumes_at=server.base_url, transport="sse")
            for each in (server.base_url, doomed.base_url)
        )
        await undisturbed.read()
        reading = asyncio.create_task(stream.read())
        async with asyncio.timeout(END_S):
            while len(stream.events) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not stream.is_ended
        doomed.process.kill()
        for process in doomed.family:
            process.kill()
        assert (await reading).outcome == undisturbed.outcome
    assert "is gone; it ran 1 responses" in server.log.read_text()
