"""The server under test, started for the soak or already running, and how to kill it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import select
import shlex
import shutil
import socketserver
import subprocess
import tempfile
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson
import psutil
import tokenizers

from penstock.engine.config import TlsFiles
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.load import launch
from penstock.load.client.records import Address
from penstock.load.soak.watch import Family

_CAPACITY_BYTES = 4096  # the smallest that Linux allows: soon full
_PIECE_BYTES = 65536
_LOOK_S = 0.1


class LogPipe:
    """A small pipe for a server's log; a thread copies it to the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _CAPACITY_BYTES)
        self._reading, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Self]:
        with tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory:
            pipe = cls(Path(directory) / "log")
            try:
                yield pipe
            finally:
                pipe._is_over.set()
                pipe._thread.join()
                os.close(pipe._read_end)
                os.close(pipe.write_end)

    def unread(self) -> threading.Lock:
        """Pauses the reader while it is held."""
        return self._reading

    @property
    def is_full(self) -> bool:
        """Whether the pipe has little room left."""
        waiting = bytearray(4)
        fcntl.ioctl(self._read_end, termios.FIONREAD, waiting)
        return int.from_bytes(waiting, "little") > _CAPACITY_BYTES // 2

    def _copy(self) -> None:
        with self.path.open("ab", buffering=0) as file:
            while not self._is_over.is_set():
                if select.select([self._read_end], [], [], _LOOK_S)[0]:
                    with self._reading:
                        file.write(os.read(self._read_end, _PIECE_BYTES))


# -- the servers --------------------------------------------------------------------------------

# Small stores, which are full within the warm-up, so that later growth is a leak; and a small
# pool, so that sequences are preempted.
_OWN_FLAGS = (
    "--session-store-bytes 1M --response-log-bytes 1M --num-blocks 512 --num-host-blocks 512"
)
# For a server under attack: gateways that can replace each other.
_ATTACKED_FLAGS = "--api-workers 2 --redis-url"
_FLOOD_STORE_BYTES = 16 << 20
_KEYS = f"""
[[keys]]
key = "sk-soak"
tenant = "soak"
admin = true
[[keys]]
key = "sk-flood"
tenant = "flood"
[tenants.soak]
allow_cache_salt = true
[tenants.flood]
store_bytes = {_FLOOD_STORE_BYTES}
"""
_READY_WITHIN_S = 60.0
_NUM_READY = 10  # times in a row, as each of several gateways may answer


