"""The engine's process: one step loop without asyncio, connected to gateways by `transport`.

Run by the supervisor as `python -m penstock.engine.server`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import InvalidRequestError
from penstock.engine.logs import LogWriter, configure_logging
from penstock.engine.process import PULSE_FD, Status, run_child
from penstock.engine.request import FinishReason, Request, RequestOutput, StructuredOutputs
from penstock.engine.scheduling import Scheduler
from penstock.engine.startup import build_core
from penstock.engine.transport.messages import (
    Abort,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Epoch,
    Submit,
    UnloadAdapter,
)
from penstock.engine.transport.sockets import GatewayGone, GatewayId, Inbound, Transport
from penstock.engine.watchdog import Watchdog, life_line

_STATS_INTERVAL_S = 0.1  # while no request starts or ends


@dataclass(frozen=True, slots=True)
class _Owner:
    gateway_id: GatewayId
    name: str
    epoch: Epoch


class EngineServer:
    """Steps a core while there is work, and blocks while there is none."""

    def __init__(self, core: EngineCore, info: EngineInfo, address: str) -> None:
        self._core = core
        self._bytes_per_block = info.bytes_per_block
        self._transport = Transport(address, info)
        core.adapters.wake = self._transport.interrupt
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._compiled: deque[tuple[Request, InvalidRequestError | None]] = deque()
        self._owners: dict[str, _Owner] = {}  # by request id
        self._request_ids: dict[str, str] = {}  # by name
        # By request id, while its grammar is compiled: branches that were aborted meanwhile.
        self._left_branches: dict[str, list[int]] = {}
        self._is_stopping = False
        self._stats_due_s = 0.0

    def start(self) -> None:
        """Start answering gateways."""
        self._publish_stats()
        self._transport.start()

    def stop(self) -> None:
        """End `run` after the current step; safe in a signal handler."""
        self._is_stopping = True
        self._transport.interrupt()

    def run(self) -> None:
        """Step until stopped. An exception ends the loop, and the gateways are told why."""
        failure = "the engine was shut down"
        try:
            while not self._is_stopping:
                has_work = self._core.has_work()
                if not has_work:
                    self._transport.last_step_s = None
                for inbound in self._transport.receive(timeout_s=0.0 if has_work else None):
                    if self._transport.last_step_s is None:
                        self._transport.last_step_s = time.monotonic()
                    self._handle(inbound)
                while self._compiled:
                    self._transport.last_step_s = self._transport.last_step_s or time.monotonic()
                    self._add(*self._compiled.popleft())
                    self._stats_due_s = 0.0
                self._send(self._core.step())
                self._transport.last_step_s = time.monotonic()
        except BaseException as error:
            failure = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._compiling.shutdown(wait=False, cancel_futures=True)
            self._transport.close(failure)
            self._core.close()

    # -- called by the watchdog's thread -----------------------------------------------------

    def last_step_s(self) -> float | None:
        return self._transport.last_step_s

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
            self._core.drop_prefix(
                message.token_ids, cache_salt=message.cache_salt, adapter=message.adapter
            )
        elif isinstance(message, UnloadAdapter):
            self._core.adapters.unload(message.name)
        elif isinstance(message, GatewayGone):
            for request_id in list(self._owners):
                if self._is_owner(gateway_id, request_id):
                    self._abort(request_id)
        self._publish_stats()
        self._stats_due_s = 0.0  # the next step's stats show the effect

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
        self._owners[request_id] = new
        self._request_ids[new.name] = request_id
        grammar = submit.request.sampling_params.structured_outputs
        if grammar is None or grammar in self._core.grammars:
            self._add(submit.request)
        else:
            self._left_branches[request_id] = []
            self._compiling.submit(self._compile, submit.request, grammar)

    def _compile(self, request: Request, grammar: StructuredOutputs) -> None:
        """In a thread, as the streams go on meanwhile."""
        error = None
        try:
            self._core.grammars.compile(grammar)
        except InvalidRequestError as refusal:
            error = refusal
        except BaseException as failure:  # the thread's, which nobody waits for
            message = f"structured_outputs: cannot be compiled: {failure!r:.200}"
            error = InvalidRequestError(message, param="structured_outputs")
        self._compiled.append((request, error))
        self._transport.interrupt()

    def _add(self, request: Request, error: InvalidRequestError | None = None) -> None:
        """Add a request, or refuse it, unless it was aborted meanwhile.

        Args:
            error: why its grammar cannot be used.
        """
        request_id = request.request_id
        owner = self._owners.get(request_id)
        if owner is None:
            return
        try:
            if error is not None:
                raise error
            self._core.add(request)
            for index in self._left_branches.pop(request_id, ()):
                self._abort(request_id, index=index)
        except InvalidRequestError as refused:
            self._forget(request_id)
            refusal = RequestOutput(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                is_last=True,
                error=str(refused),
                is_refused=True,
                param=refused.param,
            )
            self._transport.send(owner.gateway_id, (refusal,))

    def _supersede(self, owner: _Owner, request_id: str) -> None:
        """Tell a gateway that another one runs its request."""
        end = RequestOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            is_last=True,
            error="another gateway runs this request under a higher epoch",
            is_superseded=True,
        )
        self._transport.send(owner.gateway_id, (end,))

    def _abort(self, request_id: str, *, index: int | None = None) -> None:
        if index is not None and request_id in self._left_branches:
            self._left_branches[request_id].append(index)
            return
        self._core.abort(request_id, index=index)
        if not self._core.has_request(request_id):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._request_ids[self._owners.pop(request_id).name]
        self._left_branches.pop(request_id, None)

    def _send(self, outputs: list[RequestOutput]) -> None:
        """Hand an iteration's outputs to the transport, one frame per gateway."""
        frames: defaultdict[GatewayId, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            frames[self._owners[output.request_id].gateway_id].append(output)
            if output.is_last:
                self._forget(output.request_id)
                self._stats_due_s = 0.0
        if time.monotonic() >= self._stats_due_s:
            self._publish_stats()
        for gateway_id, frame in frames.items():
            self._transport.send(gateway_id, tuple(frame))

    def _publish_stats(self) -> None:
        self._transport.stats = stats_snapshot(
            self._core.scheduler,
            bytes_per_block=self._bytes_per_block,
            num_awaiting_adapters=len(self._core.adapters),
            num_grammars=len(self._core.grammars),
        )
        self._stats_due_s = time.monotonic() + _STATS_INTERVAL_S


def parse_config(values: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` from the plain mapping `dataclasses.asdict` makes of one."""
    return EngineConfig(
        model=ModelConfig(**values["model"]),
        cache=CacheConfig(**values["cache"]),
        scheduler=SchedulerConfig(**values["scheduler"]),
        device=DeviceConfig(**values["device"]),
        lora=LoraConfig(**values["lora"]),
    )


def serve(config: Mapping[str, Any], status: Status) -> None:
    """The process: load, report ready, step until SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles it
    # On SIGUSR1 from the supervisor, write all stacks to the log; this does not need the GIL.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log = configure_logging(config["log_level"], config["log_format"])
    core, info = build_core(parse_config(config["engine"]))
    server = EngineServer(core, info, config["address"])
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    # Objects made at start-up live as long as the process: keep the collector from scanning them.
    gc.collect()
    gc.freeze()
    server.start()
    _watch(server, config["step_timeout_s"], log)
    status.ready(
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        weight_bytes=info.weight_bytes,
        max_model_len=info.max_model_len,
        kv_cache_tokens=info.num_blocks * info.block_size,
    )
    server.run()


def _watch(server: EngineServer, step_timeout_s: float, log: LogWriter) -> None:
    """End the process when a step hangs; a timeout of 0 turns this off."""

    def end(code: int) -> None:
        log.drain()
        os._exit(code)

    if step_timeout_s:
        show_life = life_line(int(os.environ[PULSE_FD]))
        Watchdog(server, timeout_s=step_timeout_s, end=end, show_life=show_life).start()


def stats_snapshot(
    scheduler: Scheduler,
    *,
    bytes_per_block: int,
    num_grammars: int,
    num_awaiting_adapters: int = 0,
) -> EngineStats:
    """The engine's current numbers. Not called for every step, since a quick step takes only a few
    times as long as this."""
    blocks = scheduler.blocks
    device, host = blocks.tiers.device, blocks.tiers.host
    counted, moved, drafted = scheduler.counters, blocks.counters, scheduler.drafting.counters
    num_slots, num_empty = scheduler.slots()
    return EngineStats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting + num_awaiting_adapters,
        num_tokens_waiting=scheduler.num_tokens_waiting,
        queue_tokens_per_s=scheduler.queue_tokens_per_s,
        prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
        num_requests_swapped=blocks.num_swapped_sequences,
        num_blocks_used=device.num_held,
        num_blocks_cached=device.num_cached,
        num_blocks=device.num_blocks,
        num_host_blocks_kept=host.num_held,
        num_host_blocks_cached=host.num_cached,
        num_host_blocks=host.num_blocks,
        num_slots_allocated=num_slots,
        num_slots_empty=num_empty,
        num_requests_refused_total=counted.num_refused,
        num_preemptions_total=counted.num_preemptions,
        num_swap_preemptions_total=counted.num_swaps,
        num_recompute_preemptions_total=counted.num_recomputes,
        num_swap_fallbacks_total=counted.num_fallbacks,
        num_blocks_copied_total=moved.num_copied,
        num_blocks_evicted_total=device.num_evictions,
        num_host_blocks_evicted_total=host.num_evictions,
        swapped_out_bytes_total=moved.num_swapped_out * bytes_per_block,
        swapped_in_bytes_total=moved.num_swapped_in * bytes_per_block,
        swap_out_seconds_total=counted.swap_out_s,
        swap_in_seconds_total=counted.swap_in_s,
        num_steps_total=counted.num_steps,
        prompt_tokens_total=counted.prompt_tokens,
        generation_tokens_total=counted.generation_tokens,
        prefix_cache_queries_total=moved.prefix_queries,
        prefix_cache_hits_total=moved.prefix_hits,
        prefix_cache_host_hits_total=moved.prefix_host_hits,
        num_grammars=num_grammars,
        num_grammar_masks_total=counted.num_masks,
        grammar_masks_seconds_total=counted.masks_s,
        num_drafts_total=drafted.num_drafts,
        num_draft_tokens_total=drafted.num_draft_tokens,
        num_accepted_tokens_total=drafted.num_accepted_tokens,
        num_accepted_tokens_per_pos_total=tuple(drafted.accepted_by_position),
    )


if __name__ == "__main__":
    sys.exit(run_child("penstock-engine", serve))
