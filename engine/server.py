"""The engine as its own process: one step loop, no asyncio, fed and drained through `wire`.

Run by the supervisor as `python -m penstock.engine.server`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import InvalidRequestError
from penstock.engine.logs import LogWriter, configure_logging
from penstock.engine.messages import Abort, DropPrefix, EngineInfo, Epoch, Submit
from penstock.engine.process import PULSE_FD, Status, run_child
from penstock.engine.request import FinishReason, RequestOutput
from penstock.engine.startup import build_core
from penstock.engine.stats import snapshot
from penstock.engine.watchdog import Watchdog, life_line
from penstock.engine.wire import GatewayGone, GatewayId, Inbound, Wire

_STATS_INTERVAL_S = 0.1  # while nothing ends and nothing begins


@dataclass(frozen=True, slots=True)
class _Owner:
    gateway_id: GatewayId
    name: str
    epoch: Epoch


class EngineServer:
    """Runs a core's steps while there is work, and waits without spinning while there is none."""

    def __init__(self, core: EngineCore, info: EngineInfo, address: str) -> None:
        self._core = core
        self._bytes_per_block = info.bytes_per_block
        self._wire = Wire(address, info)
        self._owners: dict[str, _Owner] = {}  # by request id
        self._request_ids: dict[str, str] = {}  # by name
        self._is_stopping = False
        self._stats_due_s = 0.0

    def start(self) -> None:
        """Begin to answer gateways."""
        self._publish_stats()
        self._wire.start()

    def stop(self) -> None:
        """End `run` after the current step; safe in a signal handler."""
        self._is_stopping = True
        self._wire.interrupt()

    def run(self) -> None:
        """Step until stopped. An exception of the device ends it: the gateways are told."""
        failure = "the engine was shut down"
        try:
            while not self._is_stopping:
                has_work = self._core.has_work()
                if not has_work:
                    self._wire.last_step_s = None
                for inbound in self._wire.receive(timeout_s=0.0 if has_work else None):
                    if self._wire.last_step_s is None:
                        self._wire.last_step_s = time.monotonic()
                    self._handle(inbound)
                self._send(self._core.step())
                self._wire.last_step_s = time.monotonic()
        except BaseException as error:
            failure = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._wire.close(failure)
            self._core.close()

    # -- for the watchdog, in its thread -----------------------------------------------------

    def last_step_s(self) -> float | None:
        return self._wire.last_step_s

    def num_parts_done(self) -> int:
        return self._core.num_parts_done()

    def describe(self) -> str:
        return self._core.describe()

    # -- the step loop -----------------------------------------------------------------------

    def _handle(self, inbound: Inbound) -> None:
        gateway_id, message = inbound
        if isinstance(message, Submit):
            self._submit(gateway_id, message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                if self._is_owner(gateway_id, request_id):
                    self._abort(request_id)
            for request_id, index in message.branches:
                if self._is_owner(gateway_id, request_id):
                    self._abort(request_id, index=index)
        elif isinstance(message, DropPrefix):
            self._core.drop_prefix(message.token_ids, cache_salt=message.cache_salt)
        elif isinstance(message, GatewayGone):
            for request_id in list(self._owners):
                if self._is_owner(gateway_id, request_id):
                    self._abort(request_id)
        self._publish_stats()
        self._stats_due_s = 0.0  # the next step will show what came of it

    def _is_owner(self, gateway_id: GatewayId, request_id: str) -> bool:
        owner = self._owners.get(request_id)
        return owner is not None and owner.gateway_id == gateway_id

    def _submit(self, gateway_id: GatewayId, submit: Submit) -> None:
        request_id = submit.request.request_id
        new = _Owner(gateway_id, submit.name or request_id, submit.epoch)
        old_id = self._request_ids.get(new.name)
        if old_id is not None:
            old = self._owners[old_id]
            if new.epoch <= old.epoch:
                self._supersede(new, request_id)
                return
            self._abort(old_id)
            self._supersede(old, old_id)
        try:
            self._core.add(submit.request)
        except InvalidRequestError as error:
            refusal = RequestOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                is_last=True,
                error=str(error),
                is_refused=True,
                param=error.param,
            )
            self._wire.send(gateway_id, (refusal,))
        else:
            self._owners[request_id] = new
            self._request_ids[new.name] = request_id

    def _supersede(self, owner: _Owner, request_id: str) -> None:
        """Tell a gateway that another one runs what it wanted."""
        end = RequestOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            is_last=True,
            error="another gateway runs it under a higher epoch",
            is_superseded=True,
        )
        self._wire.send(owner.gateway_id, (end,))

    def _abort(self, request_id: str, *, index: int | None = None) -> None:
        self._core.abort(request_id, index=index)
        if not self._core.scheduler.has_request(request_id):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._request_ids[self._owners.pop(request_id).name]

    def _send(self, outputs: list[RequestOutput]) -> None:
        """Hand an iteration's outputs to the wire, one frame per gateway."""
        frames: defaultdict[GatewayId, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            frames[self._owners[output.request_id].gateway_id].append(output)
            if output.is_last:
                self._forget(output.request_id)
                self._stats_due_s = 0.0
        if time.monotonic() >= self._stats_due_s:
            self._publish_stats()
        for gateway_id, frame in frames.items():
            self._wire.send(gateway_id, tuple(frame))

    def _publish_stats(self) -> None:
        self._wire.stats = snapshot(self._core.scheduler, bytes_per_block=self._bytes_per_block)
        self._stats_due_s = time.monotonic() + _STATS_INTERVAL_S


def parse_config(values: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from the plain mapping `dataclasses.asdict` makes of one."""
    return EngineConfig(
        model=ModelConfig(**values["model"]),
        cache=CacheConfig(**values["cache"]),
        scheduler=SchedulerConfig(**values["scheduler"]),
        device=DeviceConfig(**values["device"]),
    )


def serve(config: Mapping[str, Any], status: Status) -> None:
    """The process: load, report ready, step until SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    # Stacks into the log, without the interpreter's lock: the supervisor asks for them.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log = configure_logging(config["log_level"], config["log_format"])
    core, info = build_core(parse_config(config["engine"]))
    server = EngineServer(core, info, config["address"])
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    # What start-up made lives as long as the process: keep the collector from walking it.
    gc.collect()
    gc.freeze()
    server.start()
    _watch(server, config["step_timeout_s"], log)
    status.ready(
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        max_model_len=info.max_model_len,
        kv_cache_tokens=info.num_blocks * info.block_size,
    )
    server.run()


def _watch(server: EngineServer, step_timeout_s: float, log: LogWriter) -> None:
    """Have a step that does not end end the process; 0: nobody looks."""

    def end(code: int) -> None:
        log.drain()
        os._exit(code)

    if step_timeout_s:
        show_life = life_line(int(os.environ[PULSE_FD]))
        Watchdog(server, timeout_s=step_timeout_s, end=end, show_life=show_life).start()


if __name__ == "__main__":
    sys.exit(run_child("penstock-engine", serve))
