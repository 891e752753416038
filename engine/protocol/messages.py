"""The messages between gateway and engine: msgpack frames over a Unix socket, or
over TCP with mutual TLS.

    gateway                                            engine
      Hello        ─────────────────────────────►
                   ◄─────────────────────────────      EngineInfo
      Submit, Abort, Hold, DropPrefix,───────────►
      UnloadAdapter, WantKeys, Heartbeat
                   ◄─────────────────────────────      Step (numbered), CachedKeys (numbered),
                                                       Heartbeat, Draining, Failure
      FetchBlocks  ─────────────────────────────►
                   ◄─────────────────────────────      KVBlocks
      KVBlocks     ─────────────────────────────►      (to another engine)
                   ◄─────────────────────────────      BlocksStored

Frames are versioned by `PROTOCOL_VERSION` in `Hello` and in every `Submit`; `frames` encodes and
decodes them. The version is raised with every change of content or meaning: a field of a message
or of its contents that is added (an optional one too, since fields are read by position), removed,
renamed, moved, or given another type or meaning; a new message; another encoding. Engine and
gateways of one server are of one release, so the engine refuses any other version. Only `Hello`
and `Failure` must never change, or the engine could not say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from penstock.engine.request import (
    Adapter,
    Count,
    ImageInput,
    Request,
    RequestOutput,
    Seconds,
    TokenId,
)

PROTOCOL_VERSION = 26
SHORT_KEY_BYTES = 4
HEARTBEAT_INTERVAL_S = 1.0
# A peer that is silent for this long is declared dead, at the next heartbeat.
SILENCE_LIMIT_S = 5.0
# Counted in heartbeats, not seconds: a suspended process reads what has arrived before it counts
# its next one.
MAX_SILENT_BEATS = round(SILENCE_LIMIT_S / HEARTBEAT_INTERVAL_S)
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_NumRequests = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]  # at once in an engine


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    protocol_version: int = PROTOCOL_VERSION


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="info"):
    """The engine's properties, sent once to each gateway.

    Attributes:
        model: as the user named it.
        model_path: the directory of its files.
        num_blocks, block_size: the device KV pool; their product is its size in tokens.
        num_host_blocks: the second tier, in host memory.
        bytes_per_block: in both tiers.
        max_num_seqs: sequences running at once; the maximum of a request's branches.
        num_threads: compute threads on a CPU; on a GPU, host threads.
        quantization: of the weights: as in `ModelConfig`, or the format of a quantized checkpoint;
            `none` if they are dense.
        weight_bytes: size of the weights in memory.
        scheduling_policy: `fcfs` or `priority`; only the latter accepts requests with a priority.
        adapters: those of `--lora-modules`.
        max_adapter_bytes: the largest file that an adapter of the model can have; 0: it takes none.
        cache_root: what all its KV depends on. Engines with the same one give the same tokens, and
            the same keys to cached blocks (`blocks.prefix_cache.chain_root`).
        kv_depends_on_prompt_len: KV depends on the prompt's length too.
        kv_root: `cache_root`, and how the bytes of a block are laid out; engines with the same one
            can exchange blocks. Empty: this engine neither sends nor takes blocks.
        num_block_bytes: of a block that is sent.
    """

    model: str
    model_path: str
    max_model_len: _Size
    vocab_size: _Size
    num_blocks: _Size
    block_size: _Size
    num_host_blocks: Count
    max_num_seqs: _Size
    scheduling_policy: str
    dtype: str
    device: str
    eos_token_ids: tuple[TokenId, ...]
    pid: Count
    bytes_per_block: Count = 0
    num_threads: Count = 1
    quantization: str = "none"
    weight_bytes: Count = 0
    adapters: tuple[Adapter, ...] = ()
    cache_root: bytes = b""
    kv_depends_on_prompt_len: bool = False
    kv_root: bytes = b""
    num_block_bytes: Count = 0
    max_adapter_bytes: Count = 0
    protocol_version: int = PROTOCOL_VERSION


# Of a submit: its owner's epoch, and how often that owner submitted it before.
Epoch = tuple[int, int]


class Submit(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="submit"):
    """Run a request.

    Two gateways may submit the same response: one that was suspended, and one that took over from
    it. The engine runs one request per name. A submit with a higher epoch replaces the running one
    at once; any other is refused as superseded.

    Attributes:
        request: its id is unique to this submit, so that a late abort or output of another submit
            of the same name cannot be mistaken for its own.
        name: identifies the response, whichever gateway submits it; empty means the request's id.
        epoch: compared among submits of one name.
    """

    request: Request
    name: str = ""
    epoch: Epoch = (1, 0)
    protocol_version: int = PROTOCOL_VERSION


class Abort(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="abort"):
    """Stop requests, or single branches of requests that continue.

    Attributes:
        branches: pairs (request id, index of the branch).
    """

    request_ids: tuple[str, ...] = ()
    branches: tuple[tuple[str, int], ...] = ()


class Hold(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hold"):
    """Keep for a while what a request left that ended a moment ago in a tool call: its session is
    expected back.

    Attributes:
        return_s: within which 95 % of such sessions come back.
    """

    request_id: str
    return_s: Seconds


class DropPrefix(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="drop_prefix"):
    """Forget the cached KV of these tokens, except blocks that are in use.

    Attributes:
        adapter: the digest of the adapter that computed it.
        images: those of the tokens, without their files.
    """

    token_ids: tuple[TokenId, ...]
    cache_salt: str = ""
    adapter: str | None = None
    images: tuple[ImageInput, ...] = ()


class UnloadAdapter(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="unload_adapter"
):
    """End all requests for the adapters of this name, whichever gateway they are from."""

    name: str


class WantKeys(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="want_keys"):
    """Send the keys of all cached blocks, and from then on each change of them."""


class CachedKeys(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="keys"):
    """Keys of cached full blocks: the first `SHORT_KEY_BYTES` of each, without separators.

    Attributes:
        number: counts them. A gap means that one was dropped, as this gateway read too slowly, or
            that too many keys changed at once; the gateway asks again.
        is_snapshot: `added` are all keys; what was known before is void.
    """

    number: Count
    added: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


class FetchBlocks(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="fetch_blocks"):
    """Send these full blocks. An engine that drains ends only when every gateway that has fetched
    blocks has fetched none.

    Attributes:
        number: of the answer, `KVBlocks`.
        keys: of a part of a chain, in its order.
    """

    number: Count
    keys: tuple[bytes, ...] = ()


class KVBlock(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One full block.

    Attributes:
        parent, tokens, key: as in `CachedBlock`.
        data: its bytes, as they lie in the host tier.
        checksum: of `data`: CRC-32.
    """

    parent: bytes
    tokens: bytes
    key: bytes
    data: bytes
    checksum: Count


