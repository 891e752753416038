"""Writes what `tests/system/test_formats_stay.py` reads: what a version leaves in Redis, and what
its clients saw: `python -m tests.support.left_in_redis PENSTOCK MODEL FILE`.

Needed again when the built-in model is trained again. PENSTOCK is the command of a checkout of the
version, MODEL has the new weights.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.redis_server import RedisServer
from tests.system.processes import END_S, serve

_FIELDS = {"model": "demo", "temperature": 0}
_NUM_CUT_EVENTS = 40
_LEASE_MS = 30_000


def main() -> None:
    penstock, model, file = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as server:
        flags = (model, "--served-model-name", "demo", "--dtype", "float32")
        flags += ("--redis-url", server.url)
        with (
            serve(*flags, log=Path(folder) / "log", command=(penstock,)) as served,
            httpx.Client(base_url=served.base_url, timeout=END_S) as client,
        ):
            seen = _seen(client)
            seen["cut_events"] = _cut(client, seen.pop("cut_body"))
            for process in (served.process, *served.family):
                process.kill()
        with redis.Redis.from_url(server.url) as database:
            while any(0 < database.pttl(key) < _LEASE_MS for key in database.scan_iter()):
                time.sleep(0.1)  # until nobody takes the gateway for alive
            dumps = {key.decode(): database.dump(key) for key in sorted(database.scan_iter())}
    written = {name: base64.b64encode(dump).decode() for name, dump in dumps.items()}
    Path(file).write_text(json.dumps({"redis": written, "seen": seen}, indent=1, sort_keys=True))


def _seen(client: httpx.Client) -> dict[str, Any]:
    def post(path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = client.post(path, json=body, headers=headers)
        answer.raise_for_status()
        return answer

    def respond(text: str, num_tokens: int, **fields: Any) -> Any:
        body = {**_FIELDS, "input": text, "max_output_tokens": num_tokens, **fields}
        return post("/v1/responses", body).json()

    conversation = post("/v1/conversations", {"metadata": {"topic": "old"}}).json()
    path = f"/v1/conversations/{conversation['id']}"
    first = respond("The first turn.", 24, conversation=conversation["id"])
    main = respond("The second turn.", 24, conversation=conversation["id"])
    items = client.get(f"{path}/items").json()
    branch = respond("Another second turn.", 24, previous_response_id=first["id"])
    continued = [
        respond("The third turn.", 24, previous_response_id=before["id"], store=False)
        for before in (main, branch)
    ]
    chat = {**_FIELDS, "messages": [{"role": "user", "content": "Once."}]}
    chat |= {"stream": True, "max_tokens": 24}
    chat_events = _data(post("/v1/chat/completions", chat, **{"Idempotency-Key": "old-key"}).text)
    background = respond("In the background.", 16, background=True)
    complete = {**_FIELDS, "input": "Once.", "max_output_tokens": 32, "stream": True}
    complete_events = _data(post("/v1/responses", complete).text)
    cut = {"input": "Tell me a story.", "max_output_tokens": 600, "min_tokens": 600}
    whole = respond("Tell me a story.", 600, min_tokens=600, store=False)
    while background["status"] in {"queued", "in_progress"}:
        background = client.get(f"/v1/responses/{background['id']}").json()
    return {
        "conversation": client.get(path).json(),
        "turns": [first, main, branch],
        "items": items,
        "continued": continued,
        "chat_events": chat_events,
        "background": background,
        "complete_events": [json.loads(event) for event in complete_events],
        "cut_body": cut,
        "whole_text": whole["output"][0]["content"][0]["text"],
        "whole_usage": whole["usage"],
    }


def _cut(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """The first events of a stream that still runs."""
    events = []
    with client.stream("POST", "/v1/responses", json={**_FIELDS, **body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == _NUM_CUT_EVENTS:
                return events
    raise AssertionError("it has ended")


def _data(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


if __name__ == "__main__":
    main()
