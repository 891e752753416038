"""Our own server, started and asked like any other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version

from penstock.engine.errors import ConfigError
from penstock.load.launch import server
from penstock.load.peers import models
from penstock.load.peers.environments import BUILD
from penstock.load.peers.http_server import measure_http
from penstock.load.peers.rival import RivalError, Setting
from penstock.load.peers.workloads import Workload
from penstock.load.workloads.driver import RunResult


class Penstock:
    name = "penstock"
    title = "penstock"

    def prepare(self, model: str) -> str:
        models.make(model)
        return version("penstock")

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
        log = BUILD / "logs" / f"penstock-{model}-{setting.name}.log"
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
