"""Tools, calls and results as text, for chat templates that do not show them.

Many templates know no tools, or show them only in part: DeepSeek R1's shows results and no tools.
What a template shows is found by rendering samples. What it does not is written here: the tools
into the system message, calls in the format in which the answer's calls are read, and results as
the user's; so is the system message where there is no such role, and the roles alternate where they
must.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats.call_format import CallFormat
from penstock.engine.chat_formats.contents import joined, text_of
from penstock.engine.chat_formats.formats import tool_format_of
from penstock.engine.chat_formats.template_facts import TemplateFacts
from penstock.engine.chat_formats.tool_format import ID, NUMBER, Frame

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

FALLBACK_FORMAT = "hermes"  # of a model whose template shows none: plain JSON between two tags
# The text of Qwen's own templates, which other models follow too.
_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{how}
{example}"""
_HOW_IN_HERMES = (
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:"
)
_KNOWS_TOOLS = re.compile(r"\btools\b|\btool_calls\b|\bmessages\s*\|")
_HOW = "To call a function, write exactly:"
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateScope:
    """What a chat template shows of a conversation: the system message, the tools that are
    offered, earlier calls, and their results; and whether it wants the roles of user and assistant
    to alternate."""

    system: bool = True
    tools: bool = True
    calls: bool = True
    results: bool = True
    alternates: bool = False

    @property
    def shows_all(self) -> bool:
        return self.system and self.tools and self.calls and self.results


def of_request(facts: TemplateFacts, source: str) -> TemplateFacts:
    """What a request's own template shows, where nothing was found. An author who writes of tools
    knows what to show of them."""
    if facts.calls:
        return facts
    knows = _KNOWS_TOOLS.search(source) is not None
    return TemplateFacts(
        thoughts=facts.thoughts,
        opens_thoughts=facts.opens_thoughts,
        answer=facts.answer,
        shows_tools=knows,
        shows_calls=knows,
        late_system=facts.late_system,
    )


def scope_of(facts: TemplateFacts, *, has_tools: bool) -> TemplateScope:
    """What a template shows.

    Args:
        has_tools: tools are offered.
    """
    return TemplateScope(
        system=facts.shows_system,
        tools=facts.shows_tools or not has_tools,
        calls=facts.shows_calls,
        results=facts.shows_results,
        alternates=facts.alternates,
    )


def with_tools_in_text(
    messages: Messages, tools: Tools | None, *, scope: TemplateScope, tool_format: CallFormat | str
) -> tuple[Messages, Tools | None]:
    """Messages and tools for a template: what it does not show is text of the messages.

    Args:
        tool_format: in which the answer's calls are read.
    """
    if scope.shows_all or not (
        tools or any("tool_calls" in each or each.get("role") == "tool" for each in messages)
    ):
        return messages, tools
    frame = tool_format_of(tool_format).frame
    shown = [dict(message) for message in messages]
    if not scope.calls:
        for message in shown:
            calls = message.pop("tool_calls", None)
            if calls:
                written = _calls_in(frame, calls)
                message["content"] = joined(_without_line_end(message.get("content")), written)
    if not scope.results:
        shown = _without_results(shown)
    if tools and not scope.tools:
        _introduce(shown, _introduction(tools, tool_format))
        tools = None
    if not scope.system:
        shown = _without_system(shown)
    return _alternating(shown) if scope.alternates else shown, tools


def _introduction(tools: Tools, tool_format: CallFormat | str) -> str:
    frame = tool_format_of(tool_format).frame
    if frame.written is None:
        example = _written(frame, [("<function-name>", "<args-json-object>")])
        example = example.replace('"<function-name>"', "<function-name>")
    else:
        example = _written(frame, [("function_name", frame.written({"argument_name": "value"}))])
    return _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        how=_HOW_IN_HERMES if tool_format == FALLBACK_FORMAT else _HOW,
        example=example,
    )


def _introduce(messages: list[dict[str, Any]], text: str) -> None:
    """Add a text to the system message."""
    if messages and messages[0].get("role") in _SYSTEM_ROLES:
        messages[0]["content"] = joined(messages[0].get("content"), text, "\n\n")
    else:
        messages.insert(0, {"role": "system", "content": text})


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages where the user says what the system does, before what follows."""
    shown: list[dict[str, Any]] = []
    is_system = False  # the last message is the system's
    for message in messages:
        if is_system and message.get("role") in ("user", *_SYSTEM_ROLES):
            before = shown.pop()["content"]
            message = {**message, "content": joined(before, message.get("content"), "\n\n")}
        is_system = message.get("role") in _SYSTEM_ROLES
        shown.append({**message, "role": "user"} if is_system else message)
    return shown


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages where neighbours of one role are one message; a system message that is not the
    first is the user's."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        last = shown[-1] if shown else {}
        role = message.get("role")
        if role in _SYSTEM_ROLES and last and last["role"] not in _SYSTEM_ROLES:
            role = "user"
        if role != "tool" and role == last.get("role") and "tool_calls" not in last:
            content = joined(last.get("content"), message.get("content"), "\n\n")
            shown[-1] = {**last, **message, "role": role, "content": content}
        else:
            shown.append({**message, "role": role})
    return shown


def _without_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages where the user says what the tools returned. Such messages in a row are one, since
    templates without tools often want the roles to alternate."""
    shown: list[dict[str, Any]] = []
    is_result = False  # the last message tells results
    for message in messages:
        if message.get("role") == "tool":
            text = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            if is_result:
                shown[-1]["content"] = joined(shown[-1]["content"], text)
            else:
                shown.append({"role": "user", "content": text})
            is_result = True
            continue
        if is_result and message.get("role") == "user":
            before, content = shown[-1]["content"], message.get("content")
            shown[-1]["content"] = joined(before, content, "\n\n")
        else:
            shown.append(message)
        is_result = False
    return shown


def _calls_in(frame: Frame, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls in OpenAI's form, as the model would have written them."""
    written = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):  # offline, a caller may have parsed them
            arguments = json.dumps(arguments, ensure_ascii=False)
        if frame.written is not None:
            try:
                values = json.loads(arguments)
            except (ValueError, RecursionError):
                values = None
            arguments = frame.written(values) if isinstance(values, dict) else arguments
        written.append((function["name"], arguments))
    return _written(frame, written)


def _written(frame: Frame, calls: Sequence[tuple[str, str]]) -> str:
    """Calls by name and written arguments."""
    each = [
        "".join([*frame.begin(name), arguments, *frame.end])
        .replace(NUMBER, str(number))
        .replace(ID, f"call{number:05}")
        for number, (name, arguments) in enumerate(calls)
    ]
    return "".join([*frame.first, "".join(frame.between).join(each), *frame.last])


def _without_line_end(content: Any) -> Any:
    """An answer's text without the line end that the model wrote before a call."""
    return content.removesuffix("\n") if isinstance(content, str) else content
