"""Paged attention on a GPU (`make gpu`): captured in graphs, and bit for bit across steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.paged_case import CaseShape, PagedCase
from torch import Tensor

from penstock.kernels.paged_attention import paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DECODES = [(9000, 1), (17, 1), (0, 1), (1500, 1)]
SHAPE = CaseShape(step=DECODES, heads=(32, 8), head_dim=128, dtype=torch.bfloat16)
MAX_SEQ_LEN = 32_768


def attend(case: PagedCase, split_len: int | None = None) -> Tensor:
    return paged_attention(*case.tensors, **case.arguments, split_len=split_len)


def check(case: PagedCase, output: Tensor) -> None:
    expected = case.expected()
    torch.testing.assert_close(output[: len(expected)].double(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.parametrize("split_len", [None, 2048])
def test_a_captured_decode_serves_other_lengths(split_len: int | None) -> None:
    case = PagedCase(SHAPE, device="cuda")
    seq_lens = case.layout.seq_lens
    longest = seq_lens.clone()
    case.layout = replace(case.layout, max_seq_len=MAX_SEQ_LEN)
    attend(case, split_len)  # compiles
    seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(case, split_len)
    for lengths in (longest, torch.ones_like(longest), (longest + 1) // 2):
        seq_lens.copy_(lengths)
        output.fill_(torch.nan)
        graph.replay()
        check(case, output)


def test_a_captured_batch_may_be_padded() -> None:
    case = PagedCase(SHAPE, device="cuda")
    padded = case.padded(num_empty=2, num_zero=2)
    attend(padded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(padded)
    output.fill_(torch.nan)
    graph.replay()
    check(case, output[: len(case.query)])
    assert not output[len(case.query) :].any()


def test_with_fixed_splits_a_row_does_not_depend_on_its_batch() -> None:
    case = PagedCase(SHAPE, device="cuda")
    together = attend(case, split_len=1024)
    for seq in range(len(DECODES)):
        alone = attend(case.only(seq), split_len=1024)
        assert torch.equal(alone, together[seq : seq + 1])


@pytest.mark.parametrize("window", [None, 300])
def test_chunks_do_not_change_a_prompts_bits(window: int | None) -> None:
    shape = replace(SHAPE, step=[(100, 900)], window=window, head_dim=64)
    case = PagedCase(shape, device="cuda")
    whole = attend(case)
    for num_tokens in (870, 333, 60):
        assert torch.equal(attend(case.last(num_tokens)), whole[-num_tokens:])
