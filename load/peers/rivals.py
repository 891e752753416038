"""What every rival is to the comparison, ours too: something that starts, is measured and stops."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import psutil
import uvloop
from tokenizers import Tokenizer

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.requests import Endpoint
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import Transport
from penstock.load.launch import end, server
from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD, REPOSITORY, Environment
from penstock.load.peers.workloads import Workload, token_turns
from penstock.load.workloads.driver import ClosedLoop, RunResult, run


class RivalError(Exception):
    """A rival did not start, or ended while it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to start a rival. Of several that fit a workload, the fastest counts.

    Attributes:
        flags: what the rival is started with; in process, the options of its library.
    """

    name: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workloads: frozenset[str] = frozenset()  # those it is meant for; empty: all

    def fits(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads

    def __str__(self) -> str:
        """As on a command line: what the report says."""
        words = [*(f"{key}={value}" for key, value in self.env.items()), *self.flags]
        return " ".join([f"{self.name}:", *words]) if words else self.name


class Running(Protocol):
    """A rival that is ready."""

    ready_s: float  # from the making of its process
    process: psutil.Process  # the first of its processes

    def measure(self, workload: Workload) -> RunResult:
        """Raises RivalError if it ended, or took too long."""
        ...

    def stop(self) -> None:
        """End all its processes, by force if it must be."""
        ...


class Rival(Protocol):
    name: str  # in the results
    title: str  # for people

    def prepare(self, model: str) -> str:
        """Make its environment and its form of the model; its version. Raises InstallError if it
        cannot be had here."""
        ...

    def settings(self, model: str) -> Sequence[Setting]: ...

    def start(self, model: str, setting: Setting) -> Running:
        """Raises RivalError if it did not start."""
        ...


def cpu_s(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by the processes' names; equal names are added up.

    A process that has given itself no name is `main`.
    """
    found: dict[str, float] = {}
    for process in processes:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        name = "main" if name.startswith("python") else name
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """What they hold together: a page that several share counts once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


_READY_WITHIN_S, _CELL_WITHIN_S, _STOP_WITHIN_S = 240.0, 300.0, 20.0
_TAIL_BYTES = 600


class FreshConnections:
    """A `Transport` with a connection for each call, for a server that closes after a stream.

    llama.cpp does, while it promises to keep the connection.
    """

    def __init__(self, base_url: str, endpoint: Endpoint) -> None:
        self._base_url, self._endpoint = base_url, endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def stream(self, call: Call, record: StreamRecord) -> None:
        async with SseTransport(self._base_url, self._endpoint) as transport:
            await transport.stream(call, record)


def measure_http(
    base_url: str,
    model: str,
    workload: Workload,
    *,
    transport: Callable[[str, Endpoint], Transport] = SseTransport,
) -> RunResult:
    """One run of a workload against a server, this process at real-time priority if it may. Raises
    RivalError if it took too long."""

    async def go() -> RunResult:
        async with (
            asyncio.timeout(_CELL_WITHIN_S),
            transport(base_url, workload.endpoint) as opened,
        ):
            return await run(
                opened,
                workload.dialogues,
                arrivals=ClosedLoop(workload.concurrency),
                model=model,
                extra={"temperature": 0},
            )

    try:
        with real_time():
            return uvloop.run(go())
    except TimeoutError:
        raise RivalError(f"{workload.name} took longer than {_CELL_WITHIN_S:g} s") from None


@contextmanager
def real_time() -> Iterator[bool]:
    """SCHED_RR meanwhile, and whether that was permitted.

    On few cores a server that spins would keep the client waiting, and look slow for it.
    """
    try:
        # Reset on fork: what is started meanwhile must not be in the way of everything else.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except (PermissionError, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Process:
    """A `Running` by a command of ours, its output in a log.

    Args:
        pipes: standard input and output where they are talked to.
    """

    def __init__(
        self, command: Sequence[object], *, env: Mapping[str, str], log: Path, **pipes: int
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        with log.open("wb") as file:
            self._popen = subprocess.Popen(  # noqa: S603  (a command of ours)
                [str(word) for word in command],
                env={**os.environ, **env},
                stdin=pipes.get("stdin", subprocess.DEVNULL),
                stdout=pipes.get("stdout", file),
                stderr=file,
                process_group=0,
            )
        self.process = psutil.Process(self._popen.pid)
        try:
            self._await_ready(began_s + _READY_WITHIN_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - began_s

    def stop(self) -> None:
        end(self.process, within_s=_STOP_WITHIN_S)
        self._popen.communicate()

    def _await_ready(self, until_s: float) -> None:
        raise NotImplementedError


class HttpServer(Process):
    """An OpenAI-compatible server, ready when `/health` says so."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        port: int,
        model: str,
        env: Mapping[str, str],
        log: Path,
        transport: Callable[[str, Endpoint], Transport] = SseTransport,
    ) -> None:
        self._transport = transport
        self._base_url = f"http://127.0.0.1:{port}"
        self._model = model
        super().__init__(command, env=env, log=log)

    def measure(self, workload: Workload) -> RunResult:
        if self._popen.poll() is not None:
            raise RivalError(f"it had ended with {self._popen.returncode}")
        return measure_http(self._base_url, self._model, workload, transport=self._transport)

    def _await_ready(self, until_s: float) -> None:
        while time.perf_counter() < until_s:
            if self._popen.poll() is not None:
                raise RivalError(f"it ended with {self._popen.returncode}: {tail(self._log)}")
            try:
                with urllib.request.urlopen(self._base_url + "/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RivalError(f"it was not ready within {_READY_WITHIN_S:g} s: {tail(self._log)}")


class InProcess(Process):
    """A library, run and timed by a worker of ours under the library's own Python. No client, no
    HTTP, and no tokenizer are in its figures."""

    def __init__(
        self, command: Sequence[object], *, model: str, env: Mapping[str, str], log: Path
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(models.MODELS / model / "tokenizer.json"))
        env = {**env, "PYTHONPATH": str(REPOSITORY / ".namespace")}
        super().__init__(command, env=env, log=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self, workload: Workload) -> RunResult:
        asked = {
            "concurrency": workload.concurrency,
            "dialogues": [token_turns(each, self._tokenizer) for each in workload.dialogues],
        }
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(asked).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise RivalError(f"it had ended: {tail(self._log)}") from None
        return _result(self._answer(_CELL_WITHIN_S), workload)

    def _await_ready(self, until_s: float) -> None:
        self._answer(until_s - time.perf_counter())

    def _answer(self, within_s: float) -> dict[str, Any]:
        """One line; it is written at once, so that its start says that all of it comes."""
        assert self._popen.stdout is not None
        readable, _, _ = select.select([self._popen.stdout], [], [], within_s)
        line = self._popen.stdout.readline() if readable else b""
        if not line:
            how = "it ended" if readable else f"nothing came for {within_s:.0f} s"
            raise RivalError(f"{how}: {tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    text = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())


def _result(answer: Mapping[str, Any], workload: Workload) -> RunResult:
    records = []
    for fields in answer["records"]:
        num_tokens = sum(fields["event_tokens"])
        record = StreamRecord(**fields, sent_s=fields["scheduled_s"], output_tokens=num_tokens)
        expected = workload.dialogues[record.dialogue].turns[record.turn].max_tokens
        record.expected_tokens = expected
        record.finish_reason = "length"
        records.append(record)
    records.sort(key=lambda record: (record.dialogue, record.turn))
    return RunResult(
        records=records, began_s=answer["began_s"], ended_s=answer["ended_s"], client_cpu_s=0.0
    )


# -- each of them -----------------------------------------------------------------------------

_VLLM_FLAGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "128"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
_VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "4"}
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
# Of llama.cpp, as many as streams in flight: what they are for, and the tokens each must hold.
_SLOTS = {
    1: (frozenset({"single", "turns1"}), 1536),
    8: (frozenset({"c8", "turns8"}), 1536),
    32: (frozenset({"c32"}), 768),
    128: (frozenset({"front128"}), 256),
}
# On a CPU Hugging Face does not find out by itself how much memory to take.
_HF_BLOCKS = {"page_size": 64, "num_blocks": 1024, "max_batch_tokens": 2048}


def _log(system: str, model: str, setting: Setting) -> Path:
    return BUILD / "logs" / f"{system}-{model}-{setting.name}.log"


class Penstock:
    """Our own server, started and asked like any other."""

    name = "penstock"
    title = "penstock"

    def prepare(self, model: str) -> str:
        models.make(model)
        return version("penstock-llm")

    def settings(self, model: str) -> Sequence[Setting]:
        """What a user gets who sets nothing."""
        del model
        return (Setting(name="default"),)

    def start(self, model: str, setting: Setting) -> PenstockServer:
        return PenstockServer(model, setting)


class PenstockServer:
    """A `Running`."""

    def __init__(self, model: str, setting: Setting) -> None:
        self._stack = ExitStack()
        self._model = model
        log = _log("penstock", model, setting)
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--served-model-name", model, *setting.flags]
        try:
            started = self._stack.enter_context(server(str(models.make(model)), flags, log=log))
        except ConfigError as error:
            raise RivalError(str(error)) from error
        self._base_url = started.base_url
        self.ready_s = started.ready_s
        self.process = started.process

    def measure(self, workload: Workload) -> RunResult:
        return measure_http(self._base_url, self._model, workload)

    def stop(self) -> None:
        self._stack.close()


class Vllm:
    name = "vllm"
    title = "vLLM CPU server"

    def prepare(self, model: str) -> str:
        models.make(model)
        return environments.make(self.name).version("vllm-cpu")

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        bound = {**_VLLM_ENV, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        return (
            Setting(name="bound", flags=_VLLM_FLAGS, env=bound),
            Setting(name="unbound", flags=_VLLM_FLAGS, env=_VLLM_ENV),
        )

    def start(self, model: str, setting: Setting) -> HttpServer:
        environment, port = environments.make(self.name), free_port()
        command = [
            *(environment.python, environment.path / "bin" / "vllm", "serve"),
            *(models.make(model), "--served-model-name", model),
            *("--host", "127.0.0.1", "--port", port, *setting.flags),
        ]
        env = {**OFFLINE, **setting.env, "LD_PRELOAD": preload(environment)}
        log = _log(self.name, model, setting)
        return HttpServer(command, port=port, model=model, env=env, log=log)


def preload(environment: Environment) -> str:
    """What vLLM wants in LD_PRELOAD: a faster allocator, and Intel's OpenMP."""
    allocator = next(environment.path.glob("system/usr/lib/*/libtcmalloc_minimal.so.4"))
    return f"{allocator}:{environment.path / 'lib' / 'libiomp5.so'}"


class LlamaCpp:
    name = "llamacpp"
    title = "llama.cpp server"

    def prepare(self, model: str) -> str:
        environments.make(self.name)
        _gguf(model)
        return f"of llama-cpp-python {environments.LLAMA_CPP_PYTHON}"

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        settings = []
        threads = str(psutil.cpu_count() or 1)
        for num_slots, (workloads, num_tokens) in _SLOTS.items():
            flags = (
                *("-t", threads, "-np", str(num_slots)),
                *("-c", str(num_slots * num_tokens), "-fa", "on", "--cache-ram", "0"),
            )
            for kind in ("split", "unified") if num_slots > 1 else ("split",):
                unified = "--kv-unified" if kind == "unified" else "--no-kv-unified"
                name = f"{kind}-{num_slots}"
                settings.append(Setting(name=name, flags=(*flags, unified), workloads=workloads))
        return settings

    def start(self, model: str, setting: Setting) -> HttpServer:
        port = free_port()
        program = environments.make(self.name).path / "llama.cpp" / "bin" / "llama-server"
        command = [
            *(program, "-m", _gguf(model), "--host", "127.0.0.1", "--port", port),
            *("--no-webui", *setting.flags),
        ]
        log, connect = _log(self.name, model, setting), FreshConnections
        return HttpServer(
            command, port=port, model=model, env=setting.env, log=log, transport=connect
        )


def _gguf(model: str) -> Path:
    """The model's file, converted now unless it is there."""
    source = models.make(model)
    file = source.with_suffix(".gguf")
    if not file.exists():
        unfinished = file.with_suffix(".part")
        script = Path(__file__).parent / "workers" / "gguf_model.py"
        environment = environments.make("llamacpp")
        environment.run(environment.python, script, source, unfinished)
        unfinished.rename(file)
    return file


class OpenVino:
    """Its continuous batching: there is no server of its own to ask."""

    name = "openvino"
    title = "OpenVINO GenAI, in process"

    def prepare(self, model: str) -> str:
        _exported(model)
        return environments.make(self.name).version("openvino-genai")

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        return (
            Setting(name="default", flags=("{}",)),
            Setting(name="kv-bf16", flags=(json.dumps({"KV_CACHE_PRECISION": "bf16"}),)),
        )

    def start(self, model: str, setting: Setting) -> InProcess:
        python = environments.make(self.name).python
        worker = "penstock.load.peers.workers.openvino"
        command = [python, "-m", worker, _exported(model), *setting.flags]
        log = _log(self.name, model, setting)
        return InProcess(command, model=model, env=setting.env, log=log)


def _exported(model: str) -> Path:
    """The model in OpenVINO's own form, exported now unless it is there.

    Its fp16 is what the recipe of the field uses; the CPU plugin computes in bf16 where it can.
    """
    source = models.make(model)
    directory = source.with_suffix(".openvino")
    if not directory.exists():
        unfinished = source.with_suffix(".openvino.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        environment = environments.make("openvino")
        environment.run(
            *(environment.path / "bin" / "optimum-cli", "export", "openvino", "--model", source),
            *("--task", "text-generation-with-past", "--weight-format", "fp16"),
            *("--disable-convert-tokenizer", unfinished),
        )
        unfinished.rename(directory)
    return directory


class HuggingFace:
    """Static padded batches, and its continuous batching."""

    name = "hf"
    title = "Hugging Face transformers, in process"

    def prepare(self, model: str) -> str:
        models.make(model)
        return environments.make(self.name).version("transformers")

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        return (
            Setting(name="static", flags=("static", "{}")),
            Setting(name="continuous", flags=("continuous", json.dumps(_HF_BLOCKS))),
        )

    def start(self, model: str, setting: Setting) -> InProcess:
        python = environments.make(self.name).python
        worker = "penstock.load.peers.workers.hf"
        command = [python, "-m", worker, models.make(model), *setting.flags]
        env = {"HF_HUB_OFFLINE": "1", **setting.env}
        return InProcess(command, model=model, env=env, log=_log(self.name, model, setting))
