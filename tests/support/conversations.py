"""Fifty conversations for chat templates, as `apply_chat_template` of `transformers` takes them:
with tools, thoughts, and what callers send by mistake or on purpose."""

from __future__ import annotations

from typing import Any, NamedTuple

Message = dict[str, Any]


class Conversation(NamedTuple):
    """What a template is given: messages and variables, with `add_generation_prompt` and
    `continue_final_message`."""

    messages: list[Message]
    variables: dict[str, Any]


def _text(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(name: str = "get_weather", call_id: str = "call_0abcd", **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _calls(*calls: Message, content: Any = None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def _result(content: Any, call_id: str = "call_0abcd", name: str = "get_weather") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


def _tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_CITY = {"type": "string", "description": "a city"}
_WEATHER = _tool(
    "get_weather", "The weather, now.", city=_CITY,
    unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
)  # fmt: skip
_SEARCH = _tool(
    "search", "Finds <pages> & \"quotes\" — 検索.", query={"type": "string"},
    limit={"type": "integer", "default": 5}, tags={"type": "array", "items": {"type": "string"}},
    options={"type": "object", "properties": {"safe": {"type": "boolean"}}},
)  # fmt: skip
_NOTHING = {
    "type": "function",
    "function": {
        "name": "now", "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}  # fmt: skip
_HI, _HELLO = _text("user", "Hi!"), _text("assistant", "Hello. How can I help?")
_ASK = _text("user", "What is the weather in Paris?")
_PARIS = _call(city="Paris")
_SYSTEM = _text("system", "Be brief.")
_TOOLS = {"tools": [_WEATHER, _SEARCH]}

CONVERSATIONS: dict[str, Conversation] = {
    name: Conversation(
        messages,
        {
            "add_generation_prompt": not variables.get("continue_final_message", False),
            "continue_final_message": False,
            **variables,
        },
    )
    for name, messages, variables in [
        # Plain ones.
        ("a question", [_HI], {}),
        ("with a system message", [_SYSTEM, _HI], {}),
        ("several turns", [_SYSTEM, _HI, _HELLO, _text("user", "Nothing."), _HELLO, _HI], {}),
        ("for training", [_SYSTEM, _HI, _HELLO], {"add_generation_prompt": False}),
        ("a developer message", [_text("developer", "Be brief."), _HI], {}),
        ("an answer last", [_HI, _HELLO], {}),
        ("an answer to continue", [_HI, _HELLO], {"continue_final_message": True}),
        ("a long conversation", [_SYSTEM, *[_HI, _HELLO] * 40, _HI], {}),
        # Texts.
        ("spaces around", [_text("user", " \n Hi \t\n\n"), _text("assistant", "\nYes\n"), _HI], {}),
        ("other scripts", [_text("user", "Cửa Việt, 日本語, עברית, हिन्दी, Ωß — “quotes” …")], {}),
        ("joined characters", [_text("user", "👩\u200d👧 é e\u0301 ﬁ\u200b\xa0\ufeff\u2028")], {}),
        ("control characters", [_text("user", "a\x00b\x07\x1b[0m\r\nc")], {}),
        ("markup", [_text("user", "<b>&amp; \"x\" 'y'</b> {{ messages }} {% if %} \\n")], {}),
        ("special tokens", [_text("user", "<|im_end|></s><|eot_id|><end_of_turn><｜User｜>")], {}),
        ("code", [_text("user", "```python\ndef f(x):\n\treturn x ** 2\n```\n" * 20)], {}),
        ("numbers", [_text("user", "1234567890 3.14e-10 0x1F 1,000,000 ½ ٣")], {}),
        ("a long text", [_text("user", "The quick brown fox jumps over the lazy dog. " * 400)], {}),
        # Contents.
        ("an empty question", [_text("user", "")], {}),
        ("an empty answer", [_HI, _text("assistant", ""), _HI], {}),
        ("an empty system message", [_text("system", ""), _HI], {}),
        ("a null question", [_text("user", None)], {}),
        ("a null answer", [_HI, _text("assistant", None), _HI], {}),
        ("no content", [_HI, {"role": "assistant"}, _HI], {}),
        ("a part", [_text("user", _parts("Hi!"))], {}),
        ("several parts", [_text("user", _parts("One.", " Two. ", "Three."))], {}),
        ("a system message of parts", [_text("system", _parts("Be brief.")), _HI], {}),
        ("an answer of parts", [_HI, _text("assistant", _parts("One.", "Two.")), _HI], {}),
        ("no parts", [_text("user", [])], {}),
        ("a name", [_text("user", "Hi!", name="Ada"), _HELLO, _HI], {}),
        # Orders.
        ("a system message in the middle", [_HI, _HELLO, _SYSTEM, _HI], {}),
        ("two system messages", [_SYSTEM, _text("system", "In French."), _HI], {}),
        ("only a system message", [_SYSTEM], {}),
        ("two questions", [_HI, _ASK], {}),
        ("two answers", [_HI, _HELLO, _HELLO, _HI], {}),
        ("an answer first", [_HELLO, _HI], {}),
        ("an unknown role", [_text("critic", "Hm."), _HI], {}),
        # Tools.
        ("tools", [_ASK], _TOOLS),
        ("tools and a system message", [_SYSTEM, _ASK], _TOOLS),
        ("a tool without parameters", [_HI], {"tools": [_NOTHING]}),
        ("no tools", [_HI], {"tools": []}),
        ("a call", [_ASK, _calls(_PARIS)], {**_TOOLS, "add_generation_prompt": False}),
        ("a result", [_ASK, _calls(_PARIS), _result('{"degrees": 21}')], _TOOLS),
        ("a call after a text", [_ASK, _calls(_PARIS, content="Hm."), _result("21")], _TOOLS),
        ("a call with an empty text", [_ASK, _calls(_PARIS, content=""), _result("21")], _TOOLS),
        (
            "many calls at once",
            [
                _SYSTEM,
                _ASK,
                _calls(*(_call(call_id=f"call_{n}abcd", city=f"C{n}") for n in range(6))),
                *(_result(f"{n} °C", f"call_{n}abcd") for n in range(6)),
                _text("assistant", "It is mild."),
                _HI,
            ],
            _TOOLS,
        ),
        (
            "a call with every kind of argument",
            [
                _ASK,
                _calls(
                    _call(
                        "search", query="a \"b\" <c> & 検索\n\\", limit=3, tags=["x", "y"],
                        options={"safe": True, "deep": {"none": None, "pi": 3.14}}, empty="",
                    )
                ),
                _result("[]", name="search"),
            ],
            _TOOLS,
        ),
        ("a call without arguments", [_HI, _calls(_call("now")), _result("12:00")],
         {"tools": [_NOTHING]}),
        ("results that stand for others", [_ASK, _calls(_PARIS), _result(""), _HELLO, _HI], {}),
        # Thoughts.
        (
            "thoughts",
            [_HI, _text("assistant", "Hello.", reasoning_content="A greeting.\n"), _HI],
            {"enable_thinking": True},
        ),
        ("thoughts in the text", [_HI, _text("assistant", "<think>\nHm.\n</think>\n\nYes."), _HI],
         {"enable_thinking": False}),
        (
            "thoughts before a call",
            [_ASK, _calls(_PARIS, content="", reasoning_content="I need it."), _result("21"),
             _text("assistant", "Mild.", reasoning_content="Now I know.")],
            {**_TOOLS, "add_generation_prompt": False},
        ),
        ("an effort", [_SYSTEM, _HI], {"reasoning_effort": "high"}),
    ]
}  # fmt: skip