async def _at_once() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to soak.

    `family` gives its live processes by name; empty if they are unknown. `kill` kills the next
    victim and returns its name when the server is ready again; None if nothing may be killed.
    `ready` waits until a frozen server is ready again. `api_key` is what its traffic needs,
    `flood_key` is another tenant's.
    """

    name: str
    base_url: str
    family: Callable[[], Family]
    kill: Callable[[], Awaitable[str]] | None = None
    victims: Callable[[], Family] = dict  # what may be frozen, by name: gateways, the engine, Redis
    ready: Callable[[], Awaitable[None]] = _at_once
    log: LogPipe | None = None  # what the server logs to, where the reader may pause
    api_key: str | None = None
    flood_key: str | None = None
    image_host: str | None = None  # a listed one that sends bytes one by one
    # Beside the server, an engine for gateways of other machines: its address, and certificate, key
    # and authority of both.
    peer_engine: tuple[str, TlsFiles] | None = None


@contextlib.contextmanager
def own_server(
    model: str | None, flags: str, *, is_attacked: bool, has_images: bool = False
) -> Iterator[Target]:
    """A penstock server. Kills hit its engine and, if it has several gateways or keeps its state on
    disk, each gateway in turn: else the only one would lose everything in its memory. An attacked
    server has two gateways, a Redis of its own, keys of two tenants, and a pipe for its log; beside
    it an engine listens for peers, and, `has_images`, there are a model that takes them and a host
    for them."""
    with contextlib.ExitStack() as stack:
        log, others, more = None, dict[str, psutil.Process](), dict[str, Any]()
        if is_attacked:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log = stack.enter_context(LogPipe.opened())
            url, others["redis"] = stack.enter_context(launch.redis_server())
            keys = folder / "keys.toml"
            keys.write_text(_KEYS, encoding="utf-8")
            flags = f"{_ATTACKED_FLAGS} {url} --api-keys-file {keys} {flags}"
            more = {"api_key": "sk-soak", "flood_key": "sk-flood"}
            if has_images:
                model = str(vision_model(folder))
                more["image_host"] = stack.enter_context(dripping_host())
                flags = f"--allowed-media-domains {more['image_host']} --load-format dummy {flags}"
            files = certificate(folder)
            with_files = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
            address = stack.enter_context(launch.peer_engine(with_files))
            more["peer_engine"] = (address, files)
        arguments = shlex.split(f"{_OWN_FLAGS} {flags}")
        started = stack.enter_context(
            launch.server(model, arguments, log=log.path, stderr=log.write_end)
            if log is not None
            else launch.server(model, arguments)
        )
        target = _own_target(started, others, log, f"{model or 'demo'} {shlex.join(arguments)}")
        yield replace(target, **more)


def vision_model(folder: Path) -> Path:
    """A directory of a model that takes images, without weights: the demo model's text model and
    tokenizer behind a small tower."""
    path = folder / "images"
    path.mkdir()
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_PATH / name, path)
    words = tokenizers.Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    words.add_special_tokens(["<image>"])
    words.save(str(path / "tokenizer.json"))
    text = orjson.loads((DEMO_MODEL_PATH / "config.json").read_bytes())
    side, tower = 56, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": words.token_to_id("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "eos_token_id": text["eos_token_id"],
        "text_config": {**text, "vocab_size": words.get_vocab_size()},
        "vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 2,
                          "image_size": side, "patch_size": 14, "projection_dim": 64, **tower},
    }  # fmt: skip
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    processor = {"image_processor_type": "CLIPImageProcessor", **sizes}
    (path / "config.json").write_bytes(orjson.dumps(config))
    (path / "preprocessor_config.json").write_bytes(orjson.dumps(processor))
    return path


def _own_target(
    started: launch.Started, others: Family, log: LogPipe | None, arguments: str
) -> Target:
    def victims() -> dict[str, psutil.Process]:
        family = started.family().items()
        return {name: each for name, each in family if name == "engine" or "gateway" in name}

    names, keeps_state = list(victims()), "--data-dir" in arguments
    killed = itertools.cycle(names if len(names) > 2 or keeps_state else ["engine"])

    def num_returns() -> int:
        return started.log.read_text().count(" is back after ")

    async def ready() -> None:
        num_ready = 0
        async with asyncio.timeout(_READY_WITHIN_S):
            while num_ready < _NUM_READY:
                await asyncio.sleep(0.05)
                is_ready = await asyncio.to_thread(launch.answers, f"{started.base_url}/ready")
                num_ready = num_ready + 1 if is_ready else 0

    async def kill() -> str:
        num_before, victim = num_returns(), next(killed)
        started.family()[victim].kill()
        async with asyncio.timeout(_READY_WITHIN_S):
            # A gateway may still report ready before it notices; the supervisor knows.
            while num_returns() == num_before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await ready()
        return victim

    return Target(
        name=f"penstock serve {arguments}",
        base_url=started.base_url,
        family=started.family,
        kill=kill,
        victims=lambda: {**victims(), **others},
        ready=ready,
        log=log,
    )


def given_server(base_url: str) -> Target:
    """A running server. Its processes are those that listen at its port, if it runs on this
    machine, and their children. Raises ConfigError if the address cannot be soaked."""
    address = Address.parse(base_url)
    if address.is_tls or address.prefix:
        raise ConfigError(f"--base-url {base_url!r}: soak needs plain http://host:port")
    found: dict[int, psutil.Process] = {}
    if address.host in ("127.0.0.1", "::1", "localhost"):
        for connection in psutil.net_connections(kind="tcp"):
            is_its = (
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == address.port
            )
            if is_its and connection.pid is not None:
                process = psutil.Process(connection.pid)
                found |= {each.pid: each for each in launch.family(process)}
    family = {f"{process.name()} {pid}": process for pid, process in found.items()}
    return Target(name=base_url, base_url=f"http://{address.netloc}", family=lambda: family)


# -- what an attack needs beside it ---------------------------------------------------------------


@contextlib.contextmanager
def dripping_host() -> Iterator[str]:
    """HOST:PORT of one that answers every request with chunks of one byte, without end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(1 << 16)
                self.request.sendall(head)
                while True:
                    self.request.sendall(b"1\r\nx\r\n" * 1000)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def certificate(folder: Path) -> TlsFiles:
    """One for 127.0.0.1 that signs itself, for engines and gateways."""
    cert, key = folder / "peer.pem", folder / "peer.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=peer -addext subjectAltName=IP:127.0.0.1 "
        "-addext extendedKeyUsage=serverAuth,clientAuth"
    )
    subprocess.run(  # noqa: S603  (our own command)
        [*command.split(), "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True
    )
    return TlsFiles(str(cert), str(key), str(cert))
