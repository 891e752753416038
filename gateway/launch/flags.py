"""Every flag of `penstock serve`, in one table.

How the settings are put together is said in `cli`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.engine.config import (
    CUDAGRAPH_MODES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.watchdog import DEFAULT_STEP_TIMEOUT_S
from penstock.gateway.config import GatewayConfig

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """A size such as `512M`, `2GiB` or `1000`; binary multiples.

    Raises:
        ValueError: it is no size.
    """
    digits = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:] in _SIZES else ""
    size = float(digits.removesuffix(unit)) * _SIZES[unit]
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a size")
    return int(size)


def seconds(text: str) -> float:
    """A time that has an end, 0 or more; milliseconds too.

    Raises:
        ValueError: it is none.
    """
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text!r} is not 0 or more")
    return value


def interval(text: str) -> float:
    """A time between two events that has an end, and is more than 0.

    Raises:
        ValueError: it is none.
    """
    value = seconds(text)
    if value == 0:
        raise ValueError(f"{text!r} is not more than 0")
    return value


def count(text: str) -> int:
    """1 or more.

    Raises:
        ValueError: it is less, or no whole number.
    """
    value = int(text)
    if value < 1:
        raise ValueError(f"{text!r} is not 1 or more")
    return value


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of `serve`: its flag, how its text is read, and where it belongs.

    A secret's text is in no message; `launch.cli` also takes it off the list of processes.
    """

    name: str
    default: Any
    help: str
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_secret: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "PENSTOCK_" + self.key.upper()


_MODEL, _CACHE, _SCHEDULER = ModelConfig(), CacheConfig(), SchedulerConfig()
_GATEWAY = GatewayConfig(engine_address="")

