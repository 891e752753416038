"""Every option of `penstock serve`, in one table, grouped as `--help` shows them, and those of vLLM
that are accepted without effect.

`launch.cli` says how the settings are put together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from penstock.engine.config import (
    CUDAGRAPH_MODES,
    DTYPES,
    FITTING_LEN,
    KV_CACHE_DTYPES,
    MAX_BLOCK_SIZE,
    MAX_LORAS,
    MAX_RANKS,
    MODEL_IMPLS,
    QUANTIZATIONS,
    CacheConfig,
    DeviceConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.gateway.config import GatewayConfig, KVTransfer, Routing

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATIONS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "ms": 0.001}
_MAX_DURATION_S = 100 * 365 * 86400.0  # more overflows the integers of Redis
_MAX_COUNT = 1_000_000  # of sequences and tokens per step; buffers of this size still fit
_MAX_THREADS = 1024
_ADAPTER_KEYS = {"name", "path", "base_model_name"}


def parse_bytes(text: str) -> int:
    """A size in bytes, as `512M`, `2GiB` or `1000`; units are binary multiples.

    Raises:
        ValueError: it is no size.
    """
    digits = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:] in _SIZES else ""
    size = float(digits.removesuffix(unit)) * _SIZES[unit]
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a size")
    return int(size)


def parse_gib(text: str) -> float:
    """A size in GiB: a plain number, or a size with its unit, as `512M`.

    Raises:
        ValueError: it is neither.
    """
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text) / _SIZES["g"]


def parse_duration(text: str, *, unit_s: float = 1.0) -> float:
    """A duration, as `30`, `250ms`, `90s`, `10m`, `1.5h` or `30d`: from 0 to 100 years.

    Args:
        unit_s: what a plain number counts, in seconds; the result is in it too.

    Raises:
        ValueError: it is no duration.
    """
    digits = text.strip().lower()
    number = digits.rstrip("dhmins")
    unit = digits[len(number) :]
    if unit and unit not in _DURATIONS:
        raise ValueError(f"{text!r} has an unknown unit")
    value = float(number)
    if unit:
        value *= _DURATIONS[unit] / unit_s
    if not 0 <= value * unit_s <= _MAX_DURATION_S:
        raise ValueError(f"{text!r} is not a duration")
    return value


def show_bytes(size: int) -> str:
    """A size in the largest unit that divides it, as `256M`."""
    unit = max((name for name in _SIZES if size % _SIZES[name] == 0), key=_SIZES.__getitem__)
    return f"{size // _SIZES[unit]}{unit.upper()}"


def show_duration(value: float, *, unit_s: float = 1.0) -> str:
    """A duration in the largest unit that divides it, as `30d`; 0 has none."""
    ms = round(value * unit_s * 1000)
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(ms, round(_DURATIONS[unit] * 1000))
        if count and not rest:
            return f"{count}{unit}"
    return f"{ms}ms" if ms else "0"


def _integer(lowest: float = -math.inf, highest: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not lowest <= value <= highest:
            raise ValueError(f"{text!r} is out of range")
        return value

    return parse


def _block_size(text: str) -> int:
    value = int(text)
    if value % 2 or not 2 <= value <= MAX_BLOCK_SIZE:
        raise ValueError(f"{text!r} is no block size")
    return value


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is no address and port")
    return text


def parse_tokens(text: str) -> int:
    """A number of tokens, 1 or more, as vLLM reads it: `2k` is 2,000 and `2K` 2,048; so with m, g
    and t.

    Raises:
        ValueError: it is no such number.
    """
    digits, unit = text.strip(), 1
    if (power := "kmgt".find(digits[-1:].lower())) >= 0 and digits:
        unit = (1000 if digits[-1].islower() else 1024) ** (power + 1)
        digits = digits[:-1]
    number = float(digits) if unit % 10 == 0 else int(digits)
    if not 1 <= number * unit < math.inf or number * unit != int(number * unit):
        raise ValueError(f"{text!r} is no number of tokens")
    return int(number * unit)


def _context_len(text: str) -> int:
    return FITTING_LEN if text in ("auto", "-1") else parse_tokens(text)


def _batched_tokens(text: str) -> int:
    value = parse_tokens(text)
    if value > _MAX_COUNT:
        raise ValueError(f"{text!r} is too many")
    return value


def _logprobs(text: str) -> int:
    value = int(text)
    if value < -1:
        raise ValueError(f"{text!r} is negative")
    return value


def _json_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"{text!r} is no object")
    return text


def _adapters(text: str) -> list[str]:
    """`NAME=PATH` of an adapter in this form, in JSON, or of those of a JSON list."""
    if not text.lstrip().startswith(("{", "[")):
        return [text]
    found = json.loads(text)
    found = found if isinstance(found, list) else [found]
    for each in found:
        if not (isinstance(each, dict) and {"name", "path"} <= each.keys() <= _ADAPTER_KEYS):
            raise ValueError(f"{text!r} is no adapter")
    return [f"{each['name']}={each['path']}" for each in found]


def _origins(text: str) -> list[str]:
    """An origin, or those of a JSON list."""
    found = json.loads(text) if text.startswith("[") else [text]
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"{text!r} is no list of origins")
    return list(found)


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise ValueError(f"{text!r} is no path")
    return path


def _milliseconds(text: str) -> float:
    return parse_duration(text, unit_s=0.001)


def _positive(parse: Callable[[str], float]) -> Callable[[str], float]:
    def parse_positive(text: str) -> float:
        value = parse(text)
        if value == 0:
            raise ValueError(f"{text!r} is not more than 0")
        return value

    return parse_positive


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        metavar: stands for the value in `--help`.
        expected: what a value must be, for the message about one that is wrong.
        parse: raises ValueError for a wrong value.
        show: a default as `--help` shows it; a text that `parse` reads.
    """

    metavar: str
    expected: str
    parse: Callable[[str], Any] = str
    show: Callable[[Any], str] = str


