"""What every section of the GPU bench gets: device, sizes, timer, results, time left."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.kernels.gpu.tuning import Config
from penstock.load.gpu.report import BARS, Results
from penstock.load.workloads.lengths import TraceSpec

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Shapes of one layer's attention. Decode runs every pair of `batches` and `contexts`;
    `prefills` are lengths of whole prompts, and the bar holds for `bar_prefill`."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    batches: tuple[int, ...] = (32, 64, 128)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    long_context: int = 4096  # the bar for decode holds from here
    sweep_batch: int = 64  # of what is measured at the long context alone: FP8, other block sizes
    prefills: tuple[int, ...] = (2048, 8192, 16384)
    bar_prefill: int = 8192
    block_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)  # of the sweep

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16-bit numbers: keys and values of each KV head."""
        return 2 * self.num_kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """Decode steps of the whole engine: `prompt_tokens`, then `output_tokens` steps."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prompt_tokens: int = 1024
    output_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEndSizes:
    """A workload for the engine and for Hugging Face, whose static batches have the sizes
    `hf_batches`, or the whole workload's. After `hf_limit_s` seconds, the rate is that of the
    completed batches."""

    trace: TraceSpec
    hf_batches: tuple[int, ...] = (1, 8, 32, 128)
    hf_limit_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that is chosen once for a run. `matmuls` are n of the n × n products; the
    fastest is the ceiling."""

    copy_bytes: int = 4 * GIB  # of the buffer copied on the device for its bandwidth
    pinned_bytes: int = GIB  # of the one copied over the link
    matmuls: tuple[int, ...] = (8192, 16384)
    flush_bytes: int = GIB  # read between timed calls, so that none finds its data in a cache
    num_repeats: int = 30
    dtype: torch.dtype = torch.bfloat16
    model: dict[str, Any]  # `config.json` of the random checkpoint
    check_lens: tuple[int, ...] = (1, 16, 33, 1025, 2051)  # of sequences whose attention is checked
    num_rows: int = 32768  # of the small operations, each a token
    product_rows: tuple[int, ...] = (1, 4, 16, 2048)  # of products with quantized weights
    num_sampled: int = 256  # rows of logits
    vocab_sizes: tuple[int, ...] = (128256, 32000, 151936)  # that sampling is tuned for
    swap_blocks: int = 1024  # moved each way
    attention: AttentionSizes = AttentionSizes()
    decode: DecodeSizes = DecodeSizes()
    end_to_end: EndToEndSizes


def full_sizes() -> Sizes:
    """For a card: the model has the shape of an 8B Llama (Llama 3.1)."""
    return Sizes(
        model=llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
            dtype="bfloat16",
        ),
        end_to_end=EndToEndSizes(trace=TraceSpec(num_requests=384, output_mean=192.0, longest=512)),
    )


def llama(**fields: Any) -> dict[str, Any]:
    """A `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": fields["hidden_size"] // fields["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        **fields,
    }


_NUM_WARM_UPS = 3  # the first compiles


class Timer:
    """Median seconds of a call on a device, from cold caches.

    Between two timed calls a buffer larger than any cache is read, not written: dirty cache
    lines would be written back during the measured call. The read also keeps the device busy
    while the next call is launched, so that launching is not timed. On a CPU, wall time is
    measured.
    """

    def __init__(self, device: torch.device, *, flush_bytes: int, num_repeats: int) -> None:
        self._device = device
        self._num_repeats = num_repeats
        self._flushed = torch.ones(flush_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)

    def median_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the device, after all earlier work."""
        for _ in range(_NUM_WARM_UPS if self._device.type == "cuda" else 1):
            call()
        if self._device.type == "cuda":
            return statistics.median(self._on_stream(call))
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def wall_s(self, call: Callable[[], object]) -> float:
        """Wall time of one call with launching, for calls that use several streams."""
        call()
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def _on_stream(self, call: Callable[[], object]) -> list[float]:
        cuda: Any = torch.cuda
        moments = [
            (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            for _ in range(self._num_repeats)
        ]
        torch.cuda.synchronize()
        for start, end in moments:
            self._flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in moments]

    def _on_wall(self, call: Callable[[], object]) -> float:
        self._flush()
        self._wait()
        began_s = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began_s

    def _flush(self) -> None:
        torch.sum(self._flushed, dim=0, out=self._sum)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


