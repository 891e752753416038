"""The journal of running responses: files beside the database, to which rows are only appended.

    journal/17.log    a segment; when it is full, 18.log is begun
    row               length, its complement, CRC (4 bytes each), content
    content           when it was written (8 bytes), deltas of any logs (`codec.encode_appended`)

A row is one write to the page cache, which outlives this process as SQLite's log of writes does,
and costs a fifth of an INSERT when caches are cold. A row that is cut off, by a kill, a full disk
or a loss of power, was never shown. The complement tells a damaged length from a row that is cut
off. A segment is deleted whole, when no running log needs anything of it.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from os import write
from pathlib import Path
from struct import Struct

from penstock.gateway.storage.response_log.codec import (
    UnreadableEntryError,
    decode_appended,
    encode_appended,
)
from penstock.gateway.storage.response_log.record import Entry

FOLDER = "journal"
_SUFFIX = ".log"
_HEAD, _TIME = Struct(">III"), Struct(">d")
_COMPLEMENT = 0xFFFFFFFF


class Journal:
    """The segments in a folder, which is made when there is something to write.

    Args:
        folder: of the database.
        segment_bytes: beyond which a segment is full.

    Attributes:
        number: of the segment that gets the next row.
        segments: the number of deltas in each.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder / FOLDER
        self.number = 1
        self.segments: dict[int, int] = {}
        self._segment_bytes = segment_bytes
        self._fd: int | None = None
        self._size = 0

    def existing(self) -> list[int]:
        """The numbers of the segments in the folder, oldest first."""
        names = [path.stem for path in self.folder.glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def rows(self, number: int) -> Iterator[bytes | None]:
        """The contents of a segment's rows; None: one or more that are damaged."""
        try:
            data = self._path(number).read_bytes()
        except OSError:
            yield None
            return
        begin = 0
        while len(data) - begin >= _HEAD.size:
            size, complement, crc = _HEAD.unpack_from(data, begin)
            if size != complement ^ _COMPLEMENT:
                if data[begin:].strip(b"\0"):  # else a loss of power left a hole at the end
                    yield None
                return
            begin += _HEAD.size
            content = data[begin : begin + size]
            if len(content) < size:
                return
            yield content if zlib.crc32(content) == crc else None
            begin += size

    @property
    def is_full(self) -> bool:
        return self._size >= self._segment_bytes

    def begin_next(self) -> None:
        """The next row is in another segment than those before. Not while `append` runs."""
        if self.number in self.segments:
            self.close()
            self.number += 1

    def append(self, row: bytes) -> None:
        """Write a row. May run on another thread.

        Raises:
            OSError: nothing of it is there that will be read.
        """
        if self._fd is None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._path(self.number), flags, 0o600)
        rest = row
        try:
            while rest:  # a disk that is almost full takes a part, and says why at the next try
                rest = rest[write(self._fd, rest) :]
        except OSError:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._size = self._segment_bytes  # what is cut off must be its end
            raise
        self._size += len(row)

    def take_before(self, number: int) -> dict[int, int]:
        """Those segments, which are no longer among `segments`: they are to be removed."""
        taken = {each: num for each, num in self.segments.items() if each < number}
        for each in taken:
            del self.segments[each]
        return taken

    def remove(self, numbers: Iterable[int]) -> None:
        """Raises: OSError."""
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        fd, self._fd, self._size = self._fd, None, 0
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_SUFFIX}"


def row_of(written_s: float, appended: Sequence[tuple[int, Sequence[Entry]]]) -> bytes:
    """
    Args:
        appended: deltas, with their log's key.
    """
    content = content_of(written_s, encode_appended(appended))
    size = len(content)
    return _HEAD.pack(size, size ^ _COMPLEMENT, zlib.crc32(content)) + content


def content_of(written_s: float, appended: bytes) -> bytes:
    return _TIME.pack(written_s) + appended


def read_content(content: bytes | None) -> tuple[float, list[tuple[int, list[Entry]]]]:
    """What `row_of` got. Raises: UnreadableEntryError: it was damaged."""
    if content is None or len(content) < _TIME.size:
        raise UnreadableEntryError("it has changed since it was written")
    (written_s,) = _TIME.unpack_from(content)
    return written_s, [(key, [*deltas]) for key, deltas in decode_appended(content[_TIME.size :])]
