"""Rows to sample from, and when two implementations may differ: where a draw is a close call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.reference.sampling import sample_tokens_reference
from penstock.kernels.token_masks import TokenMasks, mask_logits, mask_words

_CLOSE = 1e-5  # of a row's weight: implementations round their weights to float32
_KINDS = ("normal", "few values", "masked", "flat", "one peak", "huge")


@dataclass(frozen=True)
class SamplingCase:
    """Logits [num_rows, vocab_size], and parameters float64 [num_rows] as `sample_tokens` has
    them."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    masks: TokenMasks | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.uniforms

    def row(self, row: int) -> SamplingCase:
        """A single row, its mask applied."""
        logits = self.logits if self.masks is None else mask_logits(self.logits, self.masks)
        return SamplingCase(*(each[row : row + 1] for each in (logits, *self.parameters)))

    def to(self, device: str) -> SamplingCase:
        masks = self.masks and TokenMasks(*(each.to(device) for each in self.masks))
        return SamplingCase(
            *(each.to(device) for each in (self.logits, *self.parameters)), masks=masks
        )


def make_case(
    logits: Tensor, masks: TokenMasks | None = None, **parameters: float | list[float]
) -> SamplingCase:
    """Parameters that are not given change nothing."""
    neutral = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, "uniforms": 0.5}
    assert parameters.keys() <= neutral.keys()
    columns = {
        name: torch.as_tensor(value, dtype=torch.float64).expand(len(logits)).contiguous()
        for name, value in (neutral | parameters).items()
    }
    return SamplingCase(logits, **columns, masks=masks)


def random_masks(num_rows: int, vocab_size: int, seed: int) -> TokenMasks:
    """Of some rows: few tokens, some, all or none; in another order than the rows."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.02, 0.5, 1.0, 0.0])[torch.randint(4, (num_rows,), generator=generator)]
    words = mask_words(vocab_size)
    is_allowed = torch.rand(num_rows, words, 32, generator=generator) < shares[:, None, None]
    bits = (is_allowed.long() << torch.arange(32)).sum(dim=-1).to(torch.int32)
    indices = torch.randperm(num_rows, generator=generator)
    indices[torch.rand(num_rows, generator=generator) < 0.3] = -1
    return TokenMasks(bits, indices)


def random_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """float32 [num_rows, vocab_size]; at least one token of a row is not masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "few values":
        logits = logits.round()
    elif kind == "masked":
        is_masked = torch.rand(logits.shape, generator=generator) < 0.7
        is_masked[:, seed % vocab_size] = False
        logits[is_masked] = -torch.inf
    elif kind == "flat":
        logits *= 1e-4
    elif kind == "one peak":
        logits[:, seed % vocab_size] += 40.0
    elif kind == "huge":
        logits *= 1e4
    return logits


@st.composite
def sampling_cases(draw: st.DrawFn, sizes: list[int], dtype: torch.dtype) -> SamplingCase:
    """A few rows of one kind, with parameters of their own."""
    vocab_size = draw(st.sampled_from(sizes))
    num_rows = draw(st.integers(1, 4))
    logits = random_logits(
        draw(st.sampled_from(_KINDS)), num_rows, vocab_size, draw(st.integers(0, 999))
    )

    masks = None
    if draw(st.booleans()):
        masks = random_masks(num_rows, vocab_size, draw(st.integers(0, 999)))

    def column(strategy: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(strategy, min_size=num_rows, max_size=num_rows))

    return make_case(
        logits.to(dtype),
        masks,
        temperature=column(st.sampled_from([0.0, 1e-40, 0.1, 0.8, 1.0, 2.0, 100.0])),
        top_k=column(st.sampled_from([0, 0, 1, 2, 7, 50, vocab_size - 1, vocab_size, 10**6])),
        top_p=column(st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 1e-12])),
        min_p=column(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
        uniforms=column(
            st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True)
        ),
    )


def check_tokens(case: SamplingCase, token_ids: Tensor, is_valid: Tensor) -> None:
    """They are what the reference says, but for close calls."""
    expected, is_expected_valid = sample_tokens_reference(case.logits, *case.parameters, case.masks)
    assert is_valid.tolist() == is_expected_valid.tolist()
    assert token_ids.min() >= 0
    assert token_ids.max() < case.logits.shape[1]
    for row in (is_valid & (token_ids != expected)).nonzero()[:, 0].tolist():
        message = f"row {row}: {int(token_ids[row])}, expected {int(expected[row])}"
        assert _is_close_call(case.row(row)), message


def _is_close_call(case: SamplingCase) -> bool:
    """Whether rounding may decide what top-p keeps or where the draw of a single row ends."""
    temperature, top_k, top_p, _, uniform = (float(each) for each in case.parameters)
    if temperature == 0.0:
        return False
    logits = case.logits[0].double().numpy()
    weights = np.exp((logits - logits.max()) / max(temperature, 1e-30))
    order = np.sort(weights)[::-1]
    if 0 < top_k < len(order):
        order[order < order[int(top_k) - 1]] = 0.0
    shares = order.cumsum() / order.sum()
    if top_p < 1.0 and np.abs(shares - top_p).min() < _CLOSE:
        return True
    kept, _ = exact_probabilities(case)
    return bool(np.abs(kept.cumsum() - uniform).min() < _CLOSE)


def exact_probabilities(case: SamplingCase) -> tuple[np.ndarray, int]:
    """What a single row's token is drawn from, [vocab_size]; how many tokens are kept."""
    temperature, top_k, top_p, min_p, _ = (float(each) for each in case.parameters)
    logits = case.logits[0].double().numpy()
    weights = np.exp((logits - logits.max()) / max(temperature, 1e-30))
    order = np.argsort(-logits, kind="stable")
    threshold = -np.inf
    if 0 < top_k < len(logits):
        threshold = logits[order[int(top_k) - 1]]
    if top_p < 1.0:
        reached = np.where(logits >= threshold, weights, 0.0)[order].cumsum()
        last = int((reached < top_p * reached[-1]).sum())
        threshold = max(threshold, logits[order[last]])
    kept = np.where((logits >= threshold) & (weights >= min_p * weights.max()), weights, 0.0)
    return kept / kept.sum(), int((kept > 0).sum())