# Launch configurations worth trying, and the search for the fastest.
#
# Each replaces some of what a launcher chooses by itself.

DECODE: tuple[Config, ...] = tuple(
    {"BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_n, num_warps, num_stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4))
)
PREFILL: tuple[Config, ...] = tuple(
    {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
)
# Some of DECODE, where there is no time for all.
FEW_DECODE: tuple[Config, ...] = (
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
)


def sampling(own: Config) -> tuple[Config, ...]:
    """Variations of the launcher's own choice for a vocabulary."""
    return tuple(
        {**own, "BLOCK": block, "num_warps": num_warps}
        for block, num_warps in product((1024, 2048, 4096, 8192), (4, 8, 16))
    )


# Of a product with quantized weights, by class of rows.
PRODUCTS: dict[str, tuple[Config, ...]] = {
    name: tuple(
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
        for block_n, num_warps, num_stages in product(block_ns, (2, 4, 8), (2, 3, 4, 5))
    )
    for name, block_m, block_ns in (
        ("few", 16, (16, 32, 64)),
        ("some", 64, (32, 64, 128)),
        ("many", 128, (64, 128, 256)),
    )
}


def seconds_of(timer: Timer, call: Callable[[], object]) -> float:
    """Seconds of a call; infinite if its configuration needs more than the device has."""
    triton = importlib.import_module("triton")  # not before it is known whether to interpret
    try:
        return timer.median_s(call)
    except triton.OutOfResources:
        return float("inf")


def fastest_s(timer: Timer, run: Callable[..., object], configs: Sequence[Config]) -> float:
    """Seconds with the best of the configurations and the launcher's own choice."""
    return min(seconds_of(timer, partial(run, config=config)) for config in (None, *configs))


# -- what every section is given ----------------------------------------------------------------

T = TypeVar("T")


@dataclass(kw_only=True)
class Bench:
    """A run."""

    device: torch.device
    sizes: Sizes
    results: Results
    deadline_s: float = float("inf")  # of the present section, by `time.perf_counter`
    timer: Timer = field(init=False)
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.timer = Timer(
            self.device, flush_bytes=self.sizes.flush_bytes, num_repeats=self.sizes.num_repeats
        )
        self._generator = torch.Generator(self.device).manual_seed(time.time_ns())

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.perf_counter())

    def in_time(self, section: str, cells: Iterable[T]) -> Iterator[T]:
        """The cells, until the section's time is up; the rest is noted."""
        left_out = []
        for cell in cells:
            if self.remaining_s > 0:
                print(f"  {section}: {cell}", flush=True)
                yield cell
            else:
                left_out.append(cell)
        if left_out:
            self.results.add_note(
                section, f"no time left for {', '.join(str(cell) for cell in left_out)}"
            )

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, different in every run."""
        numbers = torch.empty(shape, dtype=dtype or self.sizes.dtype, device=self.device)
        return numbers.normal_(generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        """0 … size - 1 in random order: int64 [size]."""
        return torch.randperm(size, generator=self._generator, device=self.device)

    def conclude(self, figure: str, values: Sequence[float], *, num_cells: int) -> None:
        """Set a figure to the worst of its cells, if all of them were measured."""
        is_whole = len(values) == num_cells
        self.results.add_figure(figure, BARS[figure].worst(values) if is_whole else None)


Section = Callable[[Bench], None]
Check = tuple[str, float, float]  # what was checked, its error, the bound of that
