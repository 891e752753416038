"""Ending a prompt inside its last message, against `transformers`' own."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import ChatTemplate

_PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TRIMMING = _PLAIN.replace("m.content", "m.content | trim")
# As Qwen3's: only what follows the reasoning is shown.
_REASONING = _PLAIN.replace("m.content", "m.content.split('</think>')[-1].lstrip('\\n')")


def messages(last: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Say it again: {last}"},
        {"role": "assistant", "content": last},
    ]


@pytest.mark.parametrize("source", [_PLAIN, _TRIMMING, _REASONING])
@pytest.mark.parametrize("last", ["The answer is", " spaces around ", "ends\n", "a<|end|>b", ""])
def test_it_ends_as_in_transformers(source: str, last: str) -> None:
    rendered, _ = render_jinja_template(
        [messages(last)], chat_template=source, continue_final_message=True
    )
    ours = ChatTemplate(source, {}).render(
        messages(last), add_generation_prompt=False, continue_final_message=True
    )
    assert [ours] == rendered
    assert ours.rstrip().endswith(last.strip())


def test_a_user_may_write_the_mark_of_transformers() -> None:
    template = ChatTemplate(_PLAIN, {})
    last = "x CONTINUE_FINAL_MESSAGE_TAG y"
    text = template.render(messages(last), add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(f"<|assistant|>\n{last}")


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (_REASONING, "<think>no</think>yes"),
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", "gone"),
        (_PLAIN.replace("m.content", "m.content | upper"), "loud"),
    ],
)
def test_a_message_that_the_template_changes_is_refused(source: str, last: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
        ChatTemplate(source, {}).render(
            messages(last), add_generation_prompt=False, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"
