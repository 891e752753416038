"""The files of a model directory: regular ones of a plausible size, and the JSON in small ones."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError

MAX_TEXT_BYTES = 512 << 20  # the largest tokenizers have a tenth of it
GGUF_MAGIC = b"GGUF"
FIM_FIELD = "fim_token_ids"  # of tokenizer_config.json, where it is made of a GGUF file
# In the directory that is made for a GGUF file: a link to it, or to its first part, and what is in
# it.
GGUF_FILE, GGUF_INDEX = "model.gguf", "model.gguf.json"
ADDITIONAL_TEMPLATES = "additional_chat_templates/*.jinja"  # each named by its file
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_BEGINNING_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # that of `safetensors`
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def gguf_part(number: int) -> str:
    """The name of the link to a part of a split GGUF file; 0: of the first."""
    return f"model.{number}.gguf" if number else GGUF_FILE


def is_present(path: Path) -> bool:
    """Whether there is anything by this name, if only a link that leads nowhere."""
    return os.path.lexists(path)


def check_file(path: Path, *, max_bytes: int | None = None) -> None:
    """Check a file before it is opened: a FIFO would block, and a device has no end.

    Raises:
        ModelLoadError: missing, not a regular file, or of more than `max_bytes`.
    """
    try:
        about = path.stat()
    except FileNotFoundError as error:
        how = "is a link to a missing file" if path.is_symlink() else "is missing"
        raise ModelLoadError(f"{path} {how}") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise ModelLoadError(f"{path} is {kind}, not a regular file")
    if max_bytes is not None and about.st_size > max_bytes:
        raise ModelLoadError(f"{path} has {about.st_size:,} bytes, more than {max_bytes:,}")


def weight_samples(path: Path) -> Iterator[bytes]:
    """Parts of a file of weights that tell it from others: its header, or the beginning of a GGUF
    file, and samples evenly spaced from start to end."""
    size = path.stat().st_size
    with path.open("rb") as data:
        first = data.read(8)
        is_gguf = first.startswith(GGUF_MAGIC)
        header_bytes = _BEGINNING_BYTES if is_gguf else int.from_bytes(first, "little")
        yield data.read(min(header_bytes, size, _MAX_HEADER_BYTES))
        for number in range(_NUM_SAMPLES):
            data.seek(number * max(0, size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            yield data.read(_SAMPLE_BYTES)


def read_text(path: Path) -> str:
    """A text file of a model, in UTF-8.

    Raises:
        ModelLoadError: missing, not a regular file, unreadable or too large.
    """
    check_file(path, max_bytes=MAX_TEXT_BYTES)
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model file.

    Raises:
        ModelLoadError: missing, unreadable, not JSON, or not an object.
    """
    value = _parsed(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"cannot read {path}: expected a JSON object")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """A list of JSON objects from a model file. Raises as `read_json`."""
    values = _parsed(path)
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ModelLoadError(f"cannot read {path}: expected a list of JSON objects")
    return values


def _parsed(path: Path) -> Any:
    check_file(path, max_bytes=MAX_TEXT_BYTES)
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"cannot read {path}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: byte {error.start} cannot be decoded"
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than is free"
    return "a number in it has too many digits"  # the only other ValueError of `json`
