"""The engine's process: one step loop without asyncio, connected to gateways by `transport`.

Run by the supervisor as `python -m penstock.engine.process`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import ssl
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.blocks.lasting_pool import LastingPool
from penstock.engine.config import SECTIONS, EngineConfig, TlsFiles
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import InvalidRequestError
from penstock.engine.models.registry import is_native
from penstock.engine.process import garbage
from penstock.engine.process.launch import HEARTBEAT_FD, LISTEN_FD, Status, run_child
from penstock.engine.process.logs import LogWriter, configure_logging
from penstock.engine.process.template import (
    common_file,
    decline_template,
    has_gpu,
    leave_template,
)
from penstock.engine.process.watchdog import Watchdog, heartbeat
from penstock.engine.protocol.messages import (
    SHORT_KEY_BYTES,
    Abort,
    BlocksStored,
    CachedKeys,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Epoch,
    FetchBlocks,
    Hold,
    KVBlock,
    KVBlocks,
    Submit,
    UnloadAdapter,
    WantKeys,
)
from penstock.engine.protocol.sockets import GatewayGone, GatewayId, Inbound, Transport
from penstock.engine.protocol.tls import CurrentContext, engine_context
from penstock.engine.request import (
    FinishReason,
    RequestOutput,
    StructuredOutputs,
    refusal,
)
from penstock.engine.scheduling import Scheduler
from penstock.engine.startup import build_core
from penstock.engine.structured_outputs.grammar_sandbox import GrammarSandbox
from penstock.kernels.cpu.cores import keep_on, share_of_cores

_LOG = logging.getLogger(__name__)
_TITLE = "penstock-engine"
_MAX_ANSWER_BYTES = 8 << 20  # of blocks, but one is always sent
_STATS_INTERVAL_S = 0.1  # while no request starts or ends
_LEAVE_S = 0.1  # for what gateways sent before they heard that the engine drains


@dataclass(frozen=True, slots=True)
class _Owner:
    gateway_id: GatewayId
    name: str
    epoch: Epoch


@dataclass(slots=True)
class TransferCounters:
    """KV blocks since start: sent to other engines, kept from them, and refused."""

    num_sent: int = 0
    num_received: int = 0
    num_refused: int = 0


class EngineServer:
    """Steps a core while there is work, and blocks while there is none.

    Args:
        remote: see `Transport`.
        drain_s: how long `stop` waits for the gateways to take their requests elsewhere.

    Attributes:
        transport: the connections of gateways.
    """

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        address: str,
        *,
        remote: tuple[socket.socket, Callable[[], ssl.SSLContext]] | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self._core = core
        self._bytes_per_block = info.bytes_per_block
        self._kv_root, self._num_block_bytes = info.kv_root, info.num_block_bytes
        self._transfers = TransferCounters()
        self._fetching: set[GatewayId] = set()  # gateways that still want blocks
        self.transport = Transport(address, info, remote=remote)
        core.wake_by(self.transport.interrupt)
        # Gateways of this machine have checked their grammars; others need not have.
        self._grammar_sandbox: GrammarSandbox | None = None
        core.grammars.check = _take_for_checked
        if remote is not None:
            self._grammar_sandbox = GrammarSandbox(
                info.model_path, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
            )
            core.grammars.check = self._grammar_sandbox.check
        self._owners: dict[str, _Owner] = {}  # by request id
        self._request_ids: dict[str, str] = {}  # by name
        self._num_keys: dict[GatewayId, int] = {}  # messages that each gateway that wants keys got
        self._drain_s = drain_s
        self._num_stops = 0
        self._is_stopping = False
        self._end_s: float | None = None  # when draining ends; None: it has not begun
        self._may_end_s = 0.0  # when it may end, if no request is left
        self._stats_due_s = 0.0

    @property
    def request_ids(self) -> Set[str]:
        """The ids of the requests that are not answered yet."""
        return self._owners.keys()

    def start(self) -> None:
        """Start answering gateways."""
        self._publish_stats()
        self.transport.start()

    def stop(self) -> None:
        """End `run` after the current step, or once the requests have left; the second call waits
        for nothing. Safe in a signal handler."""
        self._num_stops += 1
        self._is_stopping = self._num_stops > 1 or not self._drain_s
        self.transport.interrupt()

    def run(self) -> None:
        """Step until stopped. An exception ends the loop, and the gateways are told why."""
        failure = "the engine was shut down"
        try:
            while not self._is_stopping:
                has_work = self._core.has_work()
                if not has_work:
                    self.transport.last_step_s = None
                    self._publish_keys()
                    garbage.collect(garbage.FEW_OBJECTS)
                if self._num_stops and self._has_drained():
                    break
                for inbound in self.transport.receive(timeout_s=self._patience_s(has_work)):
                    if self.transport.last_step_s is None:
                        self.transport.last_step_s = time.monotonic()
                    self._handle(inbound)
                if self.transport.last_step_s is None and self._core.has_work():
                    self.transport.last_step_s = time.monotonic()  # what was waited for is loaded
                    self._stats_due_s = 0.0
                self._send(self._core.step())
                self.transport.last_step_s = time.monotonic()
                garbage.collect(garbage.MANY_OBJECTS)
        except BaseException as error:
            failure = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            if self._grammar_sandbox is not None:
                self._grammar_sandbox.close()
            self.transport.close(failure)
            self._core.close()

    # -- called by the watchdog's thread -----------------------------------------------------

    def last_step_s(self) -> float | None:
        return self.transport.last_step_s

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
        elif isinstance(message, Hold):
            self._core.hold(message.request_id, message.return_s)
        elif isinstance(message, DropPrefix):
            self._core.drop_prefix(
                message.token_ids,
                cache_salt=message.cache_salt,
                adapter=message.adapter,
                images=message.images,
            )
        elif isinstance(message, UnloadAdapter):
            self._core.unload_adapter(message.name)
        elif isinstance(message, WantKeys):
            self._publish_all_keys(gateway_id)
        elif isinstance(message, FetchBlocks):
            self._fetch(gateway_id, message)
        elif isinstance(message, KVBlocks):
            self._store(gateway_id, message)
        elif isinstance(message, GatewayGone):
            self._num_keys.pop(gateway_id, None)
            self._fetching.discard(gateway_id)
            for request_id in list(self._owners):
                if self._is_owner(gateway_id, request_id):
                    self._abort(request_id)
        self._publish_stats()
        self._stats_due_s = 0.0  # the next step's stats show the effect

    def _patience_s(self, has_work: bool) -> float | None:
        """How long to wait for messages; None: for ever."""
        if has_work:
            return 0.0
        return None if self._end_s is None else _LEAVE_S / 4

    def _has_drained(self) -> bool:
        """Whether the engine, which was told to stop, may end."""
        now_s = time.monotonic()
        if self._end_s is None:
            self._end_s = now_s + self._drain_s
            self._may_end_s = now_s + (_LEAVE_S if self.transport.drain() else 0.0)
        is_needed = self._owners or self._fetching
        return now_s >= self._end_s or (not is_needed and now_s >= self._may_end_s)

    def _is_owner(self, gateway_id: GatewayId, request_id: str) -> bool:
        owner = self._owners.get(request_id)
        return owner is not None and owner.gateway_id == gateway_id

    def _submit(self, gateway_id: GatewayId, submit: Submit) -> None:
        request_id = submit.request.request_id
        new = _Owner(gateway_id, submit.name or request_id, submit.epoch)
        old_id = self._request_ids.get(new.name)
        if request_id in self._owners and request_id != old_id:
            error = InvalidRequestError(f"request id {request_id!r:.100} is in use")
            self.transport.send(gateway_id, (refusal(request_id, error),))
            return
        if old_id is not None:
            old = self._owners[old_id]
            if new.epoch <= old.epoch:
                self._supersede(new, request_id)
                return
            self._abort(old_id)
            self._supersede(old, old_id)
        try:
            self._core.add(submit.request)
        except InvalidRequestError as refused:
            self.transport.send(gateway_id, (refusal(request_id, refused),))
            return
        self._owners[request_id] = new
        self._request_ids[new.name] = request_id

    def _supersede(self, owner: _Owner, request_id: str) -> None:
        """Tell a gateway that another one runs its request."""
        end = RequestOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            is_last=True,
            error="another gateway runs this request under a higher epoch",
            is_superseded=True,
        )
        self.transport.send(owner.gateway_id, (end,))

    def _abort(self, request_id: str, *, index: int | None = None) -> None:
        self._core.abort(request_id, index=index)
        if not self._core.has_request(request_id):
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._request_ids[self._owners.pop(request_id).name]

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
            self._publish_keys()
        for gateway_id, frame in frames.items():
            self.transport.send(gateway_id, tuple(frame))

    def _publish_stats(self) -> None:
        self.transport.stats = stats_snapshot(
            self._core.scheduler,
            bytes_per_block=self._bytes_per_block,
            num_awaiting=len(self._core.preparation),
            num_grammars=self._core.grammars.num_kept,
            transfers=self._transfers,
        )
        self._stats_due_s = time.monotonic() + _STATS_INTERVAL_S

    # -- keys of cached blocks, for gateways that ask -----------------------------------------

    def _publish_keys(self) -> None:
        """Send what has changed to those who want it."""
        if not self._num_keys:
            return
        journal = self._core.scheduler.blocks.tiers.cache.journal
        if not journal:
            return
        changes = journal.take()
        added, removed = map(_short, changes) if changes is not None else (b"", b"")
        # A gateway that has not got everything finds a gap, and asks again.
        step = 1 if changes is not None else 2
        for gateway_id in self._num_keys:
            self._num_keys[gateway_id] += step
            number = self._num_keys[gateway_id]
            self.transport.publish(
                gateway_id, CachedKeys(number=number, added=added, removed=removed)
            )

    def _publish_all_keys(self, gateway_id: GatewayId) -> None:
        self._publish_keys()  # so that the next change follows on what is sent now, for all
        cache = self._core.scheduler.blocks.tiers.cache
        if not self._num_keys:
            cache.journal.take()
        number = self._num_keys[gateway_id] = self._num_keys.get(gateway_id, 0) + 1
        snapshot = CachedKeys(number=number, added=_short(cache.keys()), is_snapshot=True)
        self.transport.publish(gateway_id, snapshot)

    # -- blocks for other engines, which gateways pass on ---------------------------------------

    def _fetch(self, gateway_id: GatewayId, wanted: FetchBlocks) -> None:
        if not wanted.keys:
            self._fetching.discard(gateway_id)
            return
        self._fetching.add(gateway_id)
        blocks: tuple[KVBlock, ...] = ()
        if self._kv_root:
            most = max(1, _MAX_ANSWER_BYTES // self._num_block_bytes)
            blocks = tuple(
                KVBlock(
                    parent=block.parent,
                    tokens=block.tokens,
                    key=block.key or b"",
                    data=data,
                    checksum=zlib.crc32(data),
                )
                for block, data in self._core.read_blocks(wanted.keys[:most])
            )
        self._transfers.num_sent += len(blocks)
        self.transport.answer(
            gateway_id, KVBlocks(number=wanted.number, kv_root=self._kv_root, blocks=blocks)
        )

    def _store(self, gateway_id: GatewayId, sent: KVBlocks) -> None:
        num_stored = 0
        try:
            for block in sent.blocks:
                if sent.kv_root != self._kv_root or not self._kv_root:
                    raise ValueError("it is of another model, type or layout")
                if zlib.crc32(block.data) != block.checksum:
                    raise ValueError("its bytes have changed on the way")
                if not self._core.store_block(block.parent, block.tokens, block.key, block.data):
                    break
                num_stored += 1
        except ValueError as error:
            self._transfers.num_refused += len(sent.blocks) - num_stored
            _LOG.warning("refused another engine's KV block: %s", error)
        self._transfers.num_received += num_stored
        self.transport.answer(gateway_id, BlocksStored(number=sent.number, num_blocks=num_stored))


def _take_for_checked(_: StructuredOutputs) -> None:
    """A grammar of a gateway that checks its grammars."""


def _short(keys: Iterable[bytes]) -> bytes:
    return b"".join(key[:SHORT_KEY_BYTES] for key in keys)


def parsed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The process's settings, with an `EngineConfig` in place of the plain mapping that
    `dataclasses.asdict` makes of one."""
    values = config["engine"]
    sections: dict[str, Any] = {name: kind(**values[name]) for name, kind in SECTIONS.items()}
    return {**config, "engine": EngineConfig(**sections)}


