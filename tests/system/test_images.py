"""Images through the whole stack: by the stock client, third parties', and in a conversation."""

from __future__ import annotations

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
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from penstock.clients.python import Client
from tests.clients.packages import PACKAGES
from tests.engine.vision.vision_models import picture, save_model

from .processes import END_S, Served, serve

TEXT = "what is this?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("llava")
    save_model("llava", path)
    flags = ("--served-model-name", "llava", "--dtype", "float32", "--num-blocks", "200")
    with serve(str(path), *flags, log=tmp_path_factory.mktemp("server") / "log") as served:
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


@pytest.mark.exhaustive
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
            response = ours.responses.create(
                model="llava", input=asked, max_output_tokens=2, temperature=0
            )
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
@pytest.mark.external
def test_the_ai_sdk_sends_images(server: Served, node_modules: Path) -> None:
    shutil.copy(PACKAGES / "images.mjs", node_modules)
    _check_third_party(server, ["node", "images.mjs"], cwd=node_modules)


@pytest.mark.external
def test_langchain_sends_images(server: Served, langchain: Path, tmp_path: Path) -> None:
    _check_third_party(server, [langchain, PACKAGES / "images.py"], cwd=tmp_path)


def test_the_terminal_sends_an_image(server: Served, tmp_path: Path) -> None:
    """With the next message and when that is asked again."""
    (tmp_path / "a.png").write_bytes(picture(5))
    program = "import sys; from penstock.clients.command_line import main; sys.exit(main())"
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
    told = httpx.get(f"{server.base_url}/metrics", timeout=END_S).text
    lines = [each for each in told.splitlines() if each.startswith("penstock:prompt_tokens_total")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)
