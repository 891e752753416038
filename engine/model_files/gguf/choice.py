"""Which GGUF file of a repository or a folder is meant: `repo:Q4_K_M`, or the only one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from penstock.engine.errors import ModelLoadError

_SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODELS = ("mmproj", "imatrix")  # in the names of what lies beside models
_NUM_SHOWN = 12


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
