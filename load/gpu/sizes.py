"""What the GPU bench measures: the shapes for a card, and tiny ones for the interpreter on a CPU.

Knows nothing of how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from penstock.load.kv.trace import TraceSpec

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Shapes of one layer's attention.

    Attributes:
        batches, contexts: decode runs every pair of them.
        long_context: the bar for decode holds from here.
        sweep_batch: of what is measured at the long context alone: FP8, other block sizes.
        prefills: lengths of a prompt computed whole; the bar holds for `bar_prefill`.
        block_sizes: of the sweep.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    batches: tuple[int, ...] = (32, 64, 128)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    long_context: int = 4096
    sweep_batch: int = 64
    prefills: tuple[int, ...] = (2048, 8192, 16384)
    bar_prefill: int = 8192
    block_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16-bit numbers: keys and values, each once for each KV head."""
        return 2 * self.num_kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """Decode steps of the whole engine: a prompt of so many tokens, then so many steps."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prompt_tokens: int = 1024
    output_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEndSizes:
    """A workload for the engine and for Hugging Face.

    Attributes:
        hf_batches: sizes of a static batch; the whole workload at once is tried as well.
        hf_limit_s: seconds for one of them: then its rate is that of the batches it has done.
    """

    trace: TraceSpec
    hf_batches: tuple[int, ...] = (1, 8, 32, 128)
    hf_limit_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that is chosen once for a run.

    Attributes:
        copy_bytes: of the buffer copied on the device for its bandwidth.
        pinned_bytes: of the one copied over the link.
        matmuls: n of the n × n matrix products; the fastest is the ceiling.
        flush_bytes: read between timed calls, so that none finds its data in a cache.
        model: `config.json` of the random checkpoint.
        check_lens: of sequences whose attention is checked.
        num_rows: of the small operations, each a token.
        num_sampled: rows of logits.
        vocab_sizes: that sampling is tuned for.
        swap_blocks: moved each way.
    """

    copy_bytes: int = 4 * GIB
    pinned_bytes: int = GIB
    matmuls: tuple[int, ...] = (8192, 16384)
    flush_bytes: int = GIB
    num_repeats: int = 30
    dtype: torch.dtype = torch.bfloat16
    model: dict[str, Any]
    check_lens: tuple[int, ...] = (1, 16, 33, 1025, 2051)
    num_rows: int = 32768
    num_sampled: int = 256
    vocab_sizes: tuple[int, ...] = (128256, 32000, 151936)
    swap_blocks: int = 1024
    attention: AttentionSizes = AttentionSizes()
    decode: DecodeSizes = DecodeSizes()
    end_to_end: EndToEndSizes


_SMALL_ATTENTION = AttentionSizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    batches=(2,),
    contexts=(40,),
    long_context=40,
    sweep_batch=2,
    prefills=(8, 24),
    bar_prefill=24,
    block_sizes=(8, 16),
)


def full_sizes() -> Sizes:
    """For a card: the model is an 8B Llama's shape (Llama 3.1)."""
    return Sizes(
        model=_llama(
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


def small_sizes() -> Sizes:
    """For the interpreter: the same code in seconds. Its figures mean nothing."""
    return Sizes(
        copy_bytes=MIB,
        pinned_bytes=MIB,
        matmuls=(64,),
        flush_bytes=1 << 16,
        num_repeats=1,
        dtype=torch.float16,
        model=_llama(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=96,
            max_position_embeddings=256,
            dtype="float32",
        ),
        check_lens=(1, 16, 37),
        num_rows=4,
        num_sampled=2,
        vocab_sizes=(96,),
        swap_blocks=3,
        attention=_SMALL_ATTENTION,
        decode=DecodeSizes(batches=(1, 2), prompt_tokens=10, output_tokens=6),
        end_to_end=EndToEndSizes(
            trace=TraceSpec(num_requests=4, prompt_mean=8.0, output_mean=6.0, longest=12),
            hf_batches=(1, 2),
            hf_limit_s=float("inf"),
        ),
    )


def _llama(**fields: Any) -> dict[str, Any]:
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
