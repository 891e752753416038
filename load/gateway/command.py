"""`penstock bench gateway`: the gateway's CPU per streamed token, and how much latency it adds.

A stub engine process sends one token id per stream and frame over the real transport. The gateway
is the real process, with admission, detokenising, response log and JSON; readers run in their own
process. Lateness is from a frame's send to the receipt of the event with its token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import IO, Any

import psutil

from penstock.engine.config import DEMO_MODEL, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.text import Tokenizer
from penstock.gateway.launch.child import Child
from penstock.load.gateway.readers import IDLE, LETTER, MAX_FRAMES, ClockFile
from penstock.load.report.options import add_out, counts, positive, settings_of
from penstock.load.report.tables import publish, table_of

WIRES = ("chat", "responses", "websocket")
STORES = ("memory", "disk", "redis")
_START_S = 60.0
_WARM_UP_S = 2.0
_NOTES = (
    "CPU is the gateway process', per token that readers received in the window. Late: from the "
    "frame's send by the engine to the receipt of the event that holds the token. Readers and the "
    "engine share the machine with the gateway; their CPU is not counted."
)
Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--wires", nargs="+", choices=WIRES, default=WIRES, help="APIs and transports to measure")
    add("--streams", type=counts, default=(100, 1000),
        help="numbers of concurrent streams, such as 100,1000")  # fmt: skip
    add("--intervals-ms", type=float, nargs="+", default=(0.0, 200.0),
        help="--stream-interval-ms of the gateway: the least time between two events of a response "
        "(/v1/responses)")  # fmt: skip
    add("--frames-per-s", type=float, default=100.0, help="the engine's frame rate")
    add("--window-s", type=float, default=5.0, help="duration of each measurement")
    add("--idle-sockets", type=positive, default=1000,
        help="open WebSockets to measure memory with")  # fmt: skip
    add("--stores", nargs="+", choices=STORES,
        help="where response logs are kept; each is measured in turn (default: memory, or redis "
        "with --redis-url)")  # fmt: skip
    add("--redis-url", help="of the store redis")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the table; return 1 if a stream broke."""
    if _num_frames(parsed) > MAX_FRAMES:
        raise ConfigError("--frames-per-s times --window-s exceeds the size of the clock file")
    stores = parsed.stores or ["memory" if parsed.redis_url is None else "redis"]
    if "redis" in stores and parsed.redis_url is None:
        raise ConfigError("--stores redis needs --redis-url")
    rows: list[Row] = []
    for interval_ms, wire, num_streams, store in product(
        parsed.intervals_ms, parsed.wires, parsed.streams, stores
    ):
        if wire == "chat" and (interval_ms or store != stores[0]):
            continue  # it merges events only for slow readers, and stores nothing
        rows.append(_measure(parsed, wire, num_streams, interval_ms=interval_ms, store=store))
        print(" · ".join(text(rows[-1]) for text in _COLUMNS.values()), flush=True)
    num_bytes = _idle_socket_bytes(parsed, stores[0])
    report = (
        f"{table_of(rows, _COLUMNS)}\n\n{_NOTES}\n\nAn idle WebSocket takes "
        f"{num_bytes / 1024:.1f} KiB of the gateway's memory (of {parsed.idle_sockets:,})."
    )
    print()
    data = {"settings": settings_of(parsed), "rows": rows, "idle_socket_bytes": num_bytes}
    publish(parsed.out, "gateway", "The gateway", report, data)
    return int(any(row["num_lost"] for row in rows))


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "": lambda row: row["wire"],
    "store": lambda row: row["store"],
    "streams": lambda row: f"{row['num_streams']:,}",
    "interval ms": lambda row: f"{row['interval_ms']:g}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "tokens per event": lambda row: f"{row['tokens_per_event']:.2f}",
    "CPU µs per token": lambda row: f"{row['cpu_us_per_token']:.1f}",
    "CPU": lambda row: f"{row['cpu_share']:.0%}",
    "late p50 ms": lambda row: f"{row['p50_ms']:.1f}",
    "p99 ms": lambda row: f"{row['p99_ms']:.1f}",
    "reader µs": lambda row: f"{row['reader_cpu_us_per_token']:.1f}",
}


def _num_frames(parsed: argparse.Namespace) -> int:
    return int(parsed.frames_per_s * (parsed.window_s + _WARM_UP_S + _START_S))


