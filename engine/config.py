"""Settings of the engine: frozen sections composed into `EngineConfig`.

Each section is read by one package only, and nothing is written back at run time: values measured
at start (the number of blocks, the context that fits) are passed separately.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, cast

from penstock.engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["none", "int8", "int4", "fp8"]
ModelImpl = Literal["auto", "native", "transformers"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8", "int8"]
CudagraphMode = Literal["auto", "none", "piecewise", "full"]
SchedulingPolicy = Literal["fcfs", "priority"]
DTYPES: tuple[DType, ...] = ("auto", "bfloat16", "float16", "float32")
MODEL_IMPLS: tuple[ModelImpl, ...] = ("auto", "native", "transformers")
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4", "fp8")
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "fp8", "int8")
CUDAGRAPH_MODES: tuple[CudagraphMode, ...] = ("auto", "none", "piecewise", "full")
SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle3")
MAX_SPECULATIVE_TOKENS = 31
MAX_PROMPT_LOOKUP = 16  # a drafter notes an n-gram of each length at every token
_PROMPT_LOOKUP = 3
DEMO_MODEL = "demo"
MAX_BLOCK_SIZE = 1 << 16
MAX_RANKS = 64
MAX_LOGPROBS = 20  # alternatives beside a token
FITTING_LEN = -1  # as `max_model_len`
MAX_LORAS = 8  # at once, unless said otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are loaded.

    Attributes:
        model: a directory, a GGUF file, a Hugging Face Hub id, or the name of a packaged model
            (`demo`, `smollm2`).
        tokenizer: another model, as `model` names one, whose tokenizer and chat template are used.
        tokenizer_revision: of `tokenizer` or, without one, of the model's own.
        chat_template: a file with a template, or its text, instead of all of the model's own.
        revision: branch, tag or commit on the Hub.
        download_dir: for models of the Hub; None: the Hub's own cache.
        hf_overrides: a JSON object: fields that replace those of `config.json`.
        rope_scaling, rope_theta: two of them: the first a JSON object.
        model_impl: `native` is one of our own families, `transformers` the library's code over our
            cache and products; `auto` is the first where there is one that has the model's options.
        trust_remote_code: run Python code that comes with the model, where `transformers` does not
            know its architecture.
        quantization: of a dense checkpoint's matrices at load.
        quantization_override: `PATTERN=KIND`: another quantization for the modules of this name, or
            pattern as in a shell; the first that matches counts.
        quantization_exclude: names or patterns of modules that stay as they are.
        quantize_activations: round the inputs of quantized matrices to bytes at run time; on a GPU
            those of matrices of 8 bits.
        max_model_len: context in tokens; None uses the model's own, and `FITTING_LEN` as much of it
            as the KV cache has room for.
        generation_config: `auto` reads EOS ids and sampling defaults from the model's
            `generation_config.json`, and EOS ids from elsewhere too; `none` ignores that file.
        override_generation_config: a JSON object: fields that replace those of the file, or are
            there without it.
        seed: of dummy weights, 0 if None; a gateway draws from it the seeds of requests without.
    """

    model: str = DEMO_MODEL
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    hf_overrides: str | None = None
    rope_scaling: str | None = None
    rope_theta: float | None = None
    model_impl: ModelImpl = "auto"
    trust_remote_code: bool = False
    dtype: DType = "auto"
    quantization: Quantization = "none"
    quantization_override: tuple[str, ...] = ()
    quantization_exclude: tuple[str, ...] = ()
    quantize_activations: bool = True
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    generation_config: Literal["auto", "none"] = "auto"
    override_generation_config: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(
            self.model_impl in MODEL_IMPLS,
            f"--model-impl must be one of {', '.join(MODEL_IMPLS)}, not {self.model_impl!r}",
        )
        for text in self.quantization_override:
            pattern, _, kind = text.rpartition("=")
            _check(
                pattern != "" and kind in QUANTIZATIONS,
                f"--quantization-override must be MODULE=KIND, such as lm_head=int8, with one of "
                f"{', '.join(QUANTIZATIONS)}, not {text!r}",
            )

    @property
    def wanted_max_model_len(self) -> int | None:
        """The context that was asked for; None: as much as there can be of the model's own."""
        return None if self.max_model_len == FITTING_LEN else self.max_model_len

    @property
    def config_overrides(self) -> dict[str, Any]:
        found = _object("--hf-overrides", self.hf_overrides)
        if self.rope_scaling is not None:
            found["rope_scaling"] = _object("--rope-scaling", self.rope_scaling)
        if self.rope_theta is not None:
            found["rope_theta"] = self.rope_theta
        return found

    @property
    def generation_overrides(self) -> dict[str, Any]:
        return _object("--override-generation-config", self.override_generation_config)

    @property
    def quantization_rules(self) -> dict[str, Quantization]:
        """The quantization of modules by pattern, where it is not `quantization`."""
        rules: dict[str, Quantization] = dict.fromkeys(self.quantization_exclude, "none")
        for text in self.quantization_override:
            pattern, _, kind = text.rpartition("=")
            rules.setdefault(pattern, cast("Quantization", kind))
        return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Memory for KV blocks.

    Attributes:
        block_size: tokens of a block; even, since the CPU kernels keep positions in pairs.
        kv_cache_dtype: `auto` is the model's dtype; `fp8` (e4m3) halves a token's KV; `int8`, on a
            CPU only, nearly does, more exactly: each key and value has a scale.
        kv_cache_memory_bytes: bytes for the device pool; None uses a share of the free memory.
        gpu_memory_utilization: the share of a GPU's memory that this engine may use in total.
        num_blocks: overrides the device pool's size, in blocks.
        enable_prefix_caching: share KV between requests whose tokens start alike.
        swap_space: GiB of host memory for the second tier; None uses a moderate share of the free
            memory, 0 turns the tier off.
        num_host_blocks: overrides the host tier's size, in blocks.
        mm_encoder_cache_bytes: of the features of images, which are kept for further requests.
    """

    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    swap_space: float | None = None
    num_host_blocks: int | None = None
    mm_encoder_cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        # On a CPU the kernels keep positions in pairs; an odd size would leave all of it to torch.
        _check(
            self.block_size % 2 == 0 and 2 <= self.block_size <= MAX_BLOCK_SIZE,
            f"--block-size must be an even number from 2 to {MAX_BLOCK_SIZE}, "
            f"not {self.block_size}",
        )
        share = self.gpu_memory_utilization
        _check(
            0.0 < share <= 1.0,
            f"--gpu-memory-utilization must be more than 0 and at most 1, not {share}",
        )
        _check(self.num_blocks is None or self.num_blocks >= 1, "--num-blocks must be at least 1")
        _check(
            self.swap_space is None or 0.0 <= self.swap_space <= 1e6,
            f"--swap-space must be a number of GiB from 0 to 1000000, not {self.swap_space}",
        )
        _check(
            self.num_host_blocks is None or self.num_host_blocks >= 0,
            "--num-host-blocks must not be negative",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What `--speculative-config` says, by vLLM's names.

    Attributes:
        method: `ngram` copies what followed the newest tokens before; `draft_model` asks `model`;
            so does `eagle3`, with the hidden states of the model that it drafts for.
        model: a smaller model of the same vocabulary, as `ModelConfig.model` names one. It is held
            in the dtype and quantization of the model that it drafts for. Or an EAGLE-3 head, held
            in its dtype.
        num_speculative_tokens: at most so many drafts of a sequence in a step. The default fills
            the eight rows that the CPU kernels multiply at once.
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

    @classmethod
    def parse(cls, value: str | Mapping[str, str | int] | None) -> SpeculativeConfig | None:
        """From a JSON object or a mapping; None: no speculation.

        Raises:
            ConfigError: names the key at fault.
        """
        if value is None:
            return None
        found: Any = value
        if isinstance(value, str):
            try:
                found = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"--speculative-config is not JSON: {error}") from error
        if not isinstance(found, Mapping):
            raise ConfigError("--speculative-config must be a JSON object")
        known = [item.name for item in fields(cls)]
        for name in found:
            _check(
                name in known,
                f"--speculative-config has no key {name!r}: choose from {', '.join(known)}",
            )
        given = {name: value for name, value in found.items() if value is not None}
        config = cls(
            **{
                "method": "draft_model" if "model" in given else "ngram",
                "prompt_lookup_min": given.get("prompt_lookup_max", _PROMPT_LOOKUP),
                "prompt_lookup_max": given.get("prompt_lookup_min", _PROMPT_LOOKUP),
                **given,
            }
        )
        _check(
            config.method in SPECULATIVE_METHODS,
            f"--speculative-config: method must be one of {', '.join(SPECULATIVE_METHODS)}, "
            f"not {config.method!r}",
        )
        has_model = isinstance(config.model, str) and config.model != ""
        if config.method == "ngram":
            _check(config.model is None, "--speculative-config: the method ngram has no model")
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
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step.

    Attributes:
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed per step over all sequences.
        enable_chunked_prefill: a prompt may be computed over several steps. Off, a prompt is
            computed in one step, so `max_num_batched_tokens` must cover the context.
        max_stall_ms: how long prompts may delay decoding sequences in one step; longer prompts are
            computed in smaller chunks.
        max_steps_in_flight: batches handed to the device before the first result is awaited; None
            means 2 on a GPU, which runs one while the next is planned, and 1 on a CPU; where the
            layers are cut into stages, one for each.
        scheduling_policy: `fcfs` orders by arrival; `priority` by the requests' priority first.
        priority_aging_s: under `priority`, seconds of waiting that move a request up by one.
        preemption: what happens to a victim's KV when blocks run out: `swap` moves it to host
            memory, `recompute` drops it, `auto` picks the cheaper one by measured rates.
        speculative_config: how tokens are drafted, as `SpeculativeConfig.parse` takes it.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    max_stall_ms: float = 500.0
    max_steps_in_flight: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging_s: float = 30.0
    preemption: PreemptionMode = "auto"
    speculative_config: str | Mapping[str, str | int] | None = None

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return SpeculativeConfig.parse(self.speculative_config)

    def __post_init__(self) -> None:
        SpeculativeConfig.parse(self.speculative_config)
        _check(self.max_num_seqs >= 1, "--max-num-seqs must be at least 1")
        _check(self.max_num_batched_tokens >= 1, "--max-num-batched-tokens must be at least 1")
        _check(0.0 < self.max_stall_ms < float("inf"), "--max-stall-ms must be more than 0")
        in_flight = self.max_steps_in_flight
        _check(in_flight is None or in_flight >= 1, "max_steps_in_flight must be at least 1")
        _check(0.0 < self.priority_aging_s < float("inf"), "--priority-aging-s must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs. `auto` is CUDA if available, else the CPU.

    Attributes:
        num_threads: compute threads of a rank on a CPU; None derives the number from the cores.
        tensor_parallel_size: processes that share each matrix of the model.
        pipeline_parallel_size: parts into which its layers are cut, each with such processes.
        deterministic: refuse to start where a result may depend on the batch, a prompt's chunks,
            preemption or the prefix cache.
        cudagraph_mode: what a GPU replays from graphs: `full`, decode batches whole and other
            batches between attention calls; `piecewise`, all batches between attention calls;
            `none`. `auto` is `full` on a GPU.
        num_sharing: engines that share this machine's memory and cores.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    deterministic: bool = False
    cudagraph_mode: CudagraphMode = "auto"
    num_sharing: int = 1

    def __post_init__(self) -> None:
        sizes = {
            "tensor": self.tensor_parallel_size,
            "pipeline": self.pipeline_parallel_size,
        }
        for kind, size in sizes.items():
            _check(
                1 <= size <= MAX_RANKS,
                f"--{kind}-parallel-size must be between 1 and {MAX_RANKS}, not {size}",
            )
        _check(
            self.num_ranks <= MAX_RANKS,
            f"--tensor-parallel-size times --pipeline-parallel-size is {self.num_ranks}: at most "
            f"{MAX_RANKS} ranks are possible",
        )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def without_enforce_eager(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which `enforce_eager`, as vLLM has it, is the mode of graphs that it stands for.

    Raises:
        ConfigError: they ask for graphs, too.
    """
    found = dict(settings)
    is_eager = found.pop("enforce_eager", False)
    _check(isinstance(is_eager, bool), f"enforce_eager must be bool, not {is_eager!r}")
    if is_eager:
        mode = found.get("cudagraph_mode", "auto")
        _check(
            mode in ("auto", "none"),
            "--enforce-eager means --cudagraph-mode none: it cannot be used with "
            f"--cudagraph-mode {mode}",
        )
        found["cudagraph_mode"] = "none"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters (LoRA) of the model; names follow vLLM.

    Attributes:
        max_loras: adapters whose requests run at once; None: `MAX_LORAS`, or `max_cpu_loras` if
            that is less.
        max_lora_rank: the largest rank of an adapter.
        max_cpu_loras: adapters in host memory; None: as many as run at once.
        lora_modules: `NAME=PATH` of adapters that are there from the start.
    """

    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = self.num_at_once
        _check(1 <= most <= 1024, "--max-loras must be between 1 and 1024")
        _check(1 <= self.max_lora_rank <= 512, "--max-lora-rank must be between 1 and 512")
        _check(
            self.max_cpu_loras is None or self.max_cpu_loras >= most,
            "--max-cpu-loras must be at least --max-loras",
        )
        _check(not self.lora_modules or self.enable_lora, "--lora-modules needs --enable-lora")
        for text in self.lora_modules:
            name, _, path = text.partition("=")
            _check(bool(name and path), f"--lora-modules must be NAME=PATH, not {text!r}")
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


def _object(flag: str, text: str | None) -> dict[str, Any]:
    """The JSON object that a flag gave."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, not {text!r}")
    return found


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise ConfigError(message)