_EXAMPLES = "such as 30s, 10m, 12h or 30d, 0 or more"
TEXT = Kind("TEXT", "a text")
HOST = Kind("HOST", "an address")
NAME = Kind("NAME", "a name")
JSON = Kind("JSON", "a JSON object", _json_object)
ADAPTER = Kind("NAME=PATH", 'NAME=PATH, or {"name": …, "path": …}', _adapters)
OVERRIDE = Kind("MODULE=KIND", "a module and a kind")
KEY = Kind("KEY", "a key")
ORIGIN = Kind("ORIGIN", "an origin", _origins)
FILE = Kind("FILE", "a path")
URL = Kind("URL", "a URL")
PORT = Kind("PORT", "between 0 and 65535", _integer(0, 65535))
INTEGER = Kind("N", "a whole number", _integer())
REPLICAS = Kind("N", "a whole number from 0 to 1024", _integer(0, 1024))
ENDPOINT = Kind("HOST:PORT", "an address and a port, such as 10.0.0.1:7000", _endpoint)
COUNT = Kind("N", "a whole number, 1 or more", _integer(1))
CONTEXT = Kind("N", "a number of tokens such as 4096, 32k or 32K, or auto", _context_len)
TOKENS = Kind("N", f"a number of tokens from 1 to {_MAX_COUNT}, such as 8192, 8k or 8K",
              _batched_tokens)  # fmt: skip
LOGPROBS = Kind("N", "a whole number, 0 or more; -1: no limit of its own", _logprobs)
PREFIX = Kind("PATH", "a path that begins with /", _root_path)
BOUNDED = Kind("N", f"a whole number from 1 to {_MAX_COUNT}", _integer(1, _MAX_COUNT))
RANKS = Kind("N", f"a whole number from 1 to {MAX_RANKS}", _integer(1, MAX_RANKS))
THREADS = Kind("N", f"a whole number from 1 to {_MAX_THREADS}", _integer(1, _MAX_THREADS))
NUMBER = Kind("X", "a number", float)
SHARE = Kind("SHARE", "a number between 0 and 1", float)
SIZE = Kind("SIZE", "a size such as 4M or 2GiB", parse_bytes, show_bytes)
GIB = Kind("GIB", "a number of GiB, or a size such as 512M", parse_gib)
SECONDS = Kind(
    "SECONDS", f"a number of seconds, or a duration {_EXAMPLES}", parse_duration, show_duration
)
INTERVAL = Kind(
    "SECONDS",
    "a number of seconds, or a duration such as 30s or 10m, more than 0",
    _positive(parse_duration),
    show_duration,
)
MILLISECONDS = Kind(
    "MS",
    "a number of milliseconds, or a duration such as 250ms or 2s, 0 or more",
    _milliseconds,
    lambda value: show_duration(value, unit_s=0.001),
)
POSITIVE_MILLISECONDS = Kind(
    "MS",
    "a number of milliseconds, or a duration such as 250ms or 2s, more than 0",
    _positive(_milliseconds),
    MILLISECONDS.show,
)
BLOCK_SIZE = Kind("N", f"an even number from 2 to {MAX_BLOCK_SIZE}", _block_size)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of `serve`.

    Attributes:
        is_list: several values may follow the option, and it may be repeated.
        aliases: other options that mean the same, with their hyphens: vLLM's names.
        spellings: other texts for a value.

    The text of a secret is in no message; `launch.cli` also hides it from the list of processes.
    """

    name: str
    default: Any
    help: str
    kind: Kind = TEXT
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_secret: bool = False
    aliases: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "PENSTOCK_" + self.key.upper()

    @property
    def expected(self) -> str:
        """What a value must be, after "must be"."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.is_list and self.kind.parse is str:
            return "a list of texts"
        return f"one of {', '.join(self.choices)}" if self.choices else self.kind.expected

    def parse(self, text: str) -> Any:
        """
        Raises:
            ValueError: the text is no value of this flag.
        """
        value = self.kind.parse(self.spellings.get(text, text))
        if self.choices and value not in self.choices:
            raise ValueError(f"{value!r} is not among the choices")
        return value


