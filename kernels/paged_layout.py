"""The index tensors of a step that the paged operations share.

A step is a flat row of tokens, sequence after sequence. Each sequence has a list of cache blocks;
the KV of its position p is in slot `p % block_size` of block `p // block_size` of that list.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """One step's layout. The host integers save a device synchronisation.

    A batch may be padded at its end to the shapes of a captured graph, with sequences of no
    tokens, or of one token and a `seq_len` of 0. The host integers may then exceed the tensors'
    values.

    Attributes:
        query_start_loc: int32 [num_seqs + 1], the first token of each sequence; the last
            entry is num_tokens.
        seq_lens: int32 [num_seqs], tokens with KV once this step's keys are stored.
        block_tables: int32 [num_seqs, max_blocks]; entries past a sequence's end are ignored.
        slot_mapping: int64 [num_tokens], block × block_size + offset of each token; −1 for padding,
            for which nothing is stored.
        max_query_len: the most tokens that a sequence has in this step.
        max_seq_len: the largest of `seq_lens`.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
