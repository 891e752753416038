"""What gateway and engine say to each other: msgpack frames over a Unix socket.

    gateway                                            engine
      Hello        ─────────────────────────────►
                   ◄─────────────────────────────      EngineInfo
      Submit, Abort, DropPrefix, Heartbeat  ────►
                   ◄─────────────────────────────      Step (numbered), Heartbeat, Failure

Frames are versioned by `PROTOCOL_VERSION` in `Hello` and in every `Submit`; `frames` writes and
reads them. The version is raised with every change of what a frame holds or means: a field added
to a message or to what it carries (an optional one too: it is read by its place, or refused by
name), taken away, renamed, moved, or given another type or sense; a new message; another way of
writing one. Engine and gateways of one server are of one release, so nobody reads another version:
the engine refuses it. Only `Hello` and `Failure` must stay as they are, or it could not say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import Request, RequestOutput

PROTOCOL_VERSION = 4
HEARTBEAT_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0  # a peer not heard of for this long is declared dead
# Counted so, and not in seconds: who stood still reads what has come before its next beat.
MAX_SILENT_BEATS = round(SILENCE_LIMIT_S / HEARTBEAT_INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is, told once to each gateway.

    Attributes:
        model: as the user named it.
        model_path: the directory its files lie in.
        num_blocks, block_size: the device KV pool; their product is its size in tokens.
        num_host_blocks: the second tier, in host memory.
        bytes_per_block: of either tier.
        max_num_seqs: sequences running at once; a request may have no more branches.
        num_threads: of the CPU; on a GPU those that serve it.
        quantization: of the weights, as `ModelConfig` has it.
        scheduling_policy: `fcfs`, or `priority`, where requests may carry one.
    """

    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int
    scheduling_policy: str
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    pid: int
    bytes_per_block: int = 0
    num_threads: int = 1
    quantization: str = "none"
    protocol_version: int = PROTOCOL_VERSION


# Of a submit: its owner's epoch, and how often that owner had submitted it before.
Epoch = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run a request.

    Two gateways may want the same to be computed: one that stood still, and one that has taken
    over what it ran. The engine runs one request under a name. A submit with a higher epoch
    replaces it at once; any other is refused as superseded.

    Attributes:
        request: its id is of this submit alone, so that neither a late abort nor a late output of
            another one under the same name can be taken for its own.
        name: what is computed, whoever submits it; empty: the request's id.
        epoch: compared among submits of one name.
    """

    request: Request
    name: str = ""
    epoch: Epoch = (1, 0)
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop requests, or single branches of requests that otherwise go on.

    Attributes:
        branches: pairs (request id, index of the branch).
    """

    request_ids: tuple[str, ...] = ()
    branches: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPrefix:
    """Forget the cached KV of these tokens, as far as nobody else uses it."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine. Counters (`*_total`) only grow.

    Attributes:
        num_tokens_waiting: those that the waiting requests are to compute.
        queue_tokens_per_s: such tokens leaving the queue while somebody waits; 0: not known yet.
        prefill_tokens_per_s: prompt tokens computed in steps that compute prompts; the same.
        num_requests_swapped: sequences parked with their KV in host memory.
        num_blocks_used, num_blocks_cached: device blocks held by sequences; free, but findable.
        num_host_blocks_kept, num_host_blocks_cached: the same of the host tier.
        num_slots_allocated, num_slots_empty: token slots of running sequences' blocks, and those
            of them that hold no token: their quotient is the waste.
        num_swap_fallbacks_total: victims recomputed because the host tier was full.
        num_blocks_copied_total: copies on write.
        num_blocks_evicted_total: cached blocks whose place was needed.
        prefix_cache_queries_total: tokens looked up, as vLLM counts.
        prefix_cache_hits_total: tokens found, of those host_hits in host memory.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_tokens_waiting: int = 0
    queue_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    num_requests_swapped: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_blocks: int = 0
    num_host_blocks_kept: int = 0
    num_host_blocks_cached: int = 0
    num_host_blocks: int = 0
    num_slots_allocated: int = 0
    num_slots_empty: int = 0
    num_requests_refused_total: int = 0
    num_preemptions_total: int = 0
    num_swap_preemptions_total: int = 0
    num_recompute_preemptions_total: int = 0
    num_swap_fallbacks_total: int = 0
    num_blocks_copied_total: int = 0
    num_blocks_evicted_total: int = 0
    num_host_blocks_evicted_total: int = 0
    swapped_out_bytes_total: int = 0
    swapped_in_bytes_total: int = 0
    swap_out_seconds_total: float = 0.0
    swap_in_seconds_total: float = 0.0
    num_steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_host_hits_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration's outputs of all streams of one gateway.

    Attributes:
        number: counts this gateway's frames from 1 without gaps: a gap is a bug or a lost frame.
        stats: None while they are those of an earlier frame, or not worth a look yet.
    """

    number: int
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        stats: the engine's.
        since_step_s: how long ago the engine's last step ended, or its work began; None while it
            has no work.
    """

    stats: EngineStats | None = None
    since_step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The engine cannot go on, or refuses this gateway; the last frame it sends."""

    message: str


Message = Hello | EngineInfo | Submit | Abort | DropPrefix | Step | Heartbeat | Failure
