"""vLLM's server on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD, Environment
from penstock.load.peers.http_server import HttpServer, free_port
from penstock.load.peers.rival import Setting

_FLAGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "128"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
_ENV = {"VLLM_CPU_KVCACHE_SPACE": "4"}
OFFLINE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class Vllm:
    name = "vllm"
    title = "vLLM CPU server"

    def prepare(self, model: str) -> str:
        models.make(model)
        return environments.make(self.name).version("vllm-cpu")

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        bound = {**_ENV, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        return (
            Setting(name="bound", flags=_FLAGS, env=bound),
            Setting(name="unbound", flags=_FLAGS, env=_ENV),
        )

    def start(self, model: str, setting: Setting) -> HttpServer:
        environment = environments.make(self.name)
        port = free_port()
        command = [
            *(str(environment.python), str(environment.path / "bin" / "vllm"), "serve"),
            *(str(models.make(model)), "--served-model-name", model),
            *("--host", "127.0.0.1", "--port", str(port), *setting.flags),
        ]
        return HttpServer(
            command,
            port=port,
            model=model,
            env={**OFFLINE, **setting.env, "LD_PRELOAD": preload(environment)},
            log=BUILD / "logs" / f"vllm-{model}-{setting.name}.log",
        )


def preload(environment: Environment) -> str:
    """What it wants in LD_PRELOAD: a faster allocator, and Intel's OpenMP."""
    allocator = next(environment.path.glob("system/usr/lib/*/libtcmalloc_minimal.so.4"))
    return f"{allocator}:{environment.path / 'lib' / 'libiomp5.so'}"
