"""Which GGUF file of a repository or a folder is meant: `repo:Q4_K_M`, or the only one; and which
directory stands for it (`directory` makes it)."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.json_file import (
    GGUF_FILE,
    GGUF_MAGIC,
    check_file,
    is_present,
    weight_samples,
)
from penstock.kernels.cache_folder import cache_dir

_SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODELS = ("mmproj", "imatrix")  # in the names of what lies beside models
_NUM_SHOWN = 12
_VERSION = 8  # of what is in a directory; a change makes other ones


def choose_gguf(names: Iterable[str], label: str, where: str) -> tuple[str, ...]:
    """The file of a model, or all its parts, the first of them first; none: there is no model.

    Args:
        names: of files, with the folders that they are in.
        label: how the model is quantized, as its file's name says; empty: there is only one model.
        where: in messages: the repository or folder.

    Raises:
        ModelLoadError: no model has the label, or several models do.
    """
    models = _models(names)
    found = _labelled(models, label) if label else list(models)
    if len(found) == 1:
        return tuple(models[found[0]])
    if not found and not label:
        return ()
    shown = ", ".join((found or list(models))[:_NUM_SHOWN]) or "none"
    if not found:
        raise ModelLoadError(f"{where} has no GGUF file of {label!r}; it has {shown}")
    raise ModelLoadError(f"{where} has {len(found)} GGUF models, name one of them: {shown}")


def labels(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each model's shortest label, by which `choose_gguf` finds it among these files, and what it
    finds; empty: no label means it alone."""
    models = _models(names)
    for model, files in models.items():
        starts = [0, *(each.end() for each in re.finditer(r"[-./]", model))]
        ends = (model[start:] for start in reversed(starts))
        label = next((each for each in ends if _labelled(models, each) == [model]), "")
        yield label, tuple(files)


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each model, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(_SUFFIX) and not any(word in name.lower() for word in _NO_MODELS):
            models.setdefault(_PART.sub("", name.removesuffix(_SUFFIX)), []).append(name)
    return models


def _labelled(models: Iterable[str], label: str) -> list[str]:
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(label)}(?:[-./]|$)", re.IGNORECASE)
    return [model for model in models if pattern.search(model)]


def gguf_folder(file: Path) -> Path:
    """The directory that stands for a GGUF file, which may have to be made.

    Args:
        file: of a split model, the first part.

    Raises:
        ModelLoadError: it is no file, or no GGUF file.
        NoCacheError: there is no place for it.
        OSError: the file cannot be read.
    """
    check_file(file)
    return cache_dir() / "gguf" / f"{file.stem[:100]}-{_digest(file)}-{_VERSION}"


def stands_for(folder: Path, file: Path) -> bool:
    """Whether a directory is there, and has links to this file, not to a copy of it."""
    link = folder / GGUF_FILE
    return is_present(link) and link.resolve() == file.resolve()


def _digest(file: Path) -> str:
    """A digest of the size, the beginning and samples to the end; of a split file, of all parts."""
    with file.open("rb") as data:
        if data.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelLoadError(f"{file} is not a GGUF file")
    name = re.fullmatch(r"(.*)-\d{5}-of-(\d{5}\.gguf)", file.name)
    others = file.parent.glob(f"{glob.escape(name[1])}-*-of-{name[2]}") if name else ()
    digest = hashlib.sha256()
    for part in (file, *sorted(set(others) - {file})):
        digest.update(str(part.stat().st_size).encode())
        for sample in weight_samples(part):
            digest.update(sample)
    return digest.hexdigest()[:16]
