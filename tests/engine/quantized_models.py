"""Models with quantized matrices, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.config import ModelConfig, Quantization
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Linear
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.runner.kv_cache import KVShape
from penstock.kernels.paged_layout import PagedLayout

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_TOKENS = 45


def load(
    path: Path,
    quantization: Quantization,
    *,
    in_torch: bool = False,
    dtype: str = "float32",
    **settings: Any,
) -> LanguageModel:
    """settings: other fields of `ModelConfig`."""
    config = ModelConfig(dtype=dtype, quantization=quantization, **settings)  # type: ignore[arg-type]
    decoder = load_model(config, path, CPU)
    library = None if in_torch else cpu_kernels(decoder, BLOCK_SIZE)
    model = fastest(decoder, BLOCK_SIZE, library)
    assert isinstance(model, TorchModel if in_torch else CpuModel)
    return model


@torch.inference_mode()
def logits(
    model: LanguageModel,
    chunks: tuple[int, ...] | None = None,
    *,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Of tokens, NUM_TOKENS random ones unless given, in chunks of these sizes or at once:
    [num_tokens, vocab_size]"""
    if token_ids is None:
        token_ids = torch.randint(0, 160, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    shape = KVShape.of(model.state_spec, BLOCK_SIZE)
    num_blocks = shape.num_blocks_for(len(token_ids))
    pool = shape.allocate(num_blocks, CPU)
    pool.view(torch.uint8).fill_(0xFF)  # NaN in every dtype, and as a scale
    parts = []
    for positions in torch.arange(len(token_ids)).split(list(chunks or (len(token_ids),))):
        seq_len = int(positions[-1]) + 1
        layout = PagedLayout(
            query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            slot_mapping=positions,
            max_query_len=len(positions),
            max_seq_len=seq_len,
        )
        context = ForwardContext(
            kv_pool=pool, layout=layout, positions=positions, prompt_lens=positions
        )
        parts.append(model.logits(model(token_ids[positions], context)).float().clone())
    return torch.cat(parts)


def linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())