# What vLLM calls a checkpoint's own quantization; `bitsandbytes` rounds a dense one to 4 bits.
_QUANTIZATION_SPELLINGS = {
    **dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "modelopt",
         "modelopt_fp4", "mxfp4", "gpt_oss_mxfp4", "auto-round", "moe_wna16"), "none"),
    "bitsandbytes": "int4",
}  # fmt: skip
# What vLLM and SGLang call formats that have another name here: of the same marks.
_TOOL_SPELLINGS = {
    "glm": "glm45", "glm47": "glm45", "granite4": "hermes", "mimo": "qwen3_coder",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "gpt-oss": "openai",
    "llama3": "llama3_json", "qwen": "hermes", "qwen25": "hermes",
}  # fmt: skip
_REASONING_SPELLINGS = {
    "glm47": "glm45", "mimo": "qwen3", "nemotron_v3": "qwen3", "nano_v3": "qwen3",
    "holo2": "deepseek_r1", "minimax_m2": "deepseek_r1", "step3": "deepseek_r1",
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "gpt-oss": "openai_gptoss",
    "minimax": "deepseek_r1", "qwen3-thinking": "deepseek_r1",
}  # fmt: skip
_LOAD_FORMATS = ("safetensors", "hf", "gguf", "mistral", "bitsandbytes", "fastsafetensors",
                 "runai_streamer")  # fmt: skip

_MODEL, _CACHE, _SCHEDULER = ModelConfig(), CacheConfig(), SchedulerConfig()
_LORA = LoraConfig()
_GATEWAY = GatewayConfig(engine_address="")

