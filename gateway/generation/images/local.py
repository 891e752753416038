"""Reads images that a request names by `file://`, from the directory that the operator has opened
(`--allowed-local-media-path`).

A caller chooses the path, so it must lead into the directory after all symbolic links, and to a
regular file. What is outside is refused in the same words whether or not it is there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.engine.errors import ConfigError, InvalidRequestError

_LOCAL_HOSTS = ("", "localhost")


class LocalImages:
    """
    Args:
        directory: None: none is open.
        max_bytes: of an image.

    Raises:
        ConfigError: there is no such directory.
    """

    def __init__(self, directory: str | None, *, max_bytes: int) -> None:
        self._root: Path | None = None
        self._max_bytes = max_bytes
        if directory is not None:
            try:
                self._root = Path(directory).expanduser().resolve(strict=True)
            except (OSError, RuntimeError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                text = f"--allowed-local-media-path: cannot read {directory!r}: {reason}"
                raise ConfigError(text) from error
            if not self._root.is_dir():
                raise ConfigError(f"--allowed-local-media-path: {directory!r} is not a directory")

    def read(self, url: str) -> bytes:
        """The file of a `file://` URL.

        Raises:
            InvalidRequestError: it may not be read, or there is no such image.
        """
        if self._root is None:
            raise InvalidRequestError(
                "this server reads no files: send a data URL, or start it with "
                "--allowed-local-media-path DIRECTORY"
            )
        path = self._inside(url, self._root)
        try:
            # The path has no links left; one put there meanwhile is not followed.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequestError(f"the file cannot be read: {error.strerror}") from error
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidRequestError("it is not a regular file")
            if about.st_size > self._max_bytes:
                raise InvalidRequestError(
                    f"the image has {about.st_size} bytes, but this server accepts "
                    f"{self._max_bytes}"
                )
            with os.fdopen(os.dup(file), "rb") as data:
                return data.read(self._max_bytes + 1)
        finally:
            os.close(file)

    def _inside(self, url: str, root: Path) -> Path:
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            is_inside = parts.netloc in _LOCAL_HOSTS and path.is_relative_to(root)
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
            is_inside = False
        if not is_inside:
            raise InvalidRequestError(
                "the file is not in the directory of --allowed-local-media-path"
            )
        return path
