"""Real tokenizers and chat templates: prompts are those of `transformers`, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import ChatTemplate, Tokenizer
from tests.support.conversations import CONVERSATIONS, Conversation
from tests.support.real_models import TOKENIZERS, published_templates, tokenizer_folder

pytestmark = pytest.mark.external
_FLAGS = ("add_generation_prompt", "continue_final_message")


def theirs(tokenizer: Any, conversation: Conversation) -> str | None:
    """None: refused."""
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages, tokenize=False, **conversation.variables
        )
    except Exception:  # whatever a template leads to
        return None
    assert isinstance(text, str)
    return text


def ours(template: ChatTemplate, conversation: Conversation) -> str | None:
    """None: refused, by the error that becomes the caller's."""
    flags = {name: conversation.variables[name] for name in _FLAGS}
    kwargs = {key: value for key, value in conversation.variables.items() if key not in flags}
    try:
        return template.render(conversation.messages, kwargs=kwargs, **flags)
    except InvalidRequestError as error:
        refused = error
    assert refused.param == "messages"
    assert str(refused).startswith(("the chat template refuses", "the chat template fails"))
    return None


@pytest.mark.node
@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tokenizer_folder(name, tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(path)
    template, tokenizer = ChatTemplate.from_directory(path), Tokenizer.from_directory(path)
    num_equal = 0
    for title, conversation in CONVERSATIONS.items():
        expected = theirs(reference, conversation)
        assert ours(template, conversation) == expected, title
        if expected is None:
            continue
        num_equal += 1
        tokens = reference.apply_chat_template(
            conversation.messages, return_dict=False, **conversation.variables
        )
        assert tokenizer.encode(expected, add_special_tokens=False) == tokens, title
    assert num_equal >= 28


@pytest.mark.node
def test_other_published_templates_render_the_same(tmp_path: Path) -> None:
    """With the special tokens of one model; their own are nowhere else in a template."""
    path = tokenizer_folder("llama3_1", tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(path)
    special_tokens = ChatTemplate.from_directory(path).special_tokens
    templates = published_templates()
    for name, source in templates.items():
        reference.chat_template = source
        template = ChatTemplate(source, special_tokens)
        for title, conversation in CONVERSATIONS.items():
            expected = theirs(reference, conversation)
            if expected is None and ".append(" in source:
                continue  # to lists of its own, which transformers refuses
            assert ours(template, conversation) == expected, (name, title)
    assert len(templates) > 60


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A model directory as `save_pretrained` writes it for a tokenizer with several templates."""
    path = tokenizer_folder("qwen3", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = {
        "default": tokenizer.chat_template,
        "tool_use": "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}",
    }
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    assert (saved / "chat_template.jinja").exists()
    assert (saved / "additional_chat_templates" / "tool_use.jinja").exists()
    return saved


@pytest.mark.node
def test_several_templates_are_read_from_their_files(several: Path) -> None:
    """The one for tools where there are some, by itself as in `transformers`, or by name."""
    reference = transformers.AutoTokenizer.from_pretrained(several)
    template = ChatTemplate.from_directory(several)
    assert dict(template.named) == reference.chat_template
    for title, conversation in CONVERSATIONS.items():
        if title != "no tools":  # an empty list is none here; there it is a use of tools
            assert ours(template, conversation) == theirs(reference, conversation), title
    conversation = CONVERSATIONS["a question"]
    expected = reference.apply_chat_template(
        conversation.messages, chat_template="tool_use", tools=[], tokenize=False
    )
    asked = {"template": "tool_use", "kwargs": {"tools": []}}
    assert template.render(conversation.messages, **asked) == expected == "[user]Hi!"