GROUPS: dict[str, tuple[Flag, ...]] = {
    "listen": (
        Flag("host", "127.0.0.1", "address to listen on; the default accepts only this machine",
             HOST),
        Flag("port", 8000, "port to listen on; 0 picks a free one", PORT),
        Flag("uds", None, "path of a Unix socket to listen on, instead of --host and --port", FILE),
        Flag("root-path", None, "path under which a proxy offers the server, such as /llm; "
             "requests may have it or not", PREFIX),
        Flag("api-workers", 1, "gateway processes that share the port; more than one need "
             "--redis-url", COUNT, aliases=("--api-server-count", "-asc")),
        Flag("max-connections", _GATEWAY.max_connections, "connections per gateway process, with "
             "TLS handshakes and WebSockets; further ones get 503", COUNT),
        Flag("header-timeout-s", _GATEWAY.header_timeout_s, "time for a TLS handshake, and then "
             "for a request's header", INTERVAL),
        Flag("body-timeout-s", _GATEWAY.body_timeout_s, "time for a request's body", INTERVAL),
        Flag("keep-alive-s", _GATEWAY.keep_alive_s, "how long an idle connection stays open; must "
             "exceed what clients and proxies use", INTERVAL),
        Flag("ping-interval-s", _GATEWAY.ping_interval_s, "send a comment on an event stream after "
             "this much silence, and ping WebSockets this often", INTERVAL),
        Flag("stream-interval-ms", _GATEWAY.stream_interval_ms, "least time between two events of "
             "a stream; text in between is merged; 0: an event per engine step", MILLISECONDS),
        Flag("shutdown-grace-s", _GATEWAY.shutdown_grace_s, "how long streams may continue after "
             "SIGTERM", SECONDS),
        Flag("served-model-name", (), "name of the model in the API; may be repeated; *: any "
             "name; default: MODEL as given", NAME, is_list=True),
    ),
    "security": (
        Flag("api-key", (), "a key that callers must send; may be repeated", KEY, is_list=True,
             is_secret=True),
        Flag("api-keys-file", None, "TOML file of keys with tenants, weights and limits; reread "
             "when it changes", FILE),
        Flag("allowed-origins", (), "browser origin to accept besides the server's own; may be "
             "repeated; * accepts all", ORIGIN, is_list=True),
        Flag("ssl-certfile", None, "PEM file with the server's certificate; turns TLS on", FILE),
        Flag("ssl-keyfile", None, "PEM file with its key; default: the certificate's file", FILE),
        Flag("ssl-keyfile-password", None, "password of an encrypted key", is_secret=True),
        Flag("trust-request-chat-template", False, "let requests bring their own chat template. "
             "Only for trusted callers: a template is a program; each may use 2 s of a core and "
             "512 MiB, one at a time"),
        Flag("max-body-bytes", _GATEWAY.max_body_bytes, "largest request body", SIZE),
        Flag("allowed-media-domains", (), "host that images may be fetched from, as HOST or "
             "HOST:PORT; may be repeated; default: none, so that images are data URLs", NAME,
             is_list=True),
        Flag("allowed-local-media-path", None, "directory from which requests may name images, as "
             "file:///DIR/NAME; default: none", FILE),
        Flag("media-timeout-s", _GATEWAY.media_timeout_s, "time to fetch an image", INTERVAL),
        Flag("max-image-bytes", _GATEWAY.max_image_bytes, "largest image file; --max-body-bytes "
             "bounds it too, unless it is fetched", SIZE),
        Flag("limit-mm-per-prompt", _GATEWAY.limit_mm_per_prompt, "images that a prompt may have, "
             "with those of its conversation"),
        Flag("max-prompt-bytes", None, "largest prompt text to tokenise where context and "
             "tokenizer set no limit (tokenizers that shorten text, /tokenize, "
             "truncate_prompt_tokens); default: 16 bytes per token of context, at least 1M", SIZE),
    ),
    "model": (
        Flag("tokenizer", None, "another model, whose tokenizer and chat template are used: a "
             "directory, a GGUF file or a Hub id"),
        Flag("revision", None, "branch, tag or commit of a model on the Hub"),
        Flag("tokenizer-revision", None, "the same of the tokenizer; default: of the model's own, "
             "that of the model"),
        Flag("hf-token", None, "token for the Hub; default: HF_TOKEN", KEY, is_secret=True),
        Flag("download-dir", None, "directory for models of the Hub; default: the Hub's own cache",
             FILE),
        Flag("hf-overrides", None, "fields that replace those of the model's config.json", JSON),
        Flag("rope-scaling", None, 'scaling of positions instead of the model\'s, such as '
             '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}',
             JSON),
        Flag("rope-theta", None, "base of the rotary frequencies instead of the model's", NUMBER),
        Flag("model-impl", _MODEL.model_impl, "native: one of our own families; transformers: the "
             "library's code over our cache and matrix products; auto: native where there is one "
             "that has the model's options",
             choices=MODEL_IMPLS),
        Flag("trust-remote-code", False, "run Python code that comes with a model. Read it first: "
             "it may do whatever this user may"),
        Flag("dtype", _MODEL.dtype, "type of weights and activations", choices=DTYPES,
             spellings={"half": "float16", "float": "float32"}),
        Flag("quantization", _MODEL.quantization, "store a dense checkpoint's matrices in fewer "
             "bits: less memory, faster, less exact; how a quantized one is stored, it says itself",
             choices=QUANTIZATIONS, aliases=("-q",), spellings=_QUANTIZATION_SPELLINGS),
        Flag("quantization-override", (), "another quantization for a module, such as "
             "lm_head=int8; may be repeated", OVERRIDE, is_list=True),
        Flag("quantization-exclude", (), "a module to leave as it is, such as lm_head or "
             "model.layers.0.*; may be repeated", NAME, is_list=True),
        Flag("quantize-activations", True, "round the inputs of quantized matrices to bytes, for "
             "speed (on a GPU: of matrices in 8 bits); off: slower, more exact"),
        Flag("load-format", _MODEL.load_format, "dummy: random weights, for measuring",
             choices=("auto", "dummy"), spellings=dict.fromkeys(_LOAD_FORMATS, "auto")),
        Flag("max-model-len", None, "context length in tokens; default: the model's own; auto: as "
             "much of it as the KV cache has room for", CONTEXT),
        Flag("generation-config", _MODEL.generation_config, "auto: take sampling defaults and EOS "
             "from generation_config.json", choices=("auto", "none"), spellings={"vllm": "none"}),
        Flag("override-generation-config", None, "sampling defaults before the model's own, such "
             'as {"temperature": 0.5}', JSON),
        Flag("seed", None, "draw the seeds of requests without one from this, in the order in "
             "which they come; and the random weights of --load-format dummy", INTEGER),
        Flag("max-logprobs", -1, "alternatives that a request may ask for beside each token; -1: "
             "as many as the API allows", LOGPROBS),
        Flag("chat-template", None, "file with a chat template, or its text, instead of all of "
             "the model's own", FILE, aliases=("--chat-template-file",)),
        Flag("default-chat-template-kwargs", None, "variables of the chat template where a request "
             'has none, such as {"enable_thinking": false}', JSON),
        Flag("drop-billing-line", True, "leave out the line that Claude Code begins its system "
             "prompt with: it changes with each request, so that nothing would be found in the "
             "cache"),
        Flag("tool-call-parser", None, "how the model writes tool calls, by vLLM's names (hermes, "
             "llama3_json, mistral, …) or none; default: as its chat template shows",
             spellings=_TOOL_SPELLINGS),
        Flag("reasoning-parser", None, "how it writes thoughts (qwen3, deepseek_r1, …) or none; "
             "default: as its chat template shows", spellings=_REASONING_SPELLINGS),
        Flag("device", "auto", "where the model runs", choices=("auto", "cpu", "cuda")),
        Flag("num-threads", None, "CPU threads of the engine, or of each of its ranks; default: "
             "one per core", THREADS),
        Flag("tensor-parallel-size", 1, "processes that share each matrix of the model, one for "
             "each GPU or NUMA node", RANKS, aliases=("-tp",)),
        Flag("pipeline-parallel-size", 1, "parts into which the layers are cut, each in such "
             "processes", RANKS, aliases=("-pp",)),
        Flag("deterministic", False, "results never depend on batch, chunks, preemption or cache; "
             "slower on a GPU"),
        Flag("cudagraph-mode", "auto", "CUDA graphs. full: whole decode batches, other batches "
             "between attention layers; auto: full on a GPU", choices=CUDAGRAPH_MODES),
        Flag("enforce-eager", False, "the same as --cudagraph-mode none"),
    ),
    "memory": (
        Flag("kv-cache-memory-bytes", None, "memory for KV blocks; default: a share of free "
             "memory", SIZE, aliases=("--kv-cache-memory",)),
        Flag("num-blocks", None, "number of KV blocks, instead of a size", INTEGER,
             aliases=("--num-gpu-blocks-override",)),
        Flag("block-size", _CACHE.block_size, "tokens per KV block; an even number", BLOCK_SIZE),
        Flag("kv-cache-dtype", _CACHE.kv_cache_dtype, "fp8: half the KV memory per token, slightly "
             "less exact; int8: as little, more exact, on a CPU", choices=KV_CACHE_DTYPES,
             spellings={"fp8_e4m3": "fp8"}),
        Flag("gpu-memory-utilization", _CACHE.gpu_memory_utilization, "share of the GPU's memory "
             "to use in total", SHARE, aliases=("--device-memory-utilization",)),
        Flag("enable-prefix-caching", _CACHE.enable_prefix_caching, "share KV between requests "
             "that begin with the same tokens"),
        Flag("swap-space", None, "GiB of host memory for KV that does not fit on the device; 0: "
             "none; default: a moderate share of free memory", GIB,
             aliases=("--kv-offloading-size",)),
        Flag("num-host-blocks", None, "KV blocks in host memory, instead of --swap-space", INTEGER),
        Flag("mm-encoder-cache-bytes", _CACHE.mm_encoder_cache_bytes, "memory for the features of "
             "images that are kept for further requests", SIZE),
    ),
    "adapters": (
        Flag("enable-lora", _LORA.enable_lora, "serve adapters (LoRA) of the model beside it; they "
             "are loaded by --lora-modules and POST /v1/load_lora_adapter"),
        Flag("lora-modules", (), "adapters in PEFT's format, and their names in the API", ADAPTER,
             is_list=True),
        Flag("max-loras", None, f"adapters whose requests run at once; default: {MAX_LORAS}, or "
             "--max-cpu-loras if that is less", COUNT),
        Flag("max-lora-rank", _LORA.max_lora_rank, "largest rank of an adapter", COUNT),
        Flag("max-cpu-loras", None, "adapters kept in host memory; default: --max-loras", COUNT),
    ),
    "scheduling": (
        Flag("max-num-seqs", _SCHEDULER.max_num_seqs, "sequences running at once", BOUNDED),
        Flag("max-num-batched-tokens", _SCHEDULER.max_num_batched_tokens, "tokens computed per "
             "step", TOKENS),
        Flag("enable-chunked-prefill", _SCHEDULER.enable_chunked_prefill, "compute a long prompt "
             "over several steps"),
        Flag("max-stall-ms", _SCHEDULER.max_stall_ms, "how long prompts may delay running streams "
             "in one step", MILLISECONDS),
        Flag("preemption", _SCHEDULER.preemption, "what happens to a sequence's KV when blocks run "
             "out; auto: whichever costs less", choices=("auto", "swap", "recompute"),
             aliases=("--preemption-mode",)),
        Flag("speculative-config", None, "draft several tokens a step, which changes no token: "
             '{"method": "ngram"} where the text repeats itself, {"model": DIRECTORY_OR_ID} by a '
             'smaller model, {"method": "eagle3", "model": …} by an EAGLE-3 head (CPU only); '
             '"num_speculative_tokens": at most so many', JSON),
        Flag("scheduling-policy", _SCHEDULER.scheduling_policy, "fcfs: by arrival; priority: by "
             "the requests' priority first", choices=("fcfs", "priority")),
        Flag("priority-aging-s", _SCHEDULER.priority_aging_s, "waiting time that raises a request "
             "by one priority", SECONDS),
        Flag("max-queue-requests", _GATEWAY.max_queue_requests, "requests that may wait; further "
             "ones get 503", COUNT),
        Flag("max-queue-tokens", _GATEWAY.max_queue_tokens, "prompt tokens that may wait", COUNT),
        Flag("request-deadline-ms", None, "refuse a request whose first token is predicted later "
             "than this; a request's header x-request-deadline-ms overrides it", MILLISECONDS),
        Flag("step-timeout-s", 300.0, "log the engine's stacks and restart it "
             "when a step makes no progress for so long; 0: never", SECONDS),
    ),
    "several engines": (
        Flag("replicas", 1, "engines on this machine, each with its share of the cores or a GPU of "
             "its own; 0: none, only others'", REPLICAS, aliases=("--data-parallel-size", "-dp")),
        Flag("routing", _GATEWAY.routing, "which engine gets a request. prefix: the one that has "
             "most of the prompt cached, less what it has to compute",
             choices=get_args(Routing)),
        Flag("kv-transfer", _GATEWAY.kv_transfer, "whether streams that leave an engine take their "
             "KV along to the next one. auto: where that is quicker than to compute it, by the "
             "measured rates of both", choices=get_args(KVTransfer)),
        Flag("engine", (), "an engine on another machine (penstock engine); a name with several "
             "addresses stands for as many; may be repeated", ENDPOINT, is_list=True),
        Flag("discover", False, "use all engines that have registered for this model in Redis "
             "(penstock engine --redis-url)"),
        Flag("tls-cert", None, "PEM file with this process's certificate, for connections between "
             "machines: engines and gateways both need one", FILE),
        Flag("tls-key", None, "PEM file with its key", FILE),
        Flag("tls-ca", None, "PEM file with the authority that has signed the others'", FILE),
        Flag("tls-server-name", None, "the name in the engines' certificates; default: the host of "
             "their address", NAME),
        Flag("ray-address", None, "have Ray place the --replicas, on its cluster at this address; "
             "needs pip install 'penstock-llm[ray]' and --redis-url"),
        Flag("max-replicas", None, "have Ray start up to this many engines while the queue is "
             "long; default: always --replicas", REPLICAS),
        Flag("scale-up-queue-ms", 1000, "start another one when new prompts are predicted to wait "
             "longer than this on average", POSITIVE_MILLISECONDS),
        Flag("scale-down-after-s", 60.0, "end one when fewer have been enough for this long",
             SECONDS),
    ),
    "sessions": (
        Flag("session-ttl-s", _GATEWAY.session_ttl_s, "how long an untouched conversation "
             "is kept", INTERVAL),
        Flag("session-store-bytes", _GATEWAY.session_store_bytes, "memory for conversations, "
             "without Redis", SIZE),
        Flag("tenant-store-bytes", None, "how much one tenant may store, conversations and logs of "
             "responses together; beyond it, its own oldest are dropped. The key file's "
             "store_bytes comes first; default: no bound of its own", SIZE),
        Flag("tenant-store-objects", None, "the same as a number of conversations and logs; "
             "store_objects in the key file", COUNT),
        Flag("session-retention-s", _GATEWAY.session_retention_s, "how long the KV of a stored "
             "response is kept in preference to other cached KV; 0: not at all", SECONDS),
        Flag("response-log-bytes", _GATEWAY.response_log_bytes, "memory for logs of ended "
             "responses, without Redis", SIZE),
        Flag("response-log-ttl-s", _GATEWAY.response_log_ttl_s, "how long an ended response can be "
             "resumed", SECONDS),
        Flag("disconnect-grace-s", _GATEWAY.disconnect_grace_s, "how long a stored response "
             "continues without a reader", SECONDS),
    ),
    "Redis": (
        Flag("redis-url", None, "keep sessions in Redis, shared and across restarts, as "
             "redis://HOST:6379/0, or rediss:// for TLS", URL, is_secret=True),
        Flag("redis-patience-ms", _GATEWAY.redis_patience_ms, "how long an event of a stored "
             "response waits for Redis (longer if Redis is distant); then it is sent, and the "
             "response cannot be resumed",
             POSITIVE_MILLISECONDS),
        Flag("session-storage", _GATEWAY.session_storage, "while Redis is down, required: refuse "
             "new sessions; optional: run them without storage",
             choices=("required", "optional")),
    ),
    "logging": (
        Flag("log-level", _GATEWAY.log_level, "least severe messages to log",
             choices=("debug", "info", "warning", "error")),
        Flag("log-format", _GATEWAY.log_format, "lines of text, or one JSON object per line",
             choices=("text", "json")),
        Flag("otlp-endpoint", None, "OpenTelemetry collector for traces, as "
             "http://localhost:4318", URL, aliases=("--otlp-traces-endpoint",)),
    ),
}  # fmt: skip
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """Options of vLLM that have no meaning here: they are accepted, and said so once.

    Attributes:
        why: for the message.
        switches: those without a value, or with `--no-`.
        options: those with one.
        lists: those with several.
    """

    why: str
    switches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.switches + self.options + self.lists