def _measure(
    parsed: argparse.Namespace, wire: str, num_streams: int, *, interval_ms: float, store: str
) -> Row:
    """What readers see within a window, and the gateway's CPU in it."""
    with (
        _servers(parsed, interval_ms, store) as (gateway, settings),
        _readers(
            {**settings, "wire": wire, "num_streams": num_streams,
             "num_tokens": _num_frames(parsed), "window_s": parsed.window_s}
        ) as told,
    ):  # fmt: skip
        before = gateway.cpu_times()
        time.sleep(parsed.window_s - 0.05)
        after = gateway.cpu_times()
        seen: dict[str, Any] = json.loads(told.readline())
    cpu_s = after.user + after.system - before.user - before.system
    num_tokens = max(seen["num_tokens"], 1)
    return {
        "wire": wire,
        "store": store,
        "num_streams": num_streams,
        "interval_ms": interval_ms,
        "num_lost": seen["num_lost"],
        "tokens_per_s": seen["num_tokens"] / parsed.window_s,
        "tokens_per_event": seen["num_tokens"] / max(seen["num_events"], 1),
        "cpu_us_per_token": 1e6 * cpu_s / num_tokens,
        "cpu_share": cpu_s / parsed.window_s,
        "p50_ms": seen["p50_ms"],
        "p99_ms": seen["p99_ms"],
        "reader_cpu_us_per_token": 1e6 * seen["reader_cpu_s"] / num_tokens,
    }


def _idle_socket_bytes(parsed: argparse.Namespace, store: str) -> float:
    """Growth of the gateway's memory per open, silent WebSocket."""
    with _servers(parsed, 0.0, store) as (gateway, settings):
        before = gateway.memory_info().rss
        num_streams = parsed.idle_sockets
        asked = {"wire": IDLE, "num_streams": num_streams, "num_tokens": 1, "window_s": 1.0}
        with _readers({**settings, **asked}) as told:
            grown: int = gateway.memory_info().rss - before
            told.read()  # until they end
    return float(grown / num_streams)


@contextlib.contextmanager
def _readers(settings: Mapping[str, Any]) -> Iterator[IO[str]]:
    """A process of readers, from the start of their window; yields its remaining output."""
    words = json.dumps({**settings, "model": "stub", "warm_up_s": _WARM_UP_S})
    command = [sys.executable, "-m", "penstock.load.gateway.readers", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as readers:  # noqa: S603
        assert readers.stdout is not None
        if not readers.stdout.readline():
            raise ConfigError("the readers could not connect")
        yield readers.stdout


@contextlib.contextmanager
def _servers(
    parsed: argparse.Namespace, interval_ms: float, store: str
) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """A stub engine and a gateway, whose process it yields; and where readers find them."""
    path = resolve_model(ModelConfig(model=DEMO_MODEL), weights=False)
    [token_id] = Tokenizer.from_directory(path).encode(LETTER, add_special_tokens=False)
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        contextlib.ExitStack() as children,
    ):
        clock_file, address = Path(directory) / "clock", f"{directory}/engine.sock"
        ClockFile(clock_file, create=True)
        engine = Child(
            "a stub engine",
            "penstock.load.gateway.stub_engine",
            {
                "address": address,
                "clock_file": str(clock_file),
                "token_id": token_id,
                "frames_per_s": parsed.frames_per_s,
                "vocab_size": 1 << 20,
            },
        )
        gateway = Child(
            "the gateway",
            "penstock.gateway.launch.process",
            {
                "engine_address": address,
                "served_model_name": ["stub"],
                "stream_interval_ms": interval_ms,
                "redis_url": parsed.redis_url if store == "redis" else None,
                "data_dir": f"{directory}/data" if store == "disk" else "none",
                "log_level": "warning",
                "model": dataclasses.asdict(ModelConfig(model=DEMO_MODEL)),
            },
            listener,
        )
        for child in (engine, gateway):
            children.enter_context(_running(child))
        assert gateway.process is not None
        port: int = listener.getsockname()[1]
        yield psutil.Process(gateway.process.pid), {"port": port, "clock_file": str(clock_file)}


@contextlib.contextmanager
def _running(child: Child) -> Iterator[None]:
    """Until the context is left, when it is killed."""
    try:
        child.start()
        assert child.status_fd is not None
        deadline_s = time.monotonic() + _START_S
        while not child.read_status():
            if not select.select([child.status_fd], [], [], deadline_s - time.monotonic())[0]:
                raise ConfigError(f"{child.label} did not start")
        os.close(child.status_fd)
        if child.ready is None:
            raise ConfigError(f"{child.label} could not start: {child.failure}")
        yield
    finally:
        child.kill()
        if child.process is not None:
            child.process.wait()
