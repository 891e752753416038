"""Attention over a paged KV cache, in plain torch: the specification of `paged_attention`.

Token t of sequence s, at position p, attends the keys at positions p' of its own sequence with
`p' <= p`, and with `p' > p - window` if there is a window:

    out[t, h] = Σ_p' softmax_p'(scale · query[t, h] · key[p', h // group]) value[p', h // group]

where group = num_heads / num_kv_heads. Positions are found through the block table (Kwon et
al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023, §4.1;
windows: Jiang et al., "Mistral 7B", 2023, §2; shared key heads: Ainslie et al., "GQA", 2023).

Only slots that were stored are ever read: a freed block may hold anything, NaN too, and a
masked NaN would still spoil its neighbours (0 × NaN). Padding therefore points to a position
the sequence owns.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.paged_layout import PagedLayout

_MAX_PADDED_SLOTS = 1 << 14  # a gather of so many is small, however much of it is padding
_MAX_SCORES = 1 << 25  # 128 MiB in float32


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend; this step's keys and values are in the cache already.

    Args:
        query: [num_tokens, num_heads, head_dim]
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim]
        window: positions a token sees, itself included; None sees all before it.

    Returns:
        [num_tokens, num_heads, head_dim]
    """
    output = torch.empty_like(query)
    starts = layout.query_start_loc.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    seq_lens = layout.seq_lens.tolist()
    decodes = [seq for seq, query_len in enumerate(query_lens) if query_len == 1]
    attend = _Attention(key_cache, value_cache, scale, window)
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
    """Sequences in groups whose padded gather wastes little: less than the tokens it is for.

    Padding all of a batch to its longest sequence would take memory that nobody has budgeted.
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


class _Attention:
    """The two shapes of work on one layer's cache."""

    def __init__(
        self, key_cache: Tensor, value_cache: Tensor, scale: float, window: int | None
    ) -> None:
        self.block_size = key_cache.shape[1]
        self.keys = key_cache.flatten(0, 1)  # [num_slots, num_kv_heads, head_dim]
        self.values = value_cache.flatten(0, 1)
        self.scale = scale
        self.window = window

    def decode(self, query: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
        """One new token per sequence: a padded gather and one SDPA for all of them.

        Shapes: query [num_seqs, num_heads, head_dim], block_tables [num_seqs, max_blocks].
        """
        num_seqs, num_heads, head_dim = query.shape
        num_kv_heads = self.keys.shape[1]
        num_visible = seq_lens if self.window is None else seq_lens.clamp(max=self.window)
        columns = torch.arange(int(num_visible.max()), device=query.device)
        is_visible = columns < num_visible[:, None]  # [num_seqs, max_visible]
        positions = (seq_lens - num_visible)[:, None] + columns
        positions = torch.minimum(positions, seq_lens[:, None] - 1)
        slots = self._slots(block_tables, positions)  # [num_seqs, max_visible]
        # The heads that share a key head stand in the place of SDPA's query positions, so no
        # key is ever repeated.
        output = F.scaled_dot_product_attention(
            query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim),
            _gather(self.keys, slots),  # [num_seqs, num_kv_heads, max_visible, head_dim]
            _gather(self.values, slots),
            attn_mask=is_visible[:, None, None, :],
            scale=self.scale,
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
        keys, values = _gather(self.keys, slots), _gather(self.values, slots)
        is_plain = num_before == 0 and (self.window is None or query_len <= self.window)
        output = torch.empty_like(query)
        # With a mask SDPA may hold all scores at once, so a long context is taken in slices.
        step = query_len if is_plain else max(1, _MAX_SCORES // (query.shape[1] * len(positions)))
        for begin in range(0, query_len, step):
            rows = slice(begin, min(begin + step, query_len))
            mixed = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],  # [1, num_heads, rows, head_dim]
                keys,
                values,
                attn_mask=None if is_plain else self._mask(positions, query_len)[rows],
                is_causal=is_plain,
                scale=self.scale,
                enable_gqa=True,
            )
            output[rows] = mixed[0].transpose(0, 1)
        return output

    def _slots(self, block_tables: Tensor, positions: Tensor) -> Tensor:
        """Slots of positions [num_seqs, n] through block_tables [num_seqs, max_blocks]."""
        blocks = block_tables.long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def _mask(self, key_positions: Tensor, query_len: int) -> Tensor:
        """What each of the last query_len positions sees: bool [query_len, num_keys]."""
        query_positions = key_positions[-query_len:, None]
        mask = key_positions <= query_positions
        if self.window is not None:
            mask &= key_positions > query_positions - self.window
        return mask


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [num_slots, num_kv_heads, head_dim] at slots [n, m]: [n, num_kv_heads, m, head_dim]

    `index_select` rather than indexing: several times faster on a CPU.
    """
    gathered = cache.index_select(0, slots.flatten())
    return gathered.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