WITHOUT_EFFECT = (
    WithoutEffect("it is always so", (
        "--enable-auto-tool-choice", "--enable-reasoning", "--enable-request-id-headers",
        "--enable-prompt-tokens-details", "--disable-frontend-multiprocessing",
        "--enable-ssl-refresh", "--enable-server-load-tracking", "--enable-tokenizer-info-endpoint",
    )),
    WithoutEffect("the log has no prompts, and one line for each request", (
        "--disable-log-requests", "--enable-log-requests", "--disable-uvicorn-access-log",
        "--enable-log-outputs", "--enable-log-deltas", "--log-error-stack",
    ), (
        "--max-log-len", "--uvicorn-log-level", "--disable-access-log-for-endpoints",
        "--log-config-file", "--logging-config",
    )),
    WithoutEffect("numbers are at /metrics, not in the log", (
        "--disable-log-stats", "--kv-cache-metrics", "--cudagraph-metrics",
        "--enable-logging-iteration-details", "--enable-mfu-metrics",
        "--enable-layerwise-nvtx-tracing", "--enable-per-request-metrics",
        "--aggregate-engine-logging",
    ), (
        "--show-hidden-metrics-for-version", "--kv-cache-metrics-sample", "--profiler-config",
        "--custom-histogram-buckets",
    ), ("--collect-detailed-traces",)),
    WithoutEffect("a model does all that it can: it generates, and makes vectors or scores",
                  options=("--runner", "--task", "--convert")),
    WithoutEffect("the files of the model decide", ("--allow-deprecated-quantization",), (
        "--tokenizer-mode", "--config-format", "--chat-template-content-format",
    )),
    WithoutEffect("there is one way to load files", ("--use-tqdm-on-load",), (
        "--safetensors-load-strategy", "--max-parallel-loading-workers",
        "--model-loader-extra-config", "--pt-load-map-location",
    ), ("--ignore-patterns",)),
    WithoutEffect("there is one implementation", (
        "--use-v2-block-manager", "--async-scheduling", "--disable-async-output-proc",
        "--disable-hybrid-kv-cache-manager", "--disable-cascade-attn", "--calculate-kv-scales",
        "--disable-custom-all-reduce", "--multi-step-stream-outputs", "--numa-bind",
        "--enable-flashinfer-autotune", "--disable-nccl-for-dp-synchronization",
        "--ray-workers-use-nsight", "--enable-dbo", "--scheduler-reserve-full-isl",
        "--kv-sharing-fast-prefill", "--enable-cumem-allocator", "--use-fp64-gumbel",
    ), (
        "--attention-backend", "--structured-outputs-config", "--guided-decoding-backend",
        "--distributed-executor-backend", "--prefix-caching-hash-algo", "--reasoning-backend",
        "--kv-offloading-backend", "--num-scheduler-steps", "--moe-backend",
        "--attention-config", "--kernel-config", "--linear-backend", "--mamba-backend",
        "--gdn-prefill-backend", "--ir-op-priority", "--all2all-backend", "--ubatch-size",
        "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--renderer-num-workers",
        "--data-parallel-backend", "--data-parallel-rpc-port", "--max-num-scheduled-tokens",
        "--mamba-block-size", "--mamba-cache-mode",
    ), ("--numa-bind-nodes", "--numa-bind-cpus")),
    WithoutEffect("--step-timeout-s says when an engine counts as stuck", options=(
        "--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds",
    )),
    WithoutEffect("see --shutdown-grace-s", options=("--shutdown-timeout",)),
    WithoutEffect("see --ping-interval-s", options=("--sse-keep-alive-interval",)),
    WithoutEffect("a server does not sleep: stop it", ("--enable-sleep-mode",)),
    WithoutEffect("nothing is compiled by it: see --cudagraph-mode", (), (
        "--compilation-config", "-O", "-cc", "--optimization-level", "--performance-mode",
        "--max-cudagraph-capture-size", "--max-seq-len-to-capture",
    ), ("--cudagraph-capture-sizes", "--cuda-graph-sizes")),
    WithoutEffect("--max-stall-ms bounds what prompts delay", (), (
        "--max-num-partial-prefills", "--max-long-partial-prefills",
        "--long-prefill-token-threshold",
    )),
    WithoutEffect("see --stream-interval-ms", options=("--stream-interval",)),
    WithoutEffect("an answer's role is assistant", options=("--response-role",)),
    WithoutEffect("weights stay where they are computed with", options=(
        "--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size",
        "--offload-num-in-group", "--offload-prefetch-step", "--offload-params",
    )),
    WithoutEffect("experts are shared among ranks like other matrices", (
        "--enable-expert-parallel", "-ep", "--enable-eplb", "--enable-ep-weight-filter",
    ), ("--eplb-config", "--expert-placement-strategy")),
    WithoutEffect("adapters have the model's dtype, and all their own parts", (
        "--fully-sharded-loras",
    ), ("--lora-dtype", "--lora-extra-vocab-size", "--long-lora-scaling-factors")),
    WithoutEffect("see --mm-encoder-cache-bytes and --limit-mm-per-prompt", (
        "--disable-mm-preprocessor-cache", "--skip-mm-profiling", "--language-model-only",
        "--interleave-mm-strings", "--disable-chunked-mm-input",
    ), ("--mm-processor-cache-gb", "--mm-processor-cache-type", "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend", "--media-io-kwargs", "--video-pruning-rate",
        "--video-pruning-method", "--mm-encoder-attn-dtype", "--mm-processor-device",
        "--mm-shm-cache-max-object-size-mb", "--mm-ipc-gpu-memory-gb", "--mm-tensor-ipc")),
    WithoutEffect("browsers may send what the API needs: see --allowed-origins", (
        "--allow-credentials",
    ), ("--allowed-methods", "--allowed-headers")),
    WithoutEffect("this server has no such limit or page", (
        "--disable-fastapi-docs", "--enable-offline-docs",
    ), (
        "--h11-max-incomplete-event-size", "--h11-max-header-count",
    )),
)  # fmt: skip

