"""Running a decoder by hand: a KV pool, scattered blocks, chunks of chosen sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.backends import cpu_kernels, fastest, in_torch
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape
from penstock.kernels.cpu.isa import ISA_VARIABLE
from penstock.kernels.paged_layout import PagedLayout

PagedLogits = Callable[..., Tensor]
BLOCK_SIZE = 4


@pytest.fixture(params=["torch", "kernels"])
def paged_logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PagedLogits:
    """Logits of all tokens of one sequence, computed in chunks: [num_tokens, vocab_size].

    By the decoder in torch, and by the one whose weights the CPU kernels own, if asked for with the
    instruction set `isa`.
    """

    def run(
        path: Path,
        token_ids: Sequence[int],
        chunks: Sequence[int],
        *,
        num_prompt: int | None = None,
        isa: str | None = None,
        implementation: str | None = None,
    ) -> Tensor:
        assert sum(chunks) == len(token_ids)
        if isa is not None:
            monkeypatch.setenv(ISA_VARIABLE, isa)
        loaded = load_model(ModelConfig(), path, torch.device("cpu"))
        model = in_torch(loaded)
        if (implementation or request.param) == "kernels":
            model = fastest(loaded, BLOCK_SIZE, cpu_kernels(loaded, BLOCK_SIZE))
            assert isinstance(model, CpuModel)
        return run_paged(model, token_ids, chunks, num_prompt=num_prompt)

    return run


def run_paged(
    model: LanguageModel,
    token_ids: Sequence[int],
    chunks: Sequence[int],
    *,
    num_prompt: int | None = None,
) -> Tensor:
    """Logits of all tokens of one sequence, computed in chunks: [num_tokens, vocab_size]."""
    shape = KVShape.of(model.state_spec, BLOCK_SIZE)
    num_blocks = shape.num_blocks_for(len(token_ids))
    pool = shape.allocate(num_blocks + 3, torch.device("cpu")).fill_(torch.nan)
    table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1))
    table = table[:num_blocks].int()
    logits = []
    with torch.inference_mode():
        start = 0
        for size in chunks:
            positions = torch.arange(start, start + size)
            context = ForwardContext(
                kv_pool=pool,
                layout=_layout(positions, table),
                positions=positions,
                prompt_lens=torch.full_like(positions, num_prompt or len(token_ids)),
            )
            ids = torch.tensor(token_ids[start : start + size])
            logits.append(model.logits(model(ids, context)).clone())
            start += size
    return torch.cat(logits).float()


def _layout(positions: Tensor, table: Tensor) -> PagedLayout:
    seq_len = int(positions[-1]) + 1
    blocks = table[positions // BLOCK_SIZE].long()
    return PagedLayout(
        query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=table[None],
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query_len=len(positions),
        max_seq_len=seq_len,
    )
