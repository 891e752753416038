"""A KV pool that outlives its engine: the next engine finds in it the blocks that are whole.

The pool lies in a file without a name, in memory, whose descriptor the engine's template has too
(`engine.process.template`). Before the pool, the file says which blocks may be used again:

    header     what the bytes mean, and how many blocks there are
    words      one of 64 bits for each block: 0, or the number under which it was recorded
    records    for each block its parent's key, its own key and its tokens
    pool       from a page's start

A word is cleared when its block loses its content, before the device is given the step that writes
there. It is set after the record, once the step that computed the block has ended and its result
was found valid. What a killed process had stored stays, and nothing comes after it: all threads of
a step have made their stores when it ends, so a word is true at every moment. A record is checked
all the same: its key is the hash of the rest.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from operator import itemgetter

from penstock.engine.blocks.block_keys import block_key
from penstock.engine.blocks.prefix_cache import CachedBlock

_MAGIC = b"KVpool 1"
_HEADER = struct.Struct("8s 32s 32s Q Q Q")  # magic, layout, root, number, size, bytes of blocks
_MAGIC_END, _ROOT = len(_MAGIC), slice(40, 72)
_WORDS_START = 4096
_WORD_BYTES = 8
_KEY_BYTES, _TOKEN_BYTES = 32, 4

Taken = list[tuple[int, int]]  # blocks, and the numbers under which they are to be recorded


class LastingPool:
    """The file, of which one engine at a time maps what it needs.

    Args:
        fd: of a file without a name.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._num_blocks = self._block_size = 0
        self._memory: memoryview | None = None

    @property
    def num_used_bytes(self) -> int:
        """Bytes of memory that the file takes; pages that were never written take none."""
        return os.fstat(self._fd).st_blocks * 512

    def num_blocks_left(self, layout: str) -> int | None:
        """Blocks of the pool that an engine left with the same layout. None: there is none, and
        what there was, of another layout, is given up.

        Args:
            layout: of a block's bytes.
        """
        header = os.pread(self._fd, _HEADER.size, 0)
        if len(header) == _HEADER.size:
            magic, digest, _, num_blocks, block_size, block_bytes = _HEADER.unpack(header)
            num_bytes = _pool_start(num_blocks, block_size) + num_blocks * block_bytes
            is_whole = os.fstat(self._fd).st_size == num_bytes
            if (magic, digest, is_whole) == (_MAGIC, _digest(layout), True):
                return int(num_blocks)
        os.ftruncate(self._fd, 0)
        return None

    def map(
        self, layout: str, *, num_blocks: int, block_size: int, block_bytes: int
    ) -> memoryview | None:
        """The pool's memory, with what an engine left there or else zeros; None where the file
        cannot be as large, as under a limit of the process.

        Args:
            layout: of a block's bytes.
            block_size: in tokens.
            block_bytes: of one block.
        """
        start = _pool_start(num_blocks, block_size)
        num_bytes = start + num_blocks * block_bytes
        is_new = self.num_blocks_left(layout) != num_blocks
        try:
            if is_new:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, num_bytes)
            memory = memoryview(mmap.mmap(self._fd, num_bytes))
        except (OSError, ValueError):
            os.ftruncate(self._fd, 0)
            return None
        if is_new:
            header = _HEADER.pack(b"", _digest(layout), b"", num_blocks, block_size, block_bytes)
            memory[_MAGIC_END : _HEADER.size] = header[_MAGIC_END:]
            memory[:_MAGIC_END] = _MAGIC
        self._memory, self._num_blocks, self._block_size = memory, num_blocks, block_size
        return memory[start:]

    def records(self, root: bytes) -> BlockRecords | None:
        """The records of the mapped pool's blocks, empty if what is left had another root; None if
        it is not mapped.

        Args:
            root: hash of all that the bytes of blocks depend on besides their chain of keys.
        """
        memory = self._memory
        if memory is None:
            return None
        end = _WORDS_START + self._num_blocks * _WORD_BYTES
        if memory[_ROOT] != root:
            memory[_WORDS_START:end] = bytes(end - _WORDS_START)
            memory[_ROOT] = root
        size = _record_bytes(self._block_size)
        records = memory[end : end + self._num_blocks * size]
        return BlockRecords(memory[_WORDS_START:end].cast("Q"), records, size)


