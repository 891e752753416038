"""Parts of messages that a chat template may know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import ModelConfig

from ..api.bad_requests import CHAT
from ..api.test_tools import USER
from ..conftest import Serve, Served


async def prompt_of(served: Served, *messages: dict[str, Any]) -> str:
    answer = await served.http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return served.prompt_of()


async def test_thoughts_in_parts(serve: Serve) -> None:
    """They are the assistant's thoughts, as in `reasoning_content`."""
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    async with serve(trust_request_chat_template=True) as served:
        for thought in (
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
            {"type": "reasoning", "text": "Hm."},
            {"type": "think", "think": "Hm."},
        ):
            said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
            body = {"messages": [*USER, said], "chat_template": template}
            assert (await served.http.post(CHAT, json=body)).status_code == 200
            assert served.prompt_of() == "[|hello][Hm.|Yes.]"


_READS_PARTS = """{%- for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{% if part.type == 'thinking' %}[{{ part['thinking'] }}]
{%- elif part.type == 'document' %}({{ part.document.title }})
{%- else %}{{ part.text }}{% if part.lang %}@{{ part.lang }}{% endif %}{% endif %}{% endfor %}
{%- endif %}{% endfor %}"""


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_template_that_reads_parts_gets_them(
    serve: Serve, tmp_path: Path, model_path: Path, is_trusted: bool
) -> None:
    said = [
        {"role": "system", "content": [{"type": "thinking", "thinking": "Think"}, "Go."]},
        {"role": "user", "content": [{"type": "text", "text": "Hm", "lang": "en", "id": 1}]},
        {"role": "user", "content": [{"type": "document", "document": {"title": "T"}}]},
        {"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": {}}]},
    ]
    body: dict[str, Any] = {"messages": said}
    model: dict[str, Any] = {}
    if is_trusted:
        body["chat_template"] = _READS_PARTS
    else:
        path = tmp_path / "model"
        shutil.copytree(model_path, path)
        config = {"chat_template": _READS_PARTS}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        model["model"] = ModelConfig(model=str(path))
    async with serve(trust_request_chat_template=is_trusted, **model) as served:
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert served.prompt_of() == "<system>[Think]Go.<user>Hm@en<user>(T)<user>a\nb"


async def test_a_part_that_the_template_does_not_read(served: Served) -> None:
    """It is a text, or refused. Thoughts are the assistant's only."""
    told = {"type": "text", "text": "a", "role": "x", "content": "y"}
    thought = {"type": "thinking", "thinking": "Hm."}
    said = [
        {"role": "user", "content": [told, thought]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "b"}]},
    ]
    assert await prompt_of(served, *said) == "<user>a\n<assistant>b\n<assistant>"
    for kind in ("document", "input_audio", "video_url", "file"):
        body = {"messages": [*USER, {"role": "user", "content": [{"type": kind}]}]}
        answer = await served.http.post(CHAT, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"].startswith("messages[1].content")
        assert kind in error["message"]
