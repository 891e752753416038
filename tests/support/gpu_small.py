"""The GPU bench without a GPU: the same code on a CPU with tiny shapes, in Triton's interpreter.

    python -m tests.support.gpu_small [FLAGS OF penstock.load.gpu]

It proves the script and measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.kernels.gpu.measuring import AttentionSizes
from penstock.load.gpu import __main__ as command
from penstock.load.gpu.bench import (
    MIB,
    DecodeSizes,
    Sizes,
    llama,
)

from .interpreter import interpret_kernels

SMALL_ATTENTION = AttentionSizes(
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


def small_sizes() -> Sizes:
    """For the interpreter: the same code in seconds. Its figures mean nothing."""
    return Sizes(
        copy_bytes=MIB,
        pinned_bytes=MIB,
        matmuls=(64,),
        flush_bytes=1 << 16,
        num_repeats=1,
        dtype=torch.float16,
        model=llama(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=96,
            max_position_embeddings=256,
            dtype="float32",
        ),
        swap_blocks=3,
        attention=SMALL_ATTENTION,
        decode=DecodeSizes(batches=(1, 2), prompt_tokens=10, output_tokens=6),
    )


def main(words: Sequence[str] | None = None) -> int:
    interpret_kernels()
    torch.set_num_threads(1)  # threads would only wait for each other
    parsed = command.parser().parse_args(words)
    parsed.out = parsed.out or Path("build/bench")
    device, name = torch.device("cpu"), "CPU, Triton's interpreter"
    return command.measure(parsed, device, small_sizes(), device_name=name)


if __name__ == "__main__":
    sys.exit(main())
