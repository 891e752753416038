"""llama.cpp's server. Its number of slots is to be that of the streams in flight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD
from penstock.load.peers.http_server import FreshConnections, HttpServer, free_port
from penstock.load.peers.rival import Setting

# Slots: what they are for, and the tokens each must hold.
_SLOTS = {
    1: (frozenset({"single", "turns1"}), 1536),
    8: (frozenset({"c8", "turns8"}), 1536),
    32: (frozenset({"c32"}), 768),
    128: (frozenset({"front128"}), 256),
}


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
        environment = environments.make(self.name)
        port = free_port()
        server = environment.path / "llama.cpp" / "bin" / "llama-server"
        command = [
            *(str(server), "-m", str(_gguf(model)), "--host", "127.0.0.1", "--port", str(port)),
            *("--no-webui", *setting.flags),
        ]
        log = BUILD / "logs" / f"llamacpp-{model}-{setting.name}.log"
        return HttpServer(
            command,
            port=port,
            model=model,
            env=setting.env,
            log=log,
            transport=FreshConnections,
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
