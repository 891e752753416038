"""Our layers in the places of those of a `transformers` model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock.engine.layers.attention import Attention, ForwardContext, WholeImage
from penstock.engine.layers.linear import Embedding, Linear
from penstock.engine.parallel.ranks import ALONE
from penstock.kernels import int8_cache
from penstock.kernels.cpu.library import pair_of, unpack_keys, unpack_values
from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.rotary_store_kv import rotary_store_kv

CONTEXT = "penstock_context"  # by which keyword a step's `ForwardContext` reaches attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendingLayer:
    """What one layer asks of the attention interface, in the order of the layers.

    Attributes:
        module: the name of the module that attends.
        window: how many positions a token sees, itself included; None: all before it.
        soft_cap: bounds scores; None leaves them unbounded.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool


class PagedAttention(Attention):
    """The attention of one module of the library: stores keys and values, then attends.

    Args:
        layer: index into the KV pool.

    Attributes:
        cache_dtype: of the cache; None: the model's.
        has_bidirectional_images: an image's tokens attend to all of it.
        kernel: does the same on a CPU; None: torch does.
    """

    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    cache_dtype: torch.dtype | None = None
    has_bidirectional_images = False

    def __init__(self, found: AttendingLayer, layer: int) -> None:
        super().__init__(
            layer=layer, head_dim=found.head_dim, window=found.window, soft_cap=found.soft_cap
        )
        self.scale, self.has_sinks = found.scale, found.has_sinks
        self.num_heads, self.num_kv_heads = found.num_heads, found.num_kv_heads
        self.head_dim = found.head_dim

    @property
    def is_int8(self) -> bool:
        """The cache holds bytes with scales."""
        return self.cache_dtype == torch.int8

    @property
    def stored_size(self) -> int:
        """Numbers of the cache's dtype that a key takes."""
        return self.head_dim + (int8_cache.SCALE_BYTES if self.is_int8 else 0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: ForwardContext,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads,
        head_dim] → as the query"""
        if self.has_bidirectional_images and context.images is not None:
            attended = self._attend(query, key, value, context, sinks=sinks)
            for image in context.images.whole:
                attended[image.rows] = self._attend_within(image, query[image.rows], context)
            return attended
        return self._attend(query, key, value, context, sinks=sinks)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: ForwardContext,
        *,
        sinks: Tensor | None,
    ) -> Tensor:
        if self.kernel is not None:
            return self.kernel(query, key, value)
        num_tokens, _, head_dim = query.shape
        cosines = query.new_ones(num_tokens, 1, head_dim // 2)  # the library has rotated already
        query = rotary_store_kv(
            torch.cat((query, key, value), dim=1),
            (cosines, torch.zeros_like(cosines)),
            *context.cache(self.layer),
            context.layout.slot_mapping,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )
        return paged_attention(
            query, *context.cache(self.layer), context.layout, scale=self.scale,
            window=self.window, soft_cap=self.soft_cap, sinks=sinks, alibi=self.alibi,
            key_scale=self.key_scale, value_scale=self.value_scale,
        )  # fmt: skip

    def _attend_within(self, image: WholeImage, query: Tensor, context: ForwardContext) -> Tensor:
        """Attention of an image's tokens to what its first token sees and to the rest of the image,
        of which keys and values are stored by now; a window bounds how far back.

        query [num_tokens, num_heads, head_dim] → the same shape
        """
        stop = image.position + len(query)
        window = stop if self.window is None else self.window
        begin = max(0, image.position + 1 - window)
        queries = torch.arange(image.position, stop, device=query.device)
        seen = torch.arange(begin, stop, device=query.device)
        key_cache, value_cache = context.cache(self.layer)
        block_size = key_cache.shape[1]
        first = begin // block_size
        blocks = context.layout.block_tables[image.sequence, first : -(-stop // block_size)].long()
        keys, values = key_cache[blocks], value_cache[blocks]
        if self.kernel is not None:
            pair = pair_of(keys.dtype)
            keys, values = unpack_keys(keys, pair), unpack_values(values, pair)
        places = seen - first * block_size
        attended: Tensor = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            keys.flatten(0, 1)[places].transpose(0, 1),
            values.flatten(0, 1)[places].transpose(0, 1),
            attn_mask=seen > queries[:, None] - window,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended.transpose(0, 1)


def trial_step(
    attentions: Sequence[PagedAttention],
    dtype: torch.dtype,
    block_size: int,
    lens: Sequence[int],
    device: torch.device,
) -> ForwardContext:
    """A step of sequences of these lengths, from their beginnings, over a cache of its own.

    Args:
        lens: block_size at most.
    """
    first = attentions[0]
    shape = (len(attentions), 2, len(lens), block_size, first.num_kv_heads, first.stored_size)
    positions = torch.cat([torch.arange(each) for each in lens])
    slots = torch.cat([torch.arange(each) + block_size * i for i, each in enumerate(lens)])
    starts = torch.tensor([0, *lens]).cumsum(0)
    layout = PagedLayout(
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=torch.arange(len(lens), dtype=torch.int32, device=device)[:, None],
        slot_mapping=slots.to(device),
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )
    pool = torch.zeros(shape, device=device).to(first.cache_dtype or dtype)
    return ForwardContext(kv_pool=pool, layout=layout, positions=positions.to(device))


@dataclass(frozen=True, slots=True)
class TensorShare:
    """A rank's share of a parameter that is not ours: in `tensor_shares` of its module, by name.

    Attributes:
        dim, numbers: which rows of which dimension.
        whole: the shape of the whole.
    """

    dim: int
    numbers: Tensor
    whole: tuple[int, ...]

    def of(self, values: Tensor) -> Tensor:
        return values.index_select(self.dim, self.numbers.to(values.device))


class ModuleLinear(Linear):
    """`Linear` in the place of one of the library's, whose inputs have any number of dimensions.

    Args:
        is_transposed: a checkpoint has its matrix as [in_features, out_features].

    Attributes:
        compute: does the same on a CPU, with a matrix of its own; None: torch does.
        own_inputs: of those that all ranks have; None: they are the rank's own.
        gathered_size: of the results of all ranks, which are put side by side; 0: they are summed.
    """

    compute: Callable[[Tensor], Tensor] | None = None
    own_inputs: range | None = None
    gathered_size = 0

    def __init__(
        self, in_features: int, out_features: int, *, has_bias: bool, is_transposed: bool
    ) -> None:
        super().__init__(in_features, (out_features,), has_bias=has_bias)
        self.is_transposed = is_transposed

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks is not ALONE:
            return self._joined(x)
        if self.compute is not None:
            return self.compute(x)
        y = self.multiply(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])

    def _joined(self, x: Tensor) -> Tensor:
        """What all ranks compute together."""
        rows = x.reshape(-1, x.shape[-1])
        if self.own_inputs is not None:
            rows = rows[:, self.own_inputs.start : self.own_inputs.stop]
        y = self.multiply(rows) if self.compute is None else self.compute(rows)
        if self.gathered_size:
            size = -(-self.gathered_size // self.ranks.size)  # the last rank may have fewer
            y = self.ranks.gather(functional.pad(y, (0, size - y.shape[1])).contiguous())
            y = y[:, : self.gathered_size]
        else:
            y = self.ranks.sum(y)
        return y.reshape(*x.shape[:-1], y.shape[1])


class ModuleEmbedding(Embedding):
    """An embedding that kernels may compute."""

    compute: Callable[[Tensor], Tensor] | None = None

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.compute is not None:
            y = self.compute(token_ids)
        else:
            y = self.look_up(token_ids.flatten())
        if self.num_ids:
            y = self.ranks.sum(y.view(-1, y.shape[-1]))
        return y.view(*token_ids.shape, y.shape[-1])


def replace_layers(
    model: PreTrainedModel, dtype: torch.dtype, *, besides: Sequence[nn.Module] = ()
) -> None:
    """Put our layers, without weights, in the places of the plain linear layers and of the
    embedding of tokens, unless it is of a kind of its own.

    Args:
        besides: modules that stay as they are.
    """
    table = model.get_input_embeddings()
    kept = {parent for each in besides for parent in each.modules()}
    for parent in [each for each in model.modules() if each not in kept]:
        for name, module in list(parent.named_children()):
            ours: nn.Module
            with torch.device("meta"):
                weight = getattr(module, "weight", None)
                if not isinstance(weight, Tensor) or weight.dtype != dtype:
                    continue  # kept in float32, for one
                if type(module) is nn.Linear:
                    ours = ModuleLinear(
                        module.in_features,
                        module.out_features,
                        has_bias=module.bias is not None,
                        is_transposed=False,
                    )
                elif type(module) is Conv1D:
                    ours = ModuleLinear(module.nx, module.nf, has_bias=True, is_transposed=True)
                elif module is table and type(module) is nn.Embedding:
                    ours = ModuleEmbedding(module.num_embeddings, module.embedding_dim)
                else:
                    continue
            setattr(parent, name, ours.to(dtype))
