"""`make path`: the files of ours that a request meets, from its accept to its last byte.

A file counts when one of its functions runs in that time, in a gateway or in the engine; C kernels
do not. Of each kind of request one goes ahead to warm the server, and three are traced. A file must
be entered by all three, and stands where the median of its first entries does.

A server also does things by its own clock, such as heartbeats, at any moment of a request. The
functions that it enters while nobody asks anything are known before the first request. Where a file
has others, its place is that of their first entry; where it has none, as the transport that frames
heartbeats and requests alike, its place may vary.

    python -m tests.support.request_path [KIND …]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.sync.client import connect

from tests.system.processes import PENSTOCK, serve

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "engine", "kernels")
_HOOK = Path(__file__).with_name("entered_files")
_NUM_TRACED = 3
_ROUND_S = 0.5  # in each of the last rounds of watching a server at rest there was nothing new
_NUM_ROUNDS = 5  # of which some have a heartbeat
_REST_S = 0.1  # in which a request that has ended leaves nothing more to do
Function = tuple[str, str]  # its file and its name
# Three answers of 180 tokens do not fit into 24 blocks of 16. The watchdog would enter the engine's
# files by its own clock, before the request does.
_SETTINGS = (
    *("--num-blocks=24", "--num-host-blocks=64", "--preemption=swap", "--max-model-len=256"),
    "--step-timeout-s=0",
)
_number = count()


def _fresh_salt() -> str:
    """Nothing of the prompt is in the prefix cache then."""
    return f"salt {next(_number)}"


def _post_chat(base_url: str, **parameters: Any) -> None:
    body = {"model": "demo", "stream": True, "max_tokens": 32, **parameters}
    body.setdefault("cache_salt", _fresh_salt())
    body["messages"] = [{"role": "user", "content": "What is paged attention?"}]
    headers = {"Content-Type": "application/json"}
    connection = HTTPConnection(urlsplit(base_url).netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer


def _respond_over_websocket(base_url: str) -> None:
    create = {"type": "response.create", "model": "demo", "input": "What is a token?"}
    create["cache_salt"] = _fresh_salt()
    with connect(f"{base_url.replace('http', 'ws', 1)}/v1/responses", open_timeout=60) as websocket:
        websocket.send(json.dumps(create))
        while (kind := json.loads(websocket.recv(60))["type"]) != "response.completed":
            assert kind not in ("error", "response.failed", "response.incomplete")


def _hit_the_prefix_cache(base_url: str) -> None:
    _post_chat(base_url, cache_salt="the same every time")


def _run_out_of_blocks(base_url: str) -> None:
    parameters = {"max_tokens": 180, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: _post_chat(base_url, **parameters), range(3)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and a series of `/metrics` that rises with it alone."""

    send: Callable[[str], None]
    series: str = "request_success_total{"


KINDS = {
    "chat": Kind(_post_chat),
    "websocket": Kind(_respond_over_websocket),
    "prefix-hit": Kind(_hit_the_prefix_cache, "prefix_cache_hits_total{"),
    "swap": Kind(_run_out_of_blocks, 'kind="swap"'),
}


class TracedServer:
    """A running server of the demo model, whose processes tell which files they enter."""

    def __init__(self, base_url: str, sockets: Path) -> None:
        self._base_url = base_url
        self._sockets = sockets
        self._by_clock = self._at_rest()

    def path(self, kind: Kind) -> list[str]:
        """Our files that such a request enters, in the order of first entry."""
        kind.send(self._base_url)
        traces: list[dict[str, float]] = []
        for _ in range(_NUM_TRACED):
            before = self._count(kind.series)
            self._await_rest()
            begin_s = time.monotonic()
            kind.send(self._base_url)
            end_s = time.monotonic()
            entered = self._entered().items()
            traces.append(
                self._files({name: at_s - begin_s for name, at_s in entered if at_s <= end_s})
            )
            assert self._count(kind.series) > before, f"{kind.series} has not risen"
        common = set.intersection(*map(set, traces))
        return sorted(common, key=lambda name: statistics.median(each[name] for each in traces))

    def _files(self, entered: dict[Function, float]) -> dict[str, float]:
        """The first entry of each file that is a request's; else of any."""
        first: dict[str, float] = {}
        for are_by_clock in (False, True):
            files: dict[str, float] = {}
            for function, at_s in entered.items():
                if (function in self._by_clock) == are_by_clock:
                    files[function[0]] = min(at_s, files.get(function[0], at_s))
            first = files | first
        return first

    def _at_rest(self) -> set[Function]:
        """What a server does while nobody asks anything."""
        time.sleep(_ROUND_S)
        self._entered()  # of its start
        seen: set[Function] = set()
        num_rounds = 0
        while num_rounds < _NUM_ROUNDS:
            time.sleep(_ROUND_S)
            entered = self._entered().keys()
            num_rounds = num_rounds + 1 if entered <= seen else 0
            seen |= entered
        return seen

    def _await_rest(self) -> None:
        """The last request has left nothing more to do."""
        self._entered()
        while True:
            time.sleep(_REST_S)
            if self._entered().keys() <= self._by_clock:
                return

    def _count(self, series: str) -> float:
        lines = httpx.get(f"{self._base_url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if series in line)

    def _entered(self) -> dict[Function, float]:
        """What gateway and engine entered since the last call; on the clock of all processes."""
        first: dict[Function, float] = {}
        for path in self._sockets.iterdir():
            with socket.socket(socket.AF_UNIX) as connection:
                if connection.connect_ex(str(path)):
                    continue  # its process has ended
                with connection.makefile() as file:
                    told = json.load(file)
            if told["command"][0] != "-m":
                continue  # the supervisor
            for file_name, function, at_s in told["entered"]:
                resolved = Path(file_name).resolve()
                if resolved.is_relative_to(ROOT):
                    name = str(resolved.relative_to(ROOT))
                    if name.split("/")[0] in ROOMS:
                        key = (name, function)
                        first[key] = min(at_s, first.get(key, at_s))
        return first


@contextmanager
def traced_server() -> Iterator[TracedServer]:
    with tempfile.TemporaryDirectory() as folder:
        sockets = Path(folder, "sockets")
        sockets.mkdir()
        path = os.pathsep.join((str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])))
        hook = ("env", f"PYTHONPATH={path}", f"PENSTOCK_ENTERED_FILES={sockets}")
        log = Path(folder, "log")
        with serve(*_SETTINGS, log=log, command=(*hook, PENSTOCK)) as served:
            yield TracedServer(served.base_url, sockets)


def _num_lines(names: list[str]) -> int:
    return sum((ROOT / name).read_text().count("\n") for name in names)


def _totals(names: list[str]) -> str:
    below = [name for name in names if not name.startswith("gateway/")]
    return (
        f"{len(names)} files, {_num_lines(names):,} lines; "
        f"engine and kernels {len(below)} files, {_num_lines(below):,} lines"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=", ".join(KINDS))
    kinds = parser.parse_args().kinds or list(KINDS)
    totals = []
    with traced_server() as server:
        for kind in kinds:
            names = server.path(KINDS[kind])
            print(f"{kind}: the files entered, in order, with their lines")
            for name in names:
                print(f"  {_num_lines([name]):5}  {name}")
            totals.append(f"{kind}: {_totals(names)}")
    print(*totals, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
