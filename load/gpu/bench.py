"""What every section of the GPU bench gets: device, sizes, timer, and its results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.gpu.measuring import AttentionSizes, Draw, Timer
from penstock.kernels.gpu.tuning import write_whole
from penstock.load.report.tables import table

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """Decode steps of the whole engine: `prompt_tokens`, then `output_tokens` steps."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prompt_tokens: int = 1024
    output_tokens: int = 64


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
    model: Mapping[str, Any]  # `config.json` of the random checkpoint
    swap_blocks: int = 1024  # moved each way
    attention: AttentionSizes = field(default_factory=AttentionSizes)
    decode: DecodeSizes = DecodeSizes()


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
        )
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


# -- results --------------------------------------------------------------------------------------

COPY = "copy_bytes_per_s"  # bytes read and bytes written
MATMUL = "matmul_flop_per_s"
TO_DEVICE = "host_to_device_bytes_per_s"
TO_HOST = "device_to_host_bytes_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bound that a figure must reach."""

    bound: float
    is_upper: bool = False  # the figure may not exceed it; else it may not fall below
    meaning: str  # of the figure, with the cells it is the worst of

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.is_upper else value >= self.bound


BARS: Mapping[str, Bar] = {
    "decode_attention_of_copy": Bar(
        bound=0.85,
        meaning="decode attention, KV bytes/s ÷ copy bandwidth: batch ≥ 32, context ≥ 4k",
    ),
    "paged_over_contiguous": Bar(
        bound=1.05,
        is_upper=True,
        meaning="time of decode attention over random block tables ÷ over contiguous KV: "
        "context ≥ 1k",
    ),
    "prefill_attention_of_matmul": Bar(
        bound=0.50, meaning="prefill attention, causal FLOP/s ÷ bf16 matrix product: a prompt of 8k"
    ),
    "decode_step_of_roofline": Bar(
        bound=0.75,
        meaning="decode step of an 8B Llama: time to read weights and KV at copy bandwidth ÷ step, "
        "batch 1–64",
    ),
    "swap_of_pinned_copy": Bar(
        bound=0.85, meaning="swap, bytes/s ÷ copy from and to pinned memory: both directions"
    ),
}


@dataclass(kw_only=True)
class Bench:
    """A run, and its results so far, written to all `paths` at every addition.

    A figure is the worst of the cells that its bar covers, and None unless all were measured.
    """

    device: torch.device
    sizes: Sizes
    about: Mapping[str, Any]
    paths: Sequence[Path] = ()
    ceilings: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(BARS))
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by section
    notes: list[str] = field(default_factory=list)
    is_complete: bool = False
    timer: Timer = field(init=False)
    draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.timer = Timer(
            self.device, flush_bytes=sizes.flush_bytes, num_repeats=sizes.num_repeats
        )
        self.draw = Draw(self.device, sizes.dtype)

    def add_ceiling(self, name: str, value: float) -> None:
        self.ceilings[name] = value
        self.save()

    def add_row(self, section: str, row: Mapping[str, Any]) -> None:
        print(f"  {section}: {row}", flush=True)
        self.rows.setdefault(section, []).append(dict(row))
        self.save()

    def add_note(self, note: str) -> None:
        self.notes.append(note)
        self.save()

    def conclude(self, figure: str, values: Sequence[float]) -> None:
        """Set a figure to the worst of its cells, of which all were measured."""
        self.figures[figure] = max(values) if BARS[figure].is_upper else min(values)
        self.save()

    def save(self) -> None:
        names = ("is_complete", "ceilings", "figures", "rows", "notes")
        data = {**self.about, **{name: getattr(self, name) for name in names}}
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        for path in self.paths:
            write_whole(path, text)

    def markdown(self) -> str:
        """Every cell, then machine, figures with their bars, and ceilings."""
        about = "; ".join(f"{name} {value}" for name, value in self.about.items())
        if not self.is_complete:
            about += "; **the run did not end**"
        figures = [
            [bar.meaning, "not measured" if value is None else f"{value:.3f}",
             f"{'≤' if bar.is_upper else '≥'} {bar.bound:g}",
             "–" if value is None else "yes" if bar.is_met(value) else "**no**"]
            for bar, value in ((BARS[name], value) for name, value in self.figures.items())
        ]  # fmt: skip
        ceilings = [[name, _shown(name, value)] for name, value in self.ceilings.items()]
        parts = []
        for name, rows in self.rows.items():
            shown = [[_shown(key, value) for key, value in row.items()] for row in rows]
            parts.append(f"### {name}\n\n{table(list(rows[0]), shown)}")
        parts += [*self.notes, about, table(("figure", "measured", "bar", "met"), figures)]
        return "\n\n".join([*parts, table(("ceiling", ""), ceilings)])


def _shown(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if key.endswith("_per_s"):
        is_flop = key.endswith("flop_per_s")
        return f"{value / 1e12:,.1f} TFLOP/s" if is_flop else f"{value / 1e9:,.1f} GB/s"
    return f"{value:,.3f}"
