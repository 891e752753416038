"""A loop that thinks, calls a tool and answers, over the Python client: what comes of it must not
depend on what happened meanwhile.

    the tool runs once        whoever is asked again knows what was called
    no gap, no repeat         every event's number is the one after the last of its answer
    the log tells the same    a replay is what the client has read
    ids are stable            an item ends under the id under which it began

Not known here: who disturbs it, and when.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from penstock.clients import AsyncClient, RetryPolicy, calls_of

from ..system.stream_checker import replay

PROMPT, CALLED, OUTPUT = "what is 12 plus 30?", "12 + 30", "4711"
_PATIENT = RetryPolicy(max_retries=400, max_resumes=400, first_wait_s=0.05, max_wait_s=0.5)
_COMPARED = ("status", "output", "usage")
_LEFT_OUT = ("id", "call_id", "input_tokens_details")  # depends on who came before
_TOLD = "penstock.tool_output"

Event = dict[str, Any]
Kind = tuple[str, str]  # the event's type, its item's type


class ToolLoop:
    """One run of the tool, and what came of it.

    Args:
        base_url: of the server that is asked, or of what leads to one.
        body: fields of each request beside the prompt.
        on_call: called when the tool is.

    Attributes:
        rounds: the events of each answer.
        kinds: where each kind was read first.
    """

    def __init__(
        self, base_url: str, body: Event, *, on_call: Callable[[], None] = lambda: None
    ) -> None:
        self.rounds: list[list[Event]] = [[]]
        self.kinds: list[Kind] = []
        self._base_url = base_url
        self._body = body
        self._on_call = on_call
        self._asked: list[str] = []

    async def run(
        self,
        at: Kind | None = None,
        disturb: Callable[[], Awaitable[object]] | None = None,
        *,
        on_kind: Callable[[Kind], None] = lambda _: None,
    ) -> None:
        """To the end; disturbed when the first event of the kind is read.

        Args:
            on_kind: called with each kind that is read for the first time.
        """

        def calculator(expression: str) -> str:
            """Computes."""
            self._asked.append(expression)
            self._on_call()
            return OUTPUT

        items: dict[int, str] = {}
        disturbing: asyncio.Future[object] | None = None
        async with AsyncClient(self._base_url, retries=_PATIENT) as client:
            run = client.responses.run_tools(tools=[calculator], input=PROMPT, **self._body)
            async for event in run:
                kind = self._take(dict(event), items)
                if kind not in self.kinds:
                    self.kinds.append(kind)
                    on_kind(kind)
                    if kind == at and disturb is not None:
                        disturbing = asyncio.ensure_future(disturb())
                        await asyncio.sleep(0)  # it begins before anything else is read or sent
        if disturbing is not None:
            await disturbing
        assert (disturbing is None) == (at is None)

    async def check(self) -> None:
        """The promises above, as far as one run shows them."""
        calls, made = [], []
        for events in self.rounds:
            heard = [event for event in events if event["type"] != _TOLD]
            assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
            response = heard[-1]["response"]
            assert heard[-1]["type"] == "response.completed"
            _check_deltas(heard)
            assert await replay(self._base_url, response["id"]) == heard
            calls += calls_of(response)
            made += [event["call_id"] for event in events if event["type"] == _TOLD]
            added = [e["item"] for e in heard if e["type"] == "response.output_item.added"]
            assert [item["id"] for item in added] == [item["id"] for item in response["output"]]
        assert [call["call_id"] for call in calls] == made
        assert len(set(made)) == len(made) == 1
        assert self._asked == [CALLED]
        async with httpx.AsyncClient(base_url=self._base_url, timeout=120) as client:
            kept = await client.get(f"/v1/responses/{response['id']}/input_items")
        outputs = [i for i in kept.json()["data"] if i["type"] == "function_call_output"]
        assert [item["call_id"] for item in outputs] == made

    @property
    def outcome(self) -> list[Event]:
        """What must not depend on what happened meanwhile: all but ids, times and how the text was
        cut into deltas."""
        ends = [next(e for e in reversed(events) if "response" in e) for events in self.rounds]
        responses = [{key: end["response"][key] for key in _COMPARED} for end in ends]
        return json.loads(json.dumps(responses), object_hook=_without_ids)  # type: ignore[no-any-return]

    def _take(self, event: Event, items: dict[int, str]) -> Kind:
        if event["type"] == "response.created":
            items.clear()
            if self.rounds[-1]:
                self.rounds.append([])
        if event["type"] == "response.output_item.added":
            items[event["output_index"]] = event["item"]["type"]
        self.rounds[-1].append(event)
        return event["type"], items.get(event.get("output_index", -1), "")


def _without_ids(value: Event) -> Event:
    return {key: each for key, each in value.items() if key not in _LEFT_OUT}


def _check_deltas(heard: Sequence[Event]) -> None:
    """They are what each item says at its end."""
    said: dict[tuple[int, str], str] = {}
    for event in heard:
        key = (event.get("output_index", -1), event["type"].rpartition(".")[0])
        if event["type"].endswith(".delta"):
            said[key] = said.get(key, "") + event["delta"]
        elif event["type"].endswith(("_text.done", "arguments.done")):
            assert said.pop(key) == event.get("text", event.get("arguments"))
    assert not said