class KVBlocks(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="kv_blocks"):
    """The blocks that were asked for, up to the first that the engine does not have. A gateway
    passes them on as they are to another engine, which keeps them in its host tier.

    Attributes:
        kv_root: the sender's, as in `EngineInfo`.
    """

    number: Count
    kv_root: bytes
    blocks: tuple[KVBlock, ...] = ()


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="blocks_stored"):
    """The answer to `KVBlocks`.

    Attributes:
        num_blocks: how many of them, from the first on, this engine has now. The next one was
            refused, or there was no room for it.
    """

    number: Count
    num_blocks: Count


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A snapshot of the engine. Counters (`*_total`) only grow.

    Attributes:
        num_tokens_waiting: tokens that the waiting requests have to compute.
        queue_tokens_per_s: rate of those tokens leaving a non-empty queue; 0 if not measured yet.
        prefill_tokens_per_s: rate of steps that compute prompts; 0 if not measured yet.
        num_requests_swapped: sequences parked with their KV in host memory.
        num_blocks_used, num_blocks_cached: device blocks held by sequences; free, but cached.
        num_host_blocks_kept, num_host_blocks_cached: the same for the host tier.
        num_slots_allocated, num_slots_empty: token slots of running sequences' blocks, and those
            of them without a token; empty ÷ allocated is the waste.
        num_swap_fallbacks_total: victims recomputed because the host tier was full.
        num_blocks_copied_total: copies on write.
        num_blocks_evicted_total: cached blocks evicted for new content.
        num_held_blocks_evicted_total: of those, blocks of sessions that were expected back.
        num_turns_held_total, num_turns_returned_total: that ended in a tool call and were kept, and
            those that were continued in time.
        num_blocks_expected: cached blocks of sessions that are expected back.
        prefix_cache_queries_total: tokens looked up, as vLLM counts.
        prefix_cache_hits_total: tokens found; host_hits of them in host memory.
        num_grammars: compiled ones that are kept.
        num_grammar_masks_total: masks of tokens made for grammars, and the seconds they took.
        num_drafts_total, num_draft_tokens_total, num_accepted_tokens_total: steps of a sequence
            with drafts, their drafts, and those that were right, as vLLM counts.
        num_accepted_tokens_per_pos_total: how many of the latter were the first, second … of their
            step; it has as many numbers as there were such places.
        num_kv_blocks_sent_total, num_kv_blocks_received_total: to and from other engines.
        num_kv_blocks_refused_total: from others, and not what they should have been.
        kv_sent_bytes_total, kv_received_bytes_total: of the blocks sent and received.
        spent_compute_us_total, spent_block_us_total: the sums of what outputs told (`Spent`).
    """

    num_requests_running: _NumRequests = 0
    num_requests_waiting: _NumRequests = 0
    num_tokens_waiting: Count = 0
    queue_tokens_per_s: _Rate = 0.0
    prefill_tokens_per_s: _Rate = 0.0
    num_requests_swapped: _NumRequests = 0
    num_blocks_used: Count = 0
    num_blocks_cached: Count = 0
    num_blocks: Count = 0
    num_host_blocks_kept: Count = 0
    num_host_blocks_cached: Count = 0
    num_host_blocks: Count = 0
    num_slots_allocated: Count = 0
    num_slots_empty: Count = 0
    num_requests_refused_total: Count = 0
    num_preemptions_total: Count = 0
    num_swap_preemptions_total: Count = 0
    num_recompute_preemptions_total: Count = 0
    num_swap_fallbacks_total: Count = 0
    num_blocks_copied_total: Count = 0
    num_blocks_evicted_total: Count = 0
    num_host_blocks_evicted_total: Count = 0
    num_held_blocks_evicted_total: Count = 0
    num_turns_held_total: Count = 0
    num_turns_returned_total: Count = 0
    num_blocks_expected: Count = 0
    swapped_out_bytes_total: Count = 0
    swapped_in_bytes_total: Count = 0
    swap_out_seconds_total: Seconds = 0.0
    swap_in_seconds_total: Seconds = 0.0
    num_steps_total: Count = 0
    prompt_tokens_total: Count = 0
    generation_tokens_total: Count = 0
    prefix_cache_queries_total: Count = 0
    prefix_cache_hits_total: Count = 0
    prefix_cache_host_hits_total: Count = 0
    num_grammars: Count = 0
    num_grammar_masks_total: Count = 0
    grammar_masks_seconds_total: Seconds = 0.0
    num_drafts_total: Count = 0
    num_draft_tokens_total: Count = 0
    num_accepted_tokens_total: Count = 0
    num_accepted_tokens_per_pos_total: tuple[Count, ...] = ()
    num_kv_blocks_sent_total: Count = 0
    num_kv_blocks_received_total: Count = 0
    num_kv_blocks_refused_total: Count = 0
    kv_sent_bytes_total: Count = 0
    kv_received_bytes_total: Count = 0
    spent_compute_us_total: Count = 0
    spent_block_us_total: Count = 0

    def drain_s(self, num_tokens: float) -> float:
        """Predicted seconds until this many tokens have left the queue; 0 if no rate is known."""
        # While the queue is empty, only computing the prompts takes time.
        is_empty = self.num_requests_waiting == 0
        rate = (0.0 if is_empty else self.queue_tokens_per_s) or self.prefill_tokens_per_s
        return num_tokens / rate if rate > 0 else 0.0


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="step"):
    """One iteration's outputs for all streams of one gateway.

    Attributes:
        number: counts this gateway's frames from 1; a gap means a bug or a lost frame.
        outputs: those that say more than one token of a request's first branch.
        stats: None if they have not changed since an earlier frame.
        tokens: the others, nearly all, by request; they follow `outputs`.
    """

    number: Count
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats | None = None
    tokens: dict[str, TokenId] = {}


def step_of(number: int, outputs: Iterable[RequestOutput], stats: EngineStats | None) -> Step:
    """The frame with these outputs; those of one request keep their order."""
    rest: list[RequestOutput] = []
    tokens: dict[str, int] = {}
    for output in outputs:
        request_id, token_ids = output.request_id, output.token_ids
        if request_id in tokens:
            rest.append(RequestOutput(request_id=request_id, token_ids=(tokens.pop(request_id),)))
        elif len(token_ids) == 1 and not (
            output.finish_reason  # most fields come with it
            or output.index
            or output.logprobs
            or output.prompt_logprobs
            or output.is_last
            or output.num_cached_tokens
            or output.notice
            or output.queue_position is not None
            or output.num_tokens_ahead
            or output.num_draft_tokens
            or output.num_accepted_tokens
            or output.spent
        ):
            tokens[request_id] = token_ids[0]
            continue
        rest.append(output)
    return Step(number=number, outputs=tuple(rest), stats=stats, tokens=tokens)


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="heartbeat"):
    """A sign of life.

    Attributes:
        stats: the engine's.
        since_step_s: seconds since the engine's last step ended, or since its work began; None
            while it has no work.
    """

    stats: EngineStats | None = None
    since_step_s: Seconds | None = None


class Draining(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="draining"):
    """The engine ends as soon as it has no requests, or after a while: take them elsewhere."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="failure"):
    """The engine is ending, or refuses this gateway; the last frame it sends."""

    message: str


Message = (
    Hello
    | EngineInfo
    | Submit
    | Abort
    | Hold
    | DropPrefix
    | UnloadAdapter
    | WantKeys
    | CachedKeys
    | FetchBlocks
    | KVBlocks
    | BlocksStored
    | Step
    | Heartbeat
    | Draining
    | Failure
)
