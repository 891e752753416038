"""How much of a turn a chat template writes otherwise in later prompts: it is computed again.

An agent's turn is rendered: a question, a thought and a call, its result, a thought and an answer,
and the next question. What the next prompt does not begin with is computed again although it was
in the cache: all that comes after a thought that is left out, or after tools that stand before the
newest question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]
Says = Callable[..., Message]

# Of a turn: lengths like an agent's, in characters.
_QUESTION = "penstock asks." + " Please find it and repair it." * 6
_THOUGHT = "penstock thinks." + " It may be here, so I look." * 22
_VALUE = "penstock runs" + " grep -rn penstock . |" * 8 + " head"
_RESULT = "penstock found" + "\nsrc/main.c:12: int main(void)" * 48
_ANSWER = "penstock says." + " It was there, and is repaired." * 16
_NEXT = "penstock goes on." + " What else?" * 8


def rewritten_share(
    render: Render,
    says: Says,
    *,
    name: str,
    key: str,
    system: str,
    has_thoughts: bool,
    has_calls: bool,
) -> float:
    """Of what a turn has added to the cache, the share that is computed again by the beginning of
    the next one, from 0 to 1.

    Args:
        render: a prompt; None: the template refuses it.
        says: makes an assistant's message of a text, `calls` by their arguments, and `thoughts`.
        name, key: of the function that is called, and of its argument.
        system: the system message; empty: there is none.
        has_thoughts: the model writes thoughts.
        has_calls: there is a call.
    """
    thought = _THOUGHT if has_thoughts else ""
    begun: list[Message] = [{"role": "system", "content": system}] if system else []
    begun.append({"role": "user", "content": _QUESTION})
    steps: list[tuple[Message, Sequence[Message], Sequence[str]]] = []
    if has_calls:
        call = says("", calls=[{key: _VALUE}], thoughts=thought)
        made = call["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": made["id"], "name": name, "content": _RESULT}
        steps.append((call, [result], (thought, name, _VALUE)))
    answer = says(_ANSWER, thoughts=thought)
    steps.append((answer, [{"role": "user", "content": _NEXT}], (thought, _ANSWER)))
    before = render(begun)
    if before is None:
        return 0.0
    begin, again, whole = max(before.find(_QUESTION), 0), 0, 1
    for message, following, said in steps:
        begun += [message, *following]
        after = render(begun)
        if after is None:
            return 0.0
        again += _num_again(before, after, said)
        whole = len(before) - begin + sum(map(len, said))
        before = after
    return min(again / whole, 1.0)


def _num_again(before: str, after: str, said: Sequence[str]) -> int:
    """Characters of a prompt and its output that the next prompt does not begin with.

    Args:
        said: the output.
    """
    size = sum(map(len, said))
    num_same = _num_same(before, after)
    if num_same < len(before):
        return len(before) - num_same + size
    at = len(before)
    for text in said:
        at = after.find(text, at)
        if at < 0:
            return size
    return 0


def _num_same(text: str, other: str) -> int:
    """Characters with which both begin."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
