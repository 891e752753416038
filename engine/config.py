"""Settings of the engine: frozen sections composed into `EngineConfig`.

Each section is read by one package only, and nothing is written back at run time: values measured
at start (the number of blocks, the context that fits) are passed separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

from penstock.engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["none", "int8", "int4", "fp8"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8", "int8"]
CudagraphMode = Literal["auto", "none", "piecewise", "full"]
SchedulingPolicy = Literal["fcfs", "priority"]
DTYPES: tuple[DType, ...] = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4", "fp8")
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "fp8", "int8")
CUDAGRAPH_MODES: tuple[CudagraphMode, ...] = ("auto", "none", "piecewise", "full")
DEMO_MODEL = "demo"
MAX_BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are loaded.

    Attributes:
        model: a directory, a Hugging Face Hub id, or `demo` for the built-in model.
        revision: branch, tag or commit on the Hub.
        quantization: of a dense checkpoint's matrices at load.
        quantization_override: `PATTERN=KIND`: another quantization for the modules of this name, or
            pattern as in a shell; the first that matches counts.
        quantization_exclude: names or patterns of modules that stay as they are.
        quantize_activations: round the inputs of quantized matrices to bytes at run time; on a GPU
            those of matrices of 8 bits.
        max_model_len: context in tokens; None uses the model's own.
        generation_config: `auto` reads EOS ids and sampling defaults from the model's
            `generation_config.json`; `none` reads EOS ids from `config.json` only.
    """

    model: str = DEMO_MODEL
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization = "none"
    quantization_override: tuple[str, ...] = ()
    quantization_exclude: tuple[str, ...] = ()
    quantize_activations: bool = True
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    generation_config: Literal["auto", "none"] = "auto"
    seed: int = 0  # of dummy weights

    def __post_init__(self) -> None:
        for text in self.quantization_override:
            pattern, _, kind = text.rpartition("=")
            _check(
                pattern != "" and kind in QUANTIZATIONS,
                f"--quantization-override must be MODULE=KIND, such as lm_head=int8, with one of "
                f"{', '.join(QUANTIZATIONS)}, not {text!r}",
            )

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
    """

    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    swap_space: float | None = None
    num_host_blocks: int | None = None

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
            means 2 on a GPU, which runs one while the next is planned, and 1 on a CPU.
        scheduling_policy: `fcfs` orders by arrival; `priority` by the requests' priority first.
        priority_aging_s: under `priority`, seconds of waiting that move a request up by one.
        preemption: what happens to a victim's KV when blocks run out: `swap` moves it to host
            memory, `recompute` drops it, `auto` picks the cheaper one by measured rates.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    max_stall_ms: float = 500.0
    max_steps_in_flight: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging_s: float = 30.0
    preemption: PreemptionMode = "auto"

    def __post_init__(self) -> None:
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
        num_threads: compute threads on a CPU; None derives the number from the cores.
        deterministic: refuse to start where a result may depend on the batch, a prompt's chunks,
            preemption or the prefix cache.
        cudagraph_mode: what a GPU replays from graphs: `full`, decode batches whole and other
            batches between attention calls; `piecewise`, all batches between attention calls;
            `none`. `auto` is `full` on a GPU.
        enforce_eager: no graphs, whatever `cudagraph_mode` says.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    deterministic: bool = False
    cudagraph_mode: CudagraphMode = "auto"
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise ConfigError(message)
