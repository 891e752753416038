"""Settings of the engine: frozen sections composed into `EngineConfig`.

Each section is read by one package only, and nothing is written back at run time: values measured
at start (the number of blocks, the context that fits) are passed separately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast, get_args

from penstock.engine.errors import ConfigError
from penstock.engine.settings.declaration import Group, Need, Part, Section, setting
from penstock.engine.settings.kinds import (
    COUNT,
    FILE,
    INTERVAL,
    JSON,
    NAME,
    NUMBER,
    POSITIVE_MILLISECONDS,
    SIZE,
    Kind,
    one_of,
    parse_gib,
    parse_tokens,
    whole,
)

DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["none", "int8", "int4", "fp8"]
ModelImpl = Literal["auto", "native", "transformers"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8", "int8"]
CudagraphMode = Literal["auto", "none", "piecewise", "full"]
SchedulingPolicy = Literal["fcfs", "priority"]
Device = Literal["auto", "cpu", "cuda"]
DTYPES: tuple[DType, ...] = get_args(DType)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = get_args(KVCacheDType)
SPECULATIVE_METHODS = ("auto", "ngram", "draft_model", "eagle3", "none")
MAX_SPECULATIVE_TOKENS = 31
MAX_PROMPT_LOOKUP = 16  # a drafter may look each length up at every token
_PROMPT_LOOKUP = 3
_AUTO_LOOKUP = (8, 3)
DEMO_MODEL = "demo"
MAX_BLOCK_SIZE = 1 << 16
MAX_RANKS = 64
MAX_LOGPROBS = 20  # alternatives beside a token
FITTING_LEN = -1  # as `max_model_len`
MAX_LORAS = 8  # at once, unless said otherwise
_MAX_COUNT = 1_000_000  # of sequences and tokens per step; buffers of this size still fit
_ADAPTER_KEYS = {"name", "path", "base_model_name"}

# What vLLM calls a checkpoint's own quantization; `bitsandbytes` rounds a dense one to 4 bits.
_QUANTIZATION_SPELLINGS = {
    **dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "modelopt",
         "modelopt_fp4", "mxfp4", "gpt_oss_mxfp4", "auto-round", "moe_wna16"), "none"),
    "bitsandbytes": "int4",
}  # fmt: skip
_LOAD_FORMATS = ("safetensors", "hf", "gguf", "mistral", "bitsandbytes", "fastsafetensors",
                 "runai_streamer")  # fmt: skip


def _is_override(text: str) -> bool:
    pattern, _, kind = text.rpartition("=")
    return pattern != "" and kind in QUANTIZATIONS


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


MODEL = Kind("MODEL", "a text")
CONTEXT = Kind(
    "N", "a number of tokens such as 4096, 32k or 32K, or auto",
    lambda text: FITTING_LEN if text in ("auto", "-1") else parse_tokens(text),
    lambda value: value == FITTING_LEN or value >= 1,
)  # fmt: skip
TOKENS = Kind("N", f"a number of tokens from 1 to {_MAX_COUNT}, such as 8192, 8k or 8K",
              parse_tokens, lambda value: 1 <= value <= _MAX_COUNT)  # fmt: skip
OVERRIDE = Kind("MODULE=KIND", "MODULE=KIND, such as lm_head=int8, with one of "
                f"{', '.join(QUANTIZATIONS)}", accepts=_is_override)  # fmt: skip
ADAPTER = Kind("NAME=PATH", 'NAME=PATH, or {"name": …, "path": …}', _adapters,
               lambda text: all(text.partition("=")))  # fmt: skip
BLOCK_SIZE = Kind("N", f"an even number from 2 to {MAX_BLOCK_SIZE}", int,
                  lambda value: value % 2 == 0 and 2 <= value <= MAX_BLOCK_SIZE)  # fmt: skip
SHARE = Kind("SHARE", "more than 0 and at most 1", float, lambda value: 0.0 < value <= 1.0)
GIB = Kind("GIB", "a number of GiB from 0 to 1000000, or a size such as 512M", parse_gib,
           lambda value: 0.0 <= value <= 1e6)  # fmt: skip
RANKS = whole(1, MAX_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """Which model, and how its weights are loaded."""

    # fmt: off
    model: str = setting(DEMO_MODEL, Group.MODEL, "the same as MODEL", MODEL, is_daily=True)
    tokenizer: str | None = setting(None, Group.MODEL, "another model, whose tokenizer and chat "
        "template are used: a directory, a GGUF file or a Hub id", is_daily=True)
    revision: str | None = setting(None, Group.MODEL, "branch, tag or commit of a model on the Hub",
        is_daily=True)
    tokenizer_revision: str | None = setting(None, Group.MODEL, "the same of the tokenizer; "
        "default: of the model's own, that of the model")
    download_dir: str | None = setting(None, Group.MODEL, "directory for models of the Hub; "
        "default: the Hub's own cache", FILE)
    hf_overrides: str | None = setting(None, Group.MODEL, "fields that replace those of the "
        'model\'s config.json, such as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, '
        '"original_max_position_embeddings": 32768}}', JSON,
        parts={"rope-scaling": Part("rope_scaling", JSON),
        "rope-theta": Part("rope_theta", NUMBER)})
    model_impl: ModelImpl = setting("auto", Group.MODEL, "native: one of our own families; "
        "transformers: the library's code over our cache and matrix products; auto: native where "
        "there is one that has the model's options", one_of(ModelImpl))
    trust_remote_code: bool = setting(False, Group.MODEL, "run Python code that comes with a "
        "model. Read it first: it may do whatever this user may", is_daily=True)
    dtype: DType = setting("auto", Group.MODEL, "type of weights and activations", one_of(DType),
        spellings={"half": "float16", "float": "float32"}, is_daily=True)
    quantization: Quantization = setting("none", Group.MODEL, "store a dense checkpoint's matrices "
        "in fewer bits: less memory, faster, less exact; how a quantized one is stored, it says "
        "itself", one_of(Quantization), aliases=("-q",), spellings=_QUANTIZATION_SPELLINGS,
        is_daily=True)
    # Patterns as in a shell; the first that matches counts.
    quantization_override: tuple[str, ...] = setting((), Group.MODEL, "another quantization for a "
        "module, such as lm_head=int8; may be repeated", OVERRIDE)
    quantization_exclude: tuple[str, ...] = setting((), Group.MODEL, "a module to leave as it is, "
        "such as lm_head or model.layers.0.*; may be repeated", NAME)
    quantize_activations: bool = setting(True, Group.MODEL, "round the inputs of quantized "
        "matrices to bytes, for speed (on a GPU: of matrices in 8 bits); off: slower, more exact")
    load_format: Literal["auto", "dummy"] = setting("auto", Group.MODEL, "dummy: random weights, "
        "for measuring", one_of(("auto", "dummy")), spellings=dict.fromkeys(_LOAD_FORMATS, "auto"))
    max_model_len: int | None = setting(None, Group.MODEL, "context length in tokens; default: the "
        "model's own; auto: as much of it as the KV cache has room for", CONTEXT, is_daily=True)
    chat_template: str | None = setting(None, Group.MODEL, "file with a chat template, or its "
        "text, instead of all of the model's own", FILE, aliases=("--chat-template-file",),
        is_daily=True)
    # With `none`, EOS ids come from elsewhere.
    generation_config: Literal["auto", "none"] = setting("auto", Group.MODEL, "auto: take sampling "
        "defaults and EOS from generation_config.json", one_of(("auto", "none")),
        spellings={"vllm": "none"})
    override_generation_config: str | None = setting(None, Group.MODEL, "sampling defaults before "
        'the model\'s own, such as {"temperature": 0.5}', JSON, is_daily=True)
    seed: int | None = setting(None, Group.MODEL, "draw the seeds of requests without one from "
        "this, in the order in which they come; and the random weights of --load-format dummy",
        whole(), is_daily=True)
    # fmt: on

    @property
    def wanted_max_model_len(self) -> int | None:
        """The context that was asked for; None: as much as there can be of the model's own."""
        return None if self.max_model_len == FITTING_LEN else self.max_model_len

    @property
    def config_overrides(self) -> dict[str, Any]:
        return _object(self.hf_overrides)

    @property
    def generation_overrides(self) -> dict[str, Any]:
        return _object(self.override_generation_config)

    @property
    def quantization_rules(self) -> dict[str, Quantization]:
        """The quantization of modules by pattern, where it is not `quantization`."""
        rules: dict[str, Quantization] = dict.fromkeys(self.quantization_exclude, "none")
        for text in self.quantization_override:
            pattern, _, kind = text.rpartition("=")
            rules.setdefault(pattern, cast("Quantization", kind))
        return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Section):
    """Memory for KV blocks."""

    # fmt: off
    kv_cache_memory_bytes: int | None = setting(None, Group.MEMORY, "memory for KV blocks; "
        "default: a share of free memory", SIZE, aliases=("--kv-cache-memory",), is_daily=True)
    gpu_memory_utilization: float = setting(0.9, Group.MEMORY, "share of the GPU's memory to use "
        "in total", SHARE, aliases=("--device-memory-utilization",), is_daily=True)
    kv_cache_dtype: KVCacheDType = setting("auto", Group.MEMORY, "fp8: half the KV memory per "
        "token, slightly less exact; int8: as little, more exact, on a CPU", one_of(KVCacheDType),
        spellings={"fp8_e4m3": "fp8"}, is_daily=True)
    swap_space: float | None = setting(None, Group.MEMORY, "GiB of host memory for KV that does "
        "not fit on the device; 0: none; default: a moderate share of free memory", GIB,
        aliases=("--kv-offloading-size",), is_daily=True)
    enable_prefix_caching: bool = setting(True, Group.MEMORY, "share KV between requests that "
        "begin with the same tokens", is_daily=True)
    num_blocks: int | None = setting(None, Group.MEMORY, "number of KV blocks, instead of a size",
        COUNT, aliases=("--num-gpu-blocks-override",))
    num_host_blocks: int | None = setting(None, Group.MEMORY, "KV blocks in host memory, instead "
        "of --swap-space", whole(0))
    # Even, since the CPU kernels keep positions in pairs.
    block_size: int = setting(16, Group.MEMORY, "tokens per KV block; an even number", BLOCK_SIZE)
    mm_encoder_cache_bytes: int = setting(256 << 20, Group.MEMORY, "memory for the features of "
        "images that are kept for further requests", SIZE)
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What `--speculative-config` says, by vLLM's names.

    Attributes:
        method: `ngram` copies what followed the newest tokens before; `auto` does once there is
            evidence that they are copied, and only where a wrong draft costs little and changes no
            token; `draft_model` asks `model`; so does `eagle3`, with the hidden states of the model
            that it drafts for.
        model: a smaller model of the same vocabulary, as `ModelConfig.model` names one. It is held
            in the dtype and quantization of the model that it drafts for. Or an EAGLE-3 head, held
            in its dtype.
        num_speculative_tokens: at most so many drafts of a sequence in a step. The default fills
            the eight rows that the CPU kernels multiply at once; drafts by `auto` are limited by
            the rows only.
        prompt_lookup_min: tokens that must be equal before others are copied.
        prompt_lookup_max: so many are looked up first, then fewer, down to the least: what followed
            the longest occurrence is copied. Where only one of the two is named, the other is the
            same.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = _PROMPT_LOOKUP
    prompt_lookup_max: int = _PROMPT_LOOKUP

    @property
    def lookup_sizes(self) -> Sequence[int]:
        """How many of the newest tokens are looked up, the most first."""
        if self.method == "auto":
            return _AUTO_LOOKUP
        return range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1)

    @classmethod
    def parse(cls, value: str | Mapping[str, str | int] | None) -> SpeculativeConfig | None:
        """From a JSON object, as text or mapping; None, and the method `none`: no speculation.

        Raises:
            ConfigError: names the key at fault.
        """
        if value is None:
            return None
        found: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value
        known = [item.name for item in fields(cls)]
        for name in found:
            _check(
                name in known,
                f"--speculative-config has no key {name!r}: choose from {', '.join(known)}",
            )
        given = {name: value for name, value in found.items() if value is not None}
        is_auto = given.get("method") == "auto"
        config = cls(
            **{
                "method": "draft_model" if "model" in given else "ngram",
                "prompt_lookup_min": given.get("prompt_lookup_max", _PROMPT_LOOKUP),
                "prompt_lookup_max": given.get("prompt_lookup_min", _PROMPT_LOOKUP),
                **({"num_speculative_tokens": MAX_SPECULATIVE_TOKENS} if is_auto else {}),
                **given,
            }
        )
        _check(
            config.method in SPECULATIVE_METHODS,
            f"--speculative-config: method must be one of {', '.join(SPECULATIVE_METHODS)}, "
            f"not {config.method!r}",
        )
        has_model = isinstance(config.model, str) and config.model != ""
        if config.method in ("auto", "ngram", "none"):
            message = f"--speculative-config: the method {config.method} has no model"
            _check(config.model is None, message)
        else:
            _check(has_model, f"--speculative-config: the method {config.method} needs a model")
        limits = {
            "num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
            "prompt_lookup_min": MAX_PROMPT_LOOKUP,
            "prompt_lookup_max": MAX_PROMPT_LOOKUP,
        }
        for name, limit in limits.items():
            number = given.get(name, 1)
            is_right = isinstance(number, int) and not isinstance(number, bool)
            _check(
                is_right and 1 <= number <= limit,
                f"--speculative-config: {name} must be a whole number from 1 to {limit}, "
                f"not {number!r}",
            )
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        _check(
            least <= most,
            f"--speculative-config: prompt_lookup_min must be at most prompt_lookup_max ({most}), "
            f"not {least}",
        )
        if is_auto:
            sized = sorted(given.keys() & {"prompt_lookup_min", "prompt_lookup_max"})
            _check(not sized, f"--speculative-config: the method auto has no {' and '.join(sized)}")
        return None if config.method == "none" else config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """Budgets of one step.

    Attributes:
        max_steps_in_flight: batches handed to the device before the first result is awaited; None
            means 2 on a GPU, which runs one while the next is planned, and 1 on a CPU; where the
            layers are cut into stages, one for each.
    """

    # fmt: off
    max_num_seqs: int = setting(128, Group.SCHEDULING, "sequences running at once",
        whole(1, _MAX_COUNT), is_daily=True)
    max_num_batched_tokens: int = setting(2048, Group.SCHEDULING, "tokens computed per step",
        TOKENS, is_daily=True)
    # None: `auto`, where one process runs a model for which that costs nothing.
    speculative_config: str | Mapping[str, str | int] | None = setting(None, Group.SCHEDULING,
        'draft several tokens a step, which changes no token: auto, the default on a CPU, while '
        'text is copied; none; {"method": "ngram"} wherever the text repeats itself, {"model": '
        'DIRECTORY_OR_ID} by a smaller model, {"method": "eagle3", "model": …} by an EAGLE-3 head '
        '(CPU only); '
        '"num_speculative_tokens": at most so many', JSON,
        spellings={each: f'{{"method": "{each}"}}' for each in ("auto", "none")},
        parts={"spec-method": Part("method"), "spec-model": Part("model"),
        "spec-tokens": Part("num_speculative_tokens", COUNT)}, is_daily=True)
    scheduling_policy: SchedulingPolicy = setting("fcfs", Group.SCHEDULING, "fcfs: by arrival; "
        "priority: by the requests' priority first", one_of(SchedulingPolicy))
    priority_aging_s: float = setting(30.0, Group.SCHEDULING, "waiting time that raises a request "
        "by one priority", INTERVAL)
    # Off, `max_num_batched_tokens` must cover the context.
    enable_chunked_prefill: bool = setting(True, Group.SCHEDULING, "compute a long prompt over "
        "several steps")
    max_stall_ms: float = setting(500.0, Group.SCHEDULING, "how long prompts may delay running "
        "streams in one step", POSITIVE_MILLISECONDS)
    preemption: PreemptionMode = setting("auto", Group.SCHEDULING, "what happens to a sequence's "
        "KV when blocks run out; auto: whichever costs less", one_of(PreemptionMode),
        aliases=("--preemption-mode",))
    # fmt: on
    max_steps_in_flight: int | None = None

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return SpeculativeConfig.parse(self.speculative_config)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        SpeculativeConfig.parse(self.speculative_config)
        in_flight = self.max_steps_in_flight
        _check(in_flight is None or in_flight >= 1, "max_steps_in_flight must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(Section):
    """Where the model runs.

    Attributes:
        num_sharing: engines that share this machine's memory and cores.
    """

    # fmt: off
    device: Device = setting("auto", Group.MODEL, "where the model runs; auto: on CUDA if there is "
        "a GPU", one_of(Device), is_daily=True)
    num_threads: int | None = setting(None, Group.MODEL, "CPU threads of the engine, or of each of "
        "its ranks; default: one per core", whole(1, 1024), is_daily=True)
    tensor_parallel_size: int = setting(1, Group.MODEL, "processes that share each matrix of the "
        "model, one for each GPU or NUMA node", RANKS, aliases=("-tp",), is_daily=True)
    pipeline_parallel_size: int = setting(1, Group.MODEL, "parts into which the layers are cut, "
        "each in such processes", RANKS, aliases=("-pp",))
    # Refuses to start where it cannot be.
    deterministic: bool = setting(False, Group.MODEL, "results never depend on batch, chunks, "
        "preemption or cache; slower on a GPU")
    cudagraph_mode: CudagraphMode = setting("auto", Group.MODEL, "CUDA graphs. full: whole decode "
        "batches, other batches between attention layers; piecewise: all between attention layers; "
        "auto: full on a GPU", one_of(CudagraphMode), switches={"enforce-eager": "none"})
    # fmt: on
    num_sharing: int = 1

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check(
            self.num_ranks <= MAX_RANKS,
            f"--tensor-parallel-size times --pipeline-parallel-size is {self.num_ranks}: at most "
            f"{MAX_RANKS} ranks are possible",
        )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Section):
    """Adapters (LoRA) of the model; names follow vLLM."""

    # fmt: off
    enable_lora: bool = setting(False, Group.ADAPTERS, "serve adapters (LoRA) of the model beside "
        "it; they are loaded by --lora-modules and POST /v1/load_lora_adapter", is_daily=True)
    lora_modules: tuple[str, ...] = setting((), Group.ADAPTERS, "adapters in PEFT's format, and "
        "their names in the API", ADAPTER, needs=(Need(("enable_lora",)),), is_daily=True)
    max_loras: int | None = setting(None, Group.ADAPTERS, "adapters whose requests run at once; "
        f"default: {MAX_LORAS}, or --max-cpu-loras if that is less", whole(1, 1024))
    max_lora_rank: int = setting(16, Group.ADAPTERS, "largest rank of an adapter", whole(1, 512),
        is_daily=True)
    max_cpu_loras: int | None = setting(None, Group.ADAPTERS, "adapters kept in host memory; "
        "default: --max-loras", COUNT)
    # fmt: on

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check(
            self.max_cpu_loras is None or self.max_cpu_loras >= self.num_at_once,
            "--max-cpu-loras must be at least --max-loras",
        )
        _check(len(self.modules) == len(self.lora_modules), "--lora-modules has a name twice")

    @property
    def num_at_once(self) -> int:
        """Adapters whose requests run at once."""
        if self.max_loras is not None:
            return self.max_loras
        return MAX_LORAS if self.max_cpu_loras is None else min(MAX_LORAS, self.max_cpu_loras)

    @property
    def modules(self) -> dict[str, str]:
        """Paths by name."""
        return {name: path for name, _, path in (each.partition("=") for each in self.lora_modules)}


class TlsFiles(NamedTuple):
    """PEM files for connections between gateways and engines.

    Attributes:
        cert, key: of this process; `cert` may be a chain.
        ca: the authorities whose certificates are accepted.
    """

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "lora": LoraConfig,
}


def _object(text: str | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text or "{}")
    return found


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise ConfigError(message)