FLAGS: tuple[Flag, ...] = (
    # where it listens, whom it lets in, and how much of it
    Flag("host", "127.0.0.1", "address to listen on; the default takes only this machine"),
    Flag("port", 8000, "port to listen on; 0 takes a free one", int),
    Flag("api-workers", 1, "gateway processes on the one socket; more than one need --redis-url",
         count),
    Flag("api-key", (), "a key that callers must send; may be repeated", is_list=True,
         is_secret=True),
    Flag("api-keys-file", None, "a TOML file of keys with tenants, weights and limits; read again "
         "when it changes"),
    Flag("allowed-origins", (), "browser origins let in besides the server's own; may be "
         "repeated, * for all", is_list=True),
    Flag("ssl-certfile", None, "a PEM file of the server's certificate: speak TLS"),
    Flag("ssl-keyfile", None, "a PEM file of its key; default: in the certificate's file"),
    Flag("ssl-keyfile-password", None, "what the key is encrypted with", is_secret=True),
    Flag("served-model-name", (), "name(s) of the model in the API; default: MODEL as given",
         is_list=True),
    Flag("trust-request-chat-template", False, "let requests bring their own chat template. Only "
         "for callers you trust: a template is a program; each may take 2 s of a core and 512 MiB, "
         "and they wait for one another"),
    Flag("max-body-bytes", _GATEWAY.max_body_bytes, "largest request body", parse_bytes),
    Flag("max-prompt-bytes", None, "largest text of a prompt that is tokenised where the context "
         "and the longest token set no limit (tokenizers that shorten text, /tokenize, "
         "truncate_prompt_tokens); default: 16 bytes per token of the context, at least 1MiB",
         parse_bytes),
    Flag("max-connections", _GATEWAY.max_connections, "connections of a gateway process, "
         "TLS handshakes and WebSockets included; those beyond are answered 503", count),
    Flag("header-timeout-s", _GATEWAY.header_timeout_s, "seconds in which a TLS handshake must be "
         "done, and a request's header must then be here", interval),
    Flag("body-timeout-s", _GATEWAY.body_timeout_s, "seconds in which its body must then be here",
         seconds),
    Flag("keep-alive-s", _GATEWAY.keep_alive_s, "seconds a connection without a request is kept; "
         "more than clients and proxies keep theirs", interval),
    Flag("ping-interval-s", _GATEWAY.ping_interval_s, "seconds of silence after which an event "
         "stream carries a comment; a WebSocket is pinged as often", interval),
    Flag("stream-interval-ms", _GATEWAY.stream_interval_ms, "least time between two events of a "
         "stream, whose text is merged; 0: one per iteration", seconds),
    # whom it refuses when there is too much to do
    Flag("max-queue-requests", _GATEWAY.max_queue_requests, "requests that may wait", count),
    Flag("max-queue-tokens", _GATEWAY.max_queue_tokens, "prompt tokens that may wait", count),
    Flag("request-deadline-ms", None, "refuse a request whose first token is predicted later than "
         "this; x-request-deadline-ms of a request goes before it", seconds),
    # conversations and responses
    Flag("redis-url", None, "keep them in Redis, to outlive and share them, as redis://HOST:6379/0 "
         "or rediss:// for TLS", is_secret=True),
    Flag("redis-patience-ms", _GATEWAY.redis_patience_ms, "milliseconds that an event of a stored "
         "response waits for Redis; then it is shown, and the response cannot be resumed",
         interval),
    Flag("session-storage", _GATEWAY.session_storage, "while Redis is down: required refuses new "
         "sessions, optional runs them without storage", choices=("required", "optional")),
    Flag("session-ttl-s", _GATEWAY.session_ttl_s, "seconds for which an untouched conversation is "
         "kept in Redis", seconds),
    Flag("session-store-bytes", _GATEWAY.session_store_bytes, "memory for conversations, without "
         "Redis", parse_bytes),
    Flag("session-retention-s", _GATEWAY.session_retention_s, "seconds for which the KV of a "
         "stored response is preferred to other cached KV; 0: not at all", seconds),
    Flag("response-log-bytes", _GATEWAY.response_log_bytes, "memory for logs of responses "
         "that have ended, without Redis", parse_bytes),
    Flag("response-log-ttl-s", _GATEWAY.response_log_ttl_s, "seconds after its end in which a "
         "response can be resumed", seconds),
    Flag("disconnect-grace-s", _GATEWAY.disconnect_grace_s, "seconds for which a stored response "
         "runs on without a reader", seconds),
    # operation
    Flag("shutdown-grace-s", _GATEWAY.shutdown_grace_s, "seconds that streams have after SIGTERM",
         seconds),
    Flag("step-timeout-s", DEFAULT_STEP_TIMEOUT_S, "seconds without progress of a step after which "
         "the engine is killed, its stacks logged, and started again; 0: never", seconds),
    Flag("otlp-endpoint", None, "OpenTelemetry collector that traces go to, as "
         "http://localhost:4318"),
    Flag("log-level", _GATEWAY.log_level, "least severe messages logged",
         choices=("debug", "info", "warning", "error")),
    Flag("log-format", _GATEWAY.log_format, "lines of text, or one JSON object a line",
         choices=("text", "json")),
    # the model
    Flag("revision", None, "branch, tag or commit of a model on the Hub"),
    Flag("dtype", _MODEL.dtype, "type of weights and activations", choices=DTYPES),
    Flag("quantization", _MODEL.quantization, "int8: weights of the layers in a byte each, faster "
         "and a little less exact (CPU only)", choices=QUANTIZATIONS),
    Flag("load-format", _MODEL.load_format, "dummy: random weights, for measuring",
         choices=("auto", "dummy")),
    Flag("max-model-len", None, "context in tokens; default: the model's own", int),
    Flag("generation-config", _MODEL.generation_config,
         "auto: sampling defaults and EOS from generation_config.json", choices=("auto", "none")),
    # memory
    Flag("block-size", _CACHE.block_size, "tokens in a KV block", int),
    Flag("kv-cache-dtype", _CACHE.kv_cache_dtype, "fp8: half the memory for a token's KV, a little "
         "less exact (GPU only)", choices=KV_CACHE_DTYPES),
    Flag("kv-cache-memory-bytes", None, "memory for KV blocks, as 512M or 2GiB; default: a share "
         "of what is free", parse_bytes),
    Flag("gpu-memory-utilization", _CACHE.gpu_memory_utilization,
         "share of a GPU's memory to use in all", float),
    Flag("num-blocks", None, "KV blocks, instead of a size in bytes", int),
    Flag("enable-prefix-caching", _CACHE.enable_prefix_caching,
         "share KV between requests whose tokens begin alike"),
    Flag("swap-space", None, "GiB of host memory for KV that the device has no room for, 0: none; "
         "default: a moderate share of what is free", float),
    Flag("num-host-blocks", None, "KV blocks in host memory, instead of --swap-space", int),
    # scheduling
    Flag("max-num-seqs", _SCHEDULER.max_num_seqs, "sequences running at once", int),
    Flag("max-num-batched-tokens", _SCHEDULER.max_num_batched_tokens,
         "tokens computed in one step", int),
    Flag("enable-chunked-prefill", _SCHEDULER.enable_chunked_prefill,
         "compute a long prompt over several steps"),
    Flag("max-stall-ms", _SCHEDULER.max_stall_ms,
         "milliseconds that prompts may hold up, in one step, those who decode", float),
    Flag("preemption", _SCHEDULER.preemption, "what becomes of a sequence's KV when blocks run "
         "out; auto: what costs less", choices=("auto", "swap", "recompute")),
    Flag("scheduling-policy", _SCHEDULER.scheduling_policy,
         "fcfs: by arrival; priority: by the requests' priority first",
         choices=("fcfs", "priority")),
    Flag("priority-aging-s", _SCHEDULER.priority_aging_s,
         "seconds of waiting that move a request up by one priority", float),
    # the device
    Flag("device", "auto", "where the model runs", choices=("auto", "cpu", "cuda")),
    Flag("deterministic", False, "results do not depend on what else is computed: batch, chunks, "
         "preemption, caches; slower on a GPU"),
    Flag("cudagraph-mode", "auto", "what a GPU replays instead of launching it kernel by kernel; "
         "full: batches of decodes whole, others between attentions; auto: full on a GPU",
         choices=CUDAGRAPH_MODES),
    Flag("enforce-eager", False, "no CUDA graphs"),
    Flag("num-threads", None, "CPU threads of the engine; default: one a core", int),
)  # fmt: skip
