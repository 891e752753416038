"""Messages as stored items and back."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st
from openai.types.conversations import Message as StoredMessage

from penstock.gateway.api.schema.messages import Message, template_message
from penstock.gateway.api.shared.items import item_objects, messages_of

_PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("input_text"), "text": st.text()}), min_size=1
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer"]),
            "content": st.text() | _PARTS,
        },
        optional={
            "id": st.just("msg_1"),
            "type": st.just("message"),
            "status": st.sampled_from(["completed", "incomplete", "in_progress"]),
            "name": st.text(min_size=1),
            "phase": st.sampled_from(["commentary", "final_answer"]),
        },
    )
)


@given(_MESSAGES)
def test_round_trip(given_messages: list[dict[str, object]]) -> None:
    messages = [Message.model_validate(message) for message in given_messages]
    items = item_objects(messages)
    stored = [orjson.loads(orjson.dumps(item)) for item in items]
    assert messages_of(stored) == [
        template_message(each.role, each.content, each.name) for each in messages
    ]
    assert len({"msg_1", *(item["id"] for item in stored)}) == len(messages) + 1
    for item, message in zip(stored, messages, strict=True):
        shown = StoredMessage.model_validate_json(orjson.dumps(item), strict=True)
        assert [part.text for part in shown.content] == list(message.content)  # type: ignore[union-attr]
        assert (shown.role, shown.status) == (message.role, message.status or "completed")
    # What was stored may come in again.
    again = item_objects([Message.model_validate(item) for item in stored])
    assert [item["content"] for item in again] == [item["content"] for item in stored]
