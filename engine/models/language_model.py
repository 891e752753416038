"""A model as the runner sees it: what it computes, stores for each token, and can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.kernels.token_masks import TokenMasks


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """The keys and values that one layer stores for each token.

    Attributes:
        head_size: numbers of this dtype that a key or a value takes, its scale included: more than
            the model's head size in an int8 cache.
        window: how many positions a token sees; None: all before it.
    """

    num_heads: int
    head_size: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A group of state: keys and values in blocks, of layers that share block tables. Who stores,
    swaps or sends blocks knows only how many bytes they have.

    Attributes:
        layers: in the order of the pool.
    """

    layers: tuple[LayerKV, ...]


# What a model keeps for each sequence, group by group.
StateSpec: TypeAlias = tuple[PagedKV, ...]


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """
    Attributes:
        features: [num_features, hidden_size], for the rows of its tokens.
        grid: rows and columns of its features, where their positions are those of a grid.
    """

    features: Tensor
    grid: tuple[int, int] | None = None


class ImageEncoder(Protocol):
    """The vision towers of a model.

    Attributes:
        token_id: of image tokens.
        has_grid: the features of an image have positions in a grid (M-RoPE).
        has_bidirectional_images: an image's tokens attend to all of it, so one step computes them.
        encoded: the images that are kept, by digest; any thread may read it.
    """

    token_id: int
    has_grid: bool
    has_bidirectional_images: bool
    encoded: dict[str, EncodedImage]

    def encode(self, digest: str, data: bytes) -> tuple[int, int]:
        """Keep an image's features, which takes up to seconds; how many there are, and the bytes
        that they take. In a thread of its own.

        Args:
            data: the image's file.

        Raises:
            InvalidRequestError: it cannot be opened.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forget an image that no sequence has."""
        ...


class DrawnTokens:
    """The next token of each row, in host memory.

    Attributes:
        token_ids, is_valid: int64 and bool, [num_rows] each, as in `sample_tokens`.
    """

    __slots__ = ("_token_ids", "_validity", "is_valid", "token_ids")

    def __init__(self, num_rows: int) -> None:
        self.token_ids = torch.empty(num_rows, dtype=torch.int64)
        self.is_valid = torch.empty(num_rows, dtype=torch.bool)
        # Views for reading: in a small model's step, torch's calls would be noticeable.
        self._token_ids: Any = self.token_ids.numpy().data
        self._validity: Any = self.is_valid.numpy().data

    def read(self) -> tuple[list[int], list[bool]]:
        return self._token_ids.tolist(), self._validity.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The output of one step.

    Attributes:
        hidden: [num_tokens, hidden_size]
        logits: [num_sampled, vocab_size], of the sampled rows.
        drawn: None, or the tokens drawn from the unmodified logits.
        features: the inputs of the decoder's `feature_layers`, [num_tokens, hidden_size] each.
    """

    hidden: Tensor
    logits: Tensor
    drawn: DrawnTokens | None = None
    features: tuple[Tensor, ...] = ()


class ModelFacts(Protocol):
    """What is known of a model as soon as it is loaded."""

    @property
    def state_spec(self) -> StateSpec:
        """One group, so far."""
        ...

    @property
    def needs_prompt_lens(self) -> bool: ...

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory."""
        ...


# Those of a model that torch runs: a guess, since weights are read once and products cost little.
NUM_VERIFY_ROWS = {"cpu": 8, "cuda": 32}


class LanguageModel(ModelFacts, Protocol):
    """Token ids in, hidden states out; logits only for the rows that need them.

    Attributes:
        spares_core: of two threads one may compute the next step alone (`Batch`).
    """

    spares_core: bool

    @property
    def num_threads(self) -> int:
        """CPU threads that compute."""
        ...

    @property
    def num_verify_rows(self) -> int:
        """Tokens that a decoding step computes in about the time of one: the room for drafts."""
        ...

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,
        draws: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        """A forward pass, logits and, where the model draws them, the next tokens; valid until the
        next call.

        Args:
            input_ids: int64 [num_tokens]
            sampled_tokens: int64 [num_sampled], indices of the tokens to sample after; None: all.
            parameters, draws, masks: as in `sample_tokens` and `draw_uniforms`. Without
                parameters nothing is drawn; without draws every temperature is 0.
        """
        ...

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """The forward pass alone: hidden states [num_tokens, hidden_size], valid until the next
        call."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], valid until the next call"""
        ...


class LoadedModel(ModelFacts, Protocol):
    """A model as it is loaded, before whatever runs it takes its weights; `context_len` is the
    maximum number of tokens of a sequence."""

    vocab_size: int
    context_len: int
    quantization: str  # how the weights are stored: see `EngineInfo`

    @property
    def expected_bytes(self) -> int:
        """Size of weights that are still to be read."""
        ...

    @property
    def sends_on(self) -> bool:
        """Whether a later stage has the head, so that it alone draws tokens."""
        ...

    @property
    def images(self) -> ImageEncoder | None:
        """None: it takes none."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def use_fp8_cache(self) -> None:
        """Store keys and values in FP8."""
        ...

    def use_int8_cache(self) -> None:
        """Store keys and values in bytes, with a scale for each token and head; on a CPU."""
        ...

    def use_invariant_kernels(self) -> None:
        """Make a token's results, to the bit, depend only on the tokens before it; on a GPU."""
        ...
