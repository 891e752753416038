"""Reading tokenizers and chat templates from model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.text import ChatTemplate, Tokenizer

_CHATML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_HELLO = [{"role": "user", "content": "hi <b>&"}]


def test_every_token_knows_its_bytes(tokenizer: Tokenizer) -> None:
    text = "hello é 漢 😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() in (
        text,
        text.replace(" ", ""),
    )


def test_token_bytes_of_half_a_character(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("🀄", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(bytes_tokenizer.token_bytes, ids)) == "🀄".encode()


def test_a_directory_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read"):
        Tokenizer.from_directory(tmp_path)


def test_templates_from_either_file(tmp_path: Path) -> None:
    config = {"chat_template": _CHATML, "eos_token": {"content": "<|end|>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_directory(tmp_path)
    expected = "<|start|>user\nhi <b>&<|end|>\n"
    assert template.render(_HELLO) == expected + "<|start|>assistant\n"
    assert template.render(_HELLO, add_generation_prompt=False) == expected
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages|length }}")
    assert ChatTemplate.from_directory(tmp_path).render(_HELLO) == "<s>1"


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render(_HELLO) == "d"
    assert template.render(_HELLO, kwargs={"tools": [{}]}) == "t"
    assert template.render(_HELLO, template="tool_use") == "t"
    assert template.render(_HELLO, template="default", kwargs={"tools": [{}]}) == "d"


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "old"}, {"name": "default", "template": "old"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").write_text("d{{ bos_token }}")
    assert ChatTemplate.from_directory(tmp_path).render(_HELLO, kwargs={"tools": [{}]}) == "d"
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render(_HELLO, kwargs={"documents": [{"text": "x"}]}) == "d"
    assert template.render(_HELLO, kwargs={"tools": [{}]}) == "tool_use"
    assert template.render(_HELLO, template="rag") == "rag"


def test_a_template_in_json(tmp_path: Path) -> None:
    """As of many models that take images."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "p{{ eos_token }}"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert ChatTemplate.from_directory(tmp_path).render(_HELLO) == "p</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "t"}))
    assert ChatTemplate.from_directory(tmp_path).render(_HELLO) == "t"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 1}))
    with pytest.raises(ModelLoadError, match=r"chat_template\.json"):
        ChatTemplate.from_directory(tmp_path)


def test_each_of_several_templates_is_checked() -> None:
    for broken in ("{% if %}", "{{ 1 // 0 }}"):
        with pytest.raises(ModelLoadError, match="broken"):
            ChatTemplate("d", {}, named={"default": "d", "tool_use": broken}).check()


def test_a_template_for_documents_needs_none_to_be_checked() -> None:
    """Command R's `rag` iterates over them, and its `tool_use` over tools."""
    named = {
        "default": "d",
        "rag": "{% for each in documents %}{% for key, value in each.items() %}{{ key | title }}: "
        "{{ value }}{% endfor %}{% endfor %}",
        "tool_use": "{% for tool in tools %}{{ tool.function.parameters.properties | length }}"
        "{% endfor %}",
    }
    template = ChatTemplate("d", {}, named=named)
    template.check()
    kwargs = {"documents": [{"title": "x"}]}
    assert template.render(_HELLO, template="rag", kwargs=kwargs) == "Title: x"
    with pytest.raises(InvalidRequestError, match="fails"):
        template.render(_HELLO, template="rag")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.insert(0, 1) }}", "unsafe"),
        ("{{ messages[7].content }}", "no element 7"),
    ],
)
def test_a_template_that_refuses_blames_the_messages(source: str, fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        ChatTemplate(source, {}).render(_HELLO)
    assert caught.value.param == "messages"


def test_a_template_appends_to_a_copy() -> None:
    """As Kimi K2's do; what the caller has stays as it is."""
    messages = [dict(message) for message in _HELLO]
    source = "{{ messages.append(messages[0]) or messages | length }}"
    assert ChatTemplate(source, {}).render(messages) == str(len(_HELLO) + 1)
    assert messages == list(_HELLO)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"content": None, "name": "n"}, {"name": "n"}),
        ({"content": "a", "reasoning_content": None}, {"content": "a"}),
        ({"reasoning_content": "b"}, {"reasoning_content": "b", "thinking": "b"}),
        ({"thinking": "b", "reasoning": None}, {"reasoning_content": "b", "thinking": "b"}),
        ({"reasoning": "b"}, {"reasoning": "b", "reasoning_content": "b", "thinking": "b"}),
        (
            {"reasoning_content": "b", "thinking": "c"},
            {"reasoning_content": "b", "thinking": "c"},
        ),
    ],
)
def test_templates_get_messages_as_from_transformers(
    given: dict[str, Any], shown: dict[str, Any]
) -> None:
    """Without fields that are null, and with thoughts by both names that templates know."""
    template = ChatTemplate("{{ messages | tojson(sort_keys=true) }}", {})
    assert json.loads(template.render([given])) == [shown]


def test_no_template_and_broken_templates() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate(None, {}).render(_HELLO)
    with pytest.raises(ModelLoadError, match="broken"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(InvalidRequestError, match="not valid Jinja"):
        ChatTemplate(None, {}).render(_HELLO, template="{% if %}")


def test_the_helpers_hugging_face_templates_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m|tojson }}{% endgeneration %}{% endfor %}{{ extra }}"
        "{{ strftime_now('%Y')|length }}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "<é>"}]
    rendered = ChatTemplate(source, {}).render(messages, kwargs={"extra": "!"})
    assert rendered == '{"role": "user", "content": "<é>"}!4'