class BlockRecords:
    """What is known of the blocks of a pool that outlives its engine.

    Args:
        words: one of each block, 64 bits.
        records: of all blocks, of `record_bytes` each.
    """

    def __init__(self, words: memoryview, records: memoryview, record_bytes: int) -> None:
        self._words, self._records, self._record_bytes = words, records, record_bytes
        self._number = max(words, default=0)
        # Blocks to be recorded once a step has ended, with their numbers.
        self._awaited: dict[int, tuple[int, CachedBlock]] = {}
        self._published: Taken = []

    def left(self) -> list[CachedBlock]:
        """The blocks that an engine left, those to be evicted first at the start: of chains, by
        when something was last added to them, and each from its end."""
        found: dict[bytes, tuple[int, CachedBlock]] = {}
        for device_id, number in enumerate(self._words):
            if not number:
                continue
            block = self._read(device_id)
            if block is None or block.key in found:
                self._words[device_id] = 0
            else:
                assert block.key is not None
                found[block.key] = number, block
        order: dict[bytes, CachedBlock] = {}  # those to be evicted last first
        for _, block in sorted(found.values(), key=itemgetter(0), reverse=True):
            chain: list[CachedBlock] = []
            above: CachedBlock | None = block
            while above is not None and above.key not in order:
                chain.append(above)
                above = found.get(above.parent, (0, None))[1]
            order.update((each.key or b"", each) for each in reversed(chain))
        return list(reversed(order.values()))

    def publish(self, device_id: int, block: CachedBlock) -> None:
        """Record the content of a full block once the next step, which may compute it, is done."""
        self._number += 1
        self._awaited[device_id] = self._number, block
        self._published.append((device_id, self._number))

    def forget(self, device_id: int) -> None:
        """A block has lost its content, and may be written from the next step on."""
        self._words[device_id] = 0
        self._awaited.pop(device_id, None)

    def take(self) -> Taken:
        """What was published since the last call: to be recorded (`record`) after the step that is
        submitted now."""
        taken, self._published = self._published, []
        return taken

    def record(self, taken: Iterable[tuple[int, int]]) -> None:
        """Record blocks that are whole in memory, except those that lost their content."""
        for device_id, number in taken:
            awaited = self._awaited.get(device_id)
            if awaited is None or awaited[0] != number:
                continue
            block = self._awaited.pop(device_id)[1]
            assert block.key is not None
            start = device_id * self._record_bytes
            record = block.parent + block.key + block.tokens
            self._records[start : start + self._record_bytes] = record
            self._words[device_id] = number

    def _read(self, device_id: int) -> CachedBlock | None:
        """A record that is set; None if it does not hold together."""
        start = device_id * self._record_bytes
        record = bytes(self._records[start : start + self._record_bytes])
        parent, key = record[:_KEY_BYTES], record[_KEY_BYTES : 2 * _KEY_BYTES]
        tokens = record[2 * _KEY_BYTES :]
        if block_key(parent, tokens) != key:
            return None
        return CachedBlock(parent=parent, tokens=tokens, key=key, device_id=device_id)


def _digest(layout: str) -> bytes:
    return hashlib.sha256(layout.encode()).digest()


def _record_bytes(block_size: int) -> int:
    return 2 * _KEY_BYTES + _TOKEN_BYTES * block_size


def _pool_start(num_blocks: int, block_size: int) -> int:
    end = _WORDS_START + num_blocks * (_WORD_BYTES + _record_bytes(block_size))
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
