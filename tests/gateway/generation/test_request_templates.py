"""Templates that nobody vouches for: what they may spend, and that nobody else pays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engine.chat_formats import template_sandbox as budget
from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.text.chat_template import MAX_CPU_S, TemplateFiles
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation import template_process
from penstock.gateway.generation.sandbox import Sandbox
from penstock.gateway.generation.template_process import TemplateCheck, TemplateProcess

from ..conftest import PATIENCE_S, Serve
from ..launch.test_process import launched

USER = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_TOO_SLOW = f"chat_template takes more than {MAX_CPU_S:g} s to render"
_TOO_DEEP = "it is nested too deeply, or recurses without end"
_TOO_LARGE = "chat_template fails: it needs too much memory"
HOSTILE = {
    ENDLESS: _TOO_SLOW,
    "{{ 7 ** (10 ** 9) }}": _TOO_LARGE,
    "{{ 1//0 }}": "chat_template fails: ZeroDivisionError: ",
    "{{ 2.0**10000 }}": "chat_template fails: OverflowError: ",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": f"chat_template fails: {_TOO_DEEP}",
    f"{{{{ {'(' * 3000}1{')' * 3000} }}}}": f"chat_template cannot be compiled: {_TOO_DEEP}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000: f"chat_template cannot be compiled: {_TOO_DEEP}",
    '{{ "a"*10**18 }}': _TOO_LARGE,
    '{{ "a"*10**9 }}': _TOO_LARGE,
    "{{ [[0]*99999999]*2 }}": _TOO_LARGE,
    '{{ "a"*10**7 }}': f"chat_template produces more than {budget.MAX_TEXT_BYTES} bytes",
    '{{ "\\ud800" }}': "chat_template produces invalid Unicode",
    "{% include 'x' %}": "chat_template fails: TypeError: ",
    "{% if": "chat_template is not valid Jinja: ",
}


def arguments(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "add_generation_prompt": True, **more}


async def test_each_is_refused_by_name_and_streams_go_on(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(trust_request_chat_template=True, step_s=0.01) as served:
        body = {"messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 1000}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            events = stream.aiter_lines()
            for number, (template, reason) in enumerate(HOSTILE.items()):
                path = ("/v1/chat/completions", "/tokenize")[number % 2]
                asked = {"messages": USER, "chat_template": template}
                refusal = asyncio.create_task(served.http.post(path, json=asked))
                if reason is _TOO_SLOW:  # it has seconds to go: the stream does not wait for it
                    for _ in range(5):
                        assert await anext(events) is not None
                    assert not refusal.done()
                response = await refusal
                error = response.json()["error"]
                assert response.status_code == 400, template[:80]
                assert error["param"] == "chat_template", template[:80]
                assert error["message"].startswith(reason), template[:80]
        asked = {"model": "tiny", "input": "hello", "chat_template": "{{ 1//0 }}"}
        response = await served.http.post("/v1/responses", json=asked)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(HOSTILE["{{ 1//0 }}"])
    assert "Traceback" not in caplog.text
    assert "internal error" not in caplog.text


async def test_it_renders_as_the_gateway_does() -> None:
    process = TemplateProcess()
    said = [*USER, {"role": "assistant", "content": "wörld "}]
    source = "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"
    cut = arguments(messages=said, continue_final_message=True, kwargs={"mood": "!"})
    try:
        text = await process.render(source, {"bos": "<s>"}, cut)
        assert text == "<s><user>hello<assistant>wörld "
        with pytest.raises(InvalidRequestError, match="refuses these messages: no") as caught:
            await process.render("{{ raise_exception('no') }}", {}, arguments())
        assert caught.value.param == "messages"
    finally:
        await process.close()


@pytest.mark.process_kills
async def test_it_starts_when_needed_and_again_after_its_end() -> None:
    process = TemplateProcess()
    assert process._process is None

    async def render(source: str) -> str:
        return await process.render(source, {}, arguments())

    try:
        assert await render("a") == "a"
        first = process._process
        assert first is not None
        assert await render("b") == "b"
        assert process._process is first
        first.kill()
        await first.wait()
        assert await render("c") == "c"
        second = process._process
        assert second is not first
        hanging = asyncio.create_task(render(ENDLESS))
        await asyncio.sleep(0.1)
        hanging.cancel()  # whoever asked has left: its answer must not become the next one's
        assert await render("d") == "d"
        assert process._process is not second
    finally:
        last = process._process
        await process.close()
    assert last is not None
    assert last.returncode is not None


@pytest.mark.process_kills
async def test_a_process_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess()
    try:
        await process.render("a", {}, arguments())
        assert process._process is not None
        psutil.Process(process._process.pid).suspend()
        monkeypatch.setattr(Sandbox, "max_wall_s", 0.1)
        with pytest.raises(InvalidRequestError, match=r"was not rendered within 0\.1 s"):
            await process.render("a", {}, arguments())
        monkeypatch.undo()
        assert await process.render("a", {}, arguments()) == "a"
    finally:
        await process.close()


async def test_only_so_many_wait() -> None:
    process = TemplateProcess()
    waiting = [
        asyncio.create_task(process.render("a", {}, arguments()))
        for _ in range(template_process.MAX_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RequestRefusedError) as caught:
        await process.render("a", {}, arguments())
    assert (caught.value.status, caught.value.code) == (503, "server_overloaded")
    assert await asyncio.gather(*waiting) == ["a"] * len(waiting)
    await process.close()


@pytest.mark.process_kills
def test_it_does_not_outlive_its_gateway() -> None:
    code = (
        "import asyncio\n"
        "from penstock.gateway.generation.template_process import TemplateProcess\n"
        "async def main():\n"
        "    process = TemplateProcess()\n"
        "    await process.render('a', {}, {'messages': []})\n"
        "    print(process._process.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        child = psutil.Process(int(gateway.stdout.readline()))
        gateway.kill()
    child.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        pytest.param(
            ENDLESS,
            "the chat template takes more than 2 s to render",
            marks=pytest.mark.exhaustive,  # the same limit as of a request's
        ),
        ("{{ 7 ** (10 ** 9) }}", "the chat template is broken: it needs too much memory"),
        ("{{ 1//0 }}", "the chat template is broken: ZeroDivisionError"),
        ("{{ 'a'*10**9 }}", "the chat template is broken: it needs too much memory"),
        ("{% if", "the chat template is broken: unexpected 'end of template'"),
        ("{{ raise_exception('a system message is needed') }}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_models_own_is_checked(source: str, fault: str | None) -> None:
    check = TemplateCheck(TemplateFiles(source, {}))
    if fault is None:
        check.result()
    else:
        with pytest.raises(ModelLoadError, match=fault.replace("(", r"\(")):
            check.result()


def test_a_gateway_whose_model_has_a_broken_template_does_not_start(
    model_path: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in model_path.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text("{{ 1//0 }}")
    with launched(str(model), f"{tmp_path}/engine.sock") as (process, _, status_fd):
        line = os.read(status_fd, 1000)
        event = json.loads(line)
        assert (event["event"], event["code"]) == ("failed", 1)
        assert event["message"].startswith(
            f"{model / 'chat_template.jinja'}: the chat template is broken: ZeroDivisionError"
        )
        assert process.wait(PATIENCE_S) == 1