def serve(config: Mapping[str, Any], status: Status) -> None:
    """The process: load, report ready, step until SIGTERM.

    Args:
        config: as `parsed` returns it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles it
    # On SIGUSR1 from the supervisor, write all stacks to the log; this does not need the GIL.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log = configure_logging(config["log_level"], config["log_format"])
    engine: EngineConfig = config["engine"]
    _take_share(config.get("index", 0), engine.device.num_sharing)
    remote = None
    if config.get("tls") is not None:  # before loading, as a mistake ends the start
        files = TlsFiles(*config["tls"])
        context = CurrentContext(partial(engine_context, files), files)
        remote = socket.socket(fileno=int(os.environ[LISTEN_FD])), context
    pool_file = common_file()
    lasting_pool = None if pool_file is None else LastingPool(pool_file)
    core, info = build_core(engine, lasting_pool=lasting_pool)
    if num_left := core.scheduler.blocks.tiers.device.num_cached:
        _LOG.info("found %d KV blocks of the engine before", num_left)
    drain_s = config.get("drain_s", 0.0)
    server = EngineServer(core, info, config["address"], remote=remote, drain_s=drain_s)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    garbage.keep_out_of_steps()
    server.start()
    _watch(server, config["step_timeout_s"], log)
    status.ready(
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        weight_bytes=info.weight_bytes,
        max_model_len=info.max_model_len,
        kv_cache_tokens=info.num_blocks * info.block_size,
        is_native=is_native(engine.model, Path(info.model_path)),
    )
    server.run()


def _take_share(index: int, num: int) -> None:
    """Use one share of this machine's cores or GPUs, of several engines on it."""
    if num == 1:
        return
    keep_on(share_of_cores(index, num))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(_num_gpus())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]