# Options of vLLM that would change what is answered, to whom or from where, and are not here: they
# end the command, without a question about another option that is meant.
NOT_HERE = frozenset((
    "--additional-config", "--anthropic-disabled-thinking-effort", "--aux-output-config",
    "--code-revision", "--cohere-format", "--cohere-is-reasoning-model",
    "--cp-kv-cache-interleave-size", "--data-parallel-address", "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb", "--data-parallel-multi-port-external-lb", "--data-parallel-rank",
    "--data-parallel-size-local", "--data-parallel-start-rank", "--data-parallel-supervisor-port",
    "--dcp-comm-backend", "--dcp-kv-cache-interleave-size", "--dcp-q-replicate",
    "--decode-context-parallel-size", "--default-mm-loras", "--device-ids", "--diffusion-config",
    "--disable-sliding-window", "--dp-supervisor-probe-failure-threshold",
    "--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s", "--dp-sync-interval",
    "--ec-manager-config", "--ec-transfer-config", "--elastic-ep-max-dp-size",
    "--enable-batch-sharded-sampling", "--enable-elastic-ep", "--enable-fault-tolerance",
    "--enable-flash-late-interaction", "--enable-force-include-usage", "--enable-hc-sp",
    "--enable-mamba-cache-stochastic-rounding", "--enable-mamba-shared-prefix-checkpoint",
    "--enable-mixed-moe-lora-format", "--enable-mm-embeds", "--enable-moe-shared-loras",
    "--enable-nccl-comm-suspend", "--enable-prompt-embeds", "--enable-return-routed-experts",
    "--enable-scale-out", "--enable-shm-tensor-arena", "--enable-tower-connector-lora",
    "--enable-trace-replay", "--engram-config", "--exclude-tools-when-tool-choice-none",
    "--fail-on-environ-validation", "--fault-tolerance-config", "--fingerprint-mode",
    "--fingerprint-value", "--grpc-port", "--headless", "--hf-config-path",
    "--io-processor-plugin", "--jit-monitor-mode", "--jit-monitor-verbose",
    "--kda-decode-backend", "--kda-prefill-backend", "--kv-cache-dtype-skip-layers",
    "--kv-events-config", "--kv-transfer-config", "--logits-processors", "--logprobs-mode",
    "--long-prefill-token-threshold-adaptive", "--lora-target-modules", "--mamba-cache-dtype",
    "--mamba-cache-philox-rounds", "--mamba-ssm-cache-dtype", "--mamba-ssu-algorithm",
    "--master-addr", "--master-port", "--max-lora-cls-labels", "--max-num-active-seqs",
    "--max-num-queued-reqs", "--max-num-queued-tokens", "--middleware",
    "--mm-device-do-normalize", "--mm-encoder-fp8-scale-path",
    "--mm-encoder-fp8-scale-save-margin", "--mm-encoder-fp8-scale-save-path", "--mm-encoder-only",
    "--mm-hasher-algorithm", "--mm-processor-kwargs", "--model-class-overrides", "--monokernel",
    "--nnodes", "--node-rank", "--per-request-spec-decode-metrics", "--pooler-config",
    "--prefill-context-parallel-size", "--prefill-schedule-interval",
    "--prefix-cache-retention-interval", "--prefix-match-unit", "--quantization-config",
    "--reasoning-config", "--reasoning-effort-map", "--reasoning-parser-plugin",
    "--replayssm-buffer-len", "--return-sampling-mask", "--return-tokens-as-token-ids",
    "--safetensors-prefetch-block-size", "--safetensors-prefetch-num-threads", "--scheduler-cls",
    "--skip-tokenizer-init", "--sleep-mode-backend", "--sleep-mode-offload-cudagraph",
    "--sleep-preserve-parameter-names", "--sparse-indexer-topk-backend", "--spec-method",
    "--spec-model", "--spec-tokens", "--specialize-active-lora", "--ssl-ca-certs",
    "--ssl-cert-reqs", "--ssl-ciphers", "--swa-bounded-replay", "--tokens-only",
    "--tool-parser-plugin", "--tool-server", "--tool-strict-level", "--trust-request-mm-kwargs",
    "--use-replayssm", "--watchdog-config", "--watermark", "--watermark-config",
    "--weight-transfer-config", "--worker-cls", "--worker-extension-cls",
))  # fmt: skip

# Those of `penstock engine`: what an engine needs of the above, and these.
_OF_ENGINE = {
    "served_model_name", "hf_token", "redis_url", "tls_cert", "tls_key", "tls_ca",
    "enforce_eager", "shutdown_grace_s", "step_timeout_s", "log_level", "log_format",
    *(name for part in (ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, LoraConfig)
      for name in part.__slots__),
}  # fmt: skip
ENGINE_GROUPS: dict[str, tuple[Flag, ...]] = {
    "listen": (
        Flag("listen", "127.0.0.1:7000", "where to listen for gateways; port 0 picks a free one",
             ENDPOINT),
        Flag("advertise", None, "the address to register, if it is another one; its certificate "
             "must name the host", HOST),
    ),
}  # fmt: skip
for _title, _flags in GROUPS.items():
    if _found := tuple(flag for flag in _flags if flag.key in _OF_ENGINE):
        ENGINE_GROUPS[_title] = ENGINE_GROUPS.get(_title, ()) + _found
ENGINE_FLAGS = tuple(flag for group in ENGINE_GROUPS.values() for flag in group)
