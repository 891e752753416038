"""OpenVINO GenAI's continuous batching, in process: there is no server of its own to ask."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.load.peers import environments, models
from penstock.load.peers.environments import BUILD
from penstock.load.peers.in_process import InProcess
from penstock.load.peers.rival import Setting


class OpenVino:
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
        environment = environments.make(self.name)
        command = [
            *(str(environment.python), "-m", "penstock.load.peers.workers.openvino"),
            *(str(_exported(model)), *setting.flags),
        ]
        log = BUILD / "logs" / f"openvino-{model}-{setting.name}.log"
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