def _num_gpus() -> int:
    """The machine's, without asking torch, which would then not see the choice."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _watch(server: EngineServer, step_timeout_s: float, log: LogWriter) -> None:
    """End the process when a step hangs; a timeout of 0 turns this off."""

    def end(code: int) -> None:
        log.drain()
        os._exit(code)

    if step_timeout_s:
        show_life = heartbeat(int(os.environ[HEARTBEAT_FD]))
        Watchdog(server, timeout_s=step_timeout_s, end=end, show_life=show_life).start()


def stats_snapshot(
    scheduler: Scheduler,
    *,
    bytes_per_block: int,
    num_grammars: int,
    num_awaiting: int = 0,
    transfers: TransferCounters,
) -> EngineStats:
    """The engine's current numbers. Not called for every step, since a quick step takes only a few
    times as long as this."""
    blocks = scheduler.blocks
    device, host = blocks.tiers.device, blocks.tiers.host
    counted, moved, drafted = scheduler.counters, blocks.counters, scheduler.drafting.counters
    num_slots, num_empty = scheduler.slots()
    return EngineStats(
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting + num_awaiting,
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
        num_held_blocks_evicted_total=device.num_held_evictions,
        num_turns_held_total=blocks.counters.num_holds,
        num_turns_returned_total=blocks.counters.num_returns,
        num_blocks_expected=device.num_all_expected,
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
        num_kv_blocks_sent_total=transfers.num_sent,
        num_kv_blocks_received_total=transfers.num_received,
        num_kv_blocks_refused_total=transfers.num_refused,
        kv_sent_bytes_total=transfers.num_sent * bytes_per_block,
        kv_received_bytes_total=transfers.num_received * bytes_per_block,
        spent_compute_us_total=counted.spent_compute_us,
        spent_block_us_total=counted.spent_block_us,
    )


def prepare(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings (`parsed`). Leaves a template behind, from which the engine starts again without
    its imports: not where it may use a GPU, whose driver a fork cannot share, nor for ranks, which
    start on their own."""
    config = parsed(config)
    engine: EngineConfig = config["engine"]
    if engine.device.num_ranks > 1 or (engine.device.device != "cpu" and has_gpu()):
        decline_template()
    else:
        leave_template(_TITLE)
    return config


def main() -> int:
    """Run as a child of the supervisor; the process's exit code."""
    return run_child(_TITLE, serve, prepare=prepare)
