"""The keys that open this server: those of `--api-key`, and those of the key file as it is now.

The file is looked at when a key is offered, at most once a second, and read again when it has
changed; one that makes no sense leaves everything as it was, and says so in the log once.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.gateway.callers import ANYBODY, Caller
from penstock.gateway.key_file import digest_of, name_of, read_key_file

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_Stamp = tuple[int, int, int] | None


class KeyRing:
    """
    Args:
        keys: of the tenant `default`, without limits.
        file: of further keys.
        clock: seconds that only grow.

    Raises:
        ConfigError: the file makes no sense.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        digests = [digest_of(key.encode()) for key in keys]
        self._given = {digest: Caller(key_id=name_of(digest)) for digest in digests}
        self._file = file
        self._clock = clock
        self._stamp = _stamp(file)
        self._due_s = clock() + _POLL_S
        self._callers = self._given if file is None else self._given | read_key_file(file)
        self._by_id = self._ids()

    @property
    def is_open(self) -> bool:
        """Whether nobody needs a key."""
        return self._file is None and not self._given

    def find(self, offered: Sequence[bytes]) -> Caller | None:
        """Whose key is among those offered. What is compared is of one length, and all of it is,
        whatever is found."""
        self._poll()
        found = None
        for key in offered:
            digest = digest_of(key)
            for known, caller in self._callers.items():
                if hmac.compare_digest(digest, known):
                    found = caller
        return found

    def by_id(self, key_id: str) -> Caller | None:
        """The caller of a key that is still valid."""
        self._poll()
        return ANYBODY if self.is_open else self._by_id.get(key_id)

    def _ids(self) -> dict[str, Caller]:
        return {caller.key_id: caller for caller in self._callers.values()}

    def _poll(self) -> None:
        if self._file is None or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + _POLL_S
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = self._given | read_key_file(self._file)
        except ConfigError as error:
            _LOG.error("the keys stay as they were: %s", error)
        else:
            self._by_id = self._ids()
            _LOG.info("read the key file again: %d keys", len(self._callers))


def _stamp(file: Path | None) -> _Stamp:
    """Changes when the file does, also when it was replaced by another of the same age."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
