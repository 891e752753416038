"""Attention over a paged KV cache, in plain torch: the specification of `paged_attention`.

Token t of sequence s, at position p, attends the keys at positions p' of its own sequence with
`p' <= p`, and with `p' > p - window` if there is a window:

    out[t, h] = Σ_p' softmax_p'(scale · query[t, h] · key[p', h // group]) value[p', h // group]

where group = num_heads / num_kv_heads. The block table maps positions to slots (Kwon et
al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023, §4.1;
windows: Jiang et al., "Mistral 7B", 2023, §2; shared key heads: Ainslie et al., "GQA", 2023).

Options: a soft cap replaces each score by soft_cap · tanh(score / soft_cap) (Gemma 2, 2024, §2). A
sink is a head's extra logit in the softmax without a value: it only takes weight from the others
(OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, §2). ALiBi adds slope[h] · (p' - p) to a
score (Press et al., "Train Short, Test Long", 2022). An FP8 cache holds keys divided by the
key_scale of their KV head, and values divided by its value_scale; an int8 cache is `int8_cache`'s.

Only stored slots are ever read: a freed block may hold anything, NaN too, and a masked NaN would
still spoil its neighbours (0 × NaN). Padding therefore points to a position of the sequence
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.paged_layout import PagedLayout

_MAX_PADDED_SLOTS = 1 << 14  # a gather of this size is small, however much of it is padding
_MAX_SCORES = 1 << 25  # 128 MiB in float32


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Attend; this step's keys and values must be in the cache already.

    Args:
        query: [num_tokens, num_heads, head_dim]
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], of the query's
            dtype or in float8_e4m3fn; or in int8 with SCALE_BYTES more, as in `int8_cache`
        window: positions a token sees, itself included; None sees all before it.
        sinks: [num_heads]
        alibi: float32 [num_heads], the slopes; not together with a soft cap.
        key_scale, value_scale: float32 [num_kv_heads], or one for all; only for FP8.

    Returns:
        [num_tokens, num_heads, head_dim]; zeros for a token whose sequence has a seq_len of 0.
    """
    output = torch.zeros_like(query)
    starts = layout.query_start_loc.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    seq_lens = layout.seq_lens.tolist()
    attend = _Attention(
        keys=_Rows(key_cache, key_scale),
        values=_Rows(value_cache, value_scale),
        block_size=key_cache.shape[1],
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
    )
    decodes = [seq for seq, length in enumerate(query_lens) if length == 1 and seq_lens[seq]]
    for group in _similar_lengths(decodes, seq_lens):
        seqs = torch.tensor(group, device=query.device)
        rows = layout.query_start_loc[seqs].long()
        output[rows] = attend.decode(
            query[rows], layout.block_tables[seqs], layout.seq_lens[seqs].long()
        )
    for seq, query_len in enumerate(query_lens):
        if query_len > 1:
            rows_of_seq = slice(starts[seq], starts[seq + 1])
            output[rows_of_seq] = attend.chunk(
                query[rows_of_seq], layout.block_tables[seq], seq_lens[seq]
            )
    return output


