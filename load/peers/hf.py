"""Hugging Face transformers, in process: static padded batches, and its continuous batching."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD
from penstock.load.peers.in_process import InProcess
from penstock.load.peers.rival import Setting

# On a CPU it does not find out by itself how much memory to take.
_BLOCKS = {"page_size": 64, "num_blocks": 1024, "max_batch_tokens": 2048}


class HuggingFace:
    name = "hf"
    title = "Hugging Face transformers, in process"

    def prepare(self, model: str) -> str:
        models.make(model)
        return environments.make(self.name).version("transformers")

    def settings(self, model: str) -> Sequence[Setting]:
        del model
        return (
            Setting(name="static", flags=("static", "{}")),
            Setting(name="continuous", flags=("continuous", json.dumps(_BLOCKS))),
        )

    def start(self, model: str, setting: Setting) -> InProcess:
        environment = environments.make(self.name)
        command = [
            *(str(environment.python), "-m", "penstock.load.peers.workers.hf"),
            *(str(models.make(model)), *setting.flags),
        ]
        env = {"HF_HUB_OFFLINE": "1", **setting.env}
        log = BUILD / "logs" / f"hf-{model}-{setting.name}.log"
        return InProcess(command, model=model, env=env, log=log)