def _similar_lengths(seqs: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Sequences in groups whose gathers are at most half padding.

    Padding a whole batch to its longest sequence could exceed the memory budget.
    """
    groups: list[list[int]] = []
    num_tokens = 0  # of the newest group
    for seq in sorted(seqs, key=seq_lens.__getitem__):
        length = seq_lens[seq]
        padded = length * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > max(2 * (num_tokens + length), _MAX_PADDED_SLOTS):
            groups.append([])
            num_tokens = 0
        groups[-1].append(seq)
        num_tokens += length
    return groups


class _Rows:
    """The keys or the values of one layer, by slot."""

    def __init__(self, cache: Tensor, scale: Tensor | None) -> None:
        self.cache = cache.flatten(0, 1)  # [num_slots, num_kv_heads, head_dim], as stored
        self.scale = scale
        self.is_exact = scale is None and cache.dtype != torch.int8

    def gather(self, slots: Tensor) -> Tensor:
        """The rows at slots [n, m], in float32 unless exact: [n, num_kv_heads, m, head_dim]

        Uses `index_select`, several times faster than indexing on a CPU.
        """
        if self.scale is None:
            gathered = self.cache.index_select(0, slots.flatten())
            if not self.is_exact:
                gathered = int8_cache.decode(gathered)
        else:
            stored = self.cache.view(torch.uint8).index_select(0, slots.flatten())
            gathered = stored.view(self.cache.dtype).float() * self.scale.view(-1, 1)
        return gathered.view(*slots.shape, *gathered.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The two shapes of work on one layer's cache."""

    keys: _Rows
    values: _Rows
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    alibi: Tensor | None

    def decode(self, query: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
        """One new token per sequence: a padded gather and one product for all of them.

        Shapes: query [num_seqs, num_heads, head_dim], block_tables [num_seqs, max_blocks].
        """
        num_seqs, num_heads, head_dim = query.shape
        num_kv_heads = self.keys.cache.shape[1]
        num_visible = seq_lens if self.window is None else seq_lens.clamp(max=self.window)
        columns = torch.arange(int(num_visible.max()), device=query.device)
        is_visible = columns < num_visible[:, None]  # [num_seqs, max_visible]
        positions = (seq_lens - num_visible)[:, None] + columns
        positions = torch.minimum(positions, seq_lens[:, None] - 1)
        slots = self._slots(block_tables, positions)  # [num_seqs, max_visible]
        # The heads that share a key head take the axis of query positions, so no key is repeated.
        by_kv_head = (num_kv_heads, num_heads // num_kv_heads)
        bias = None
        if self.alibi is not None:
            distances = positions - (seq_lens - 1)[:, None]  # [num_seqs, max_visible]
            bias = self.alibi.view(*by_kv_head, 1) * distances[:, None, None, :]
        output = self._attend(
            query.view(num_seqs, *by_kv_head, head_dim),
            self.keys.gather(slots),  # [num_seqs, num_kv_heads, max_visible, head_dim]
            self.values.gather(slots),
            is_visible[:, None, None, :],
            None if self.sinks is None else self.sinks.view(*by_kv_head, 1),
            bias,
        )
        return output.reshape(num_seqs, num_heads, head_dim)

    def chunk(self, query: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
        """Several new tokens of one sequence, the last ones of its seq_len.

        Shapes: query [query_len, num_heads, head_dim], block_table [max_blocks].
        """
        query_len = query.shape[0]
        num_before = seq_len - query_len
        first = 0 if self.window is None else max(0, num_before - self.window + 1)
        positions = torch.arange(first, seq_len, device=query.device)
        slots = self._slots(block_table[None], positions[None])  # [1, num_keys]
        # each [1, num_kv_heads, num_keys, head_dim]
        keys, values = self.keys.gather(slots), self.values.gather(slots)
        sinks = None if self.sinks is None else self.sinks.view(-1, 1, 1)
        is_causal = num_before == 0 and (self.window is None or query_len <= self.window)
        if is_causal and self._is_plain:
            mixed = self._attend(query.transpose(0, 1)[None], keys, values, None, None, None)
            return mixed[0].transpose(0, 1)
        output = torch.empty_like(query)
        # With a mask all scores may be in memory at once, so a long context is sliced.
        step = max(1, _MAX_SCORES // (query.shape[1] * len(positions)))
        for begin in range(0, query_len, step):
            rows = slice(begin, min(begin + step, query_len))
            by_head = query[rows].transpose(0, 1)[None]  # [1, num_heads, rows, head_dim]
            mask = self._mask(positions, query_len)[rows]
            bias = None
            if self.alibi is not None:
                distances = positions - positions[-query_len:, None][rows]  # [rows, num_keys]
                bias = self.alibi.view(-1, 1, 1) * distances
            output[rows] = self._attend(by_head, keys, values, mask, sinks, bias)[0].transpose(0, 1)
        return output

    @property
    def _is_plain(self) -> bool:
        """Whether torch's own attention computes the same."""
        has_options = any(each is not None for each in (self.soft_cap, self.sinks, self.alibi))
        return self.keys.is_exact and not has_options

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """query [n, heads, rows, head_dim] over keys and values [n, num_kv_heads, m, head_dim].

        Mask and bias broadcast to [n, heads, rows, m]; no mask means causal and plain. Sinks
        broadcast to [n, heads, rows, 1].
        """
        group = query.shape[1] // keys.shape[1]
        if self._is_plain:
            return F.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=group > 1,
            )
        assert mask is not None
        keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
        scores = self.scale * (query.float() @ keys.mT)  # [n, heads, rows, m]
        if bias is not None:
            scores = scores + bias
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : values.shape[2]]
        return (weights @ values).to(query.dtype)

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of positions [num_seqs, n] through block_tables [num_seqs, max_blocks]."""
        blocks = block_tables.long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def _mask(self, key_positions: Tensor, query_len: int) -> Tensor:
        """The keys that each of the last query_len positions sees: bool [query_len, num_keys]."""
        query_positions = key_positions[-query_len:, None]
        mask = key_positions <= query_positions
        if self.window is not None:
            mask &= key_positions > query_positions - self.window
        return mask
