"""A model directory for a GGUF file, made once:
`python -m penstock.engine.model_files.gguf.directory FILE` prints it.

It has the `config.json` and the tokenizer that the file's keys stand for, links to the file and its
parts, and an index of its tensors. It is named by a digest of the file, so another file gets
another one. A process of its own makes it, whose memory, and what it imports, goes with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.gguf.architectures import read_architecture
from penstock.engine.model_files.gguf.choice import gguf_folder, stands_for
from penstock.engine.model_files.gguf.reader import GgufFile, read_gguf
from penstock.engine.model_files.gguf.tokenizers import write_tokenizer
from penstock.engine.model_files.json_file import (
    GGUF_FILE,
    GGUF_INDEX,
    gguf_part,
    is_present,
)
from penstock.kernels.cache_folder import NoCacheError, remove_orphans, unfinished

_SAMPLING = "general.sampling."  # begins keys of what a model's makers recommend
# Those of llama.cpp's samplers that there are here, by the fields of a `generation_config.json`.
_SAMPLERS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}  # fmt: skip


def gguf_directory(file: Path) -> Path:
    """The model directory of a GGUF file, made unless it is there, with links to this file.

    Args:
        file: of a split model, the first part.

    Raises:
        ModelLoadError: with what is wrong with the file.
    """
    try:
        folder = gguf_folder(file)
        if not is_present(folder / GGUF_FILE):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_orphans(folder.parent, link=GGUF_FILE)
            _make(read_gguf(file), folder)
        elif not stands_for(folder, file):  # the same file, moved or copied
            link_parts(read_gguf(file), folder)
    except NoCacheError as error:
        raise ModelLoadError(f"{file}: no place for its configuration: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return folder


def _make(content: GgufFile, folder: Path) -> None:
    with unfinished(folder.parent) as temporary:
        made = temporary / "made"
        made.mkdir()
        _write(content, made)
        link_parts(content, made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster, or left an incomplete one
            if not is_present(folder / GGUF_FILE):
                raise


def link_parts(content: GgufFile, folder: Path) -> None:
    """The first part last: it says that all of them are there."""
    for number, part in reversed(list(enumerate(content.parts))):
        fresh = folder / f".{os.getpid()}"
        fresh.symlink_to(part.absolute())
        fresh.replace(folder / gguf_part(number))


def write_model(content: GgufFile, folder: Path) -> None:
    """The `config.json`, and the index of tensors.

    Raises:
        ModelLoadError: names the key that is missing, or not supported.
    """
    config, reading, found = read_architecture(content)
    tensors = {name: asdict(each) for name, each in found.items()}
    samplers = {name: _SAMPLING + key for name, key in _SAMPLERS.items()}
    keys = {**reading["keys"], **samplers}
    index = {**reading, "keys": keys, "num_parts": len(content.parts), "tensors": tensors}
    _write_json(folder / "config.json", config)
    _write_json(folder / GGUF_INDEX, index)
    if pooling := reading["pooling"]:
        _write_pooling(folder, pooling)


def _write_pooling(folder: Path, kind: str) -> None:
    """Write what sentence-transformers does for this kind; llama.cpp normalises vectors."""
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{kind}": True})
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{name}"}
        for path, name in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def _write(content: GgufFile, folder: Path) -> None:
    write_model(content, folder)
    try:
        end_token_ids = write_tokenizer(content.keys, folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{content.parts[0]}: {error}") from error
    ends = {"eos_token_id": end_token_ids}
    _write_json(folder / "generation_config.json", ends | _sampling(content.keys))


def _sampling(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Recommended parameters by their names in a `generation_config.json`. Whoever reads that says
    what is wrong with a value; a list is none, as in llama.cpp."""
    found = {name: keys.get(_SAMPLING + key) for name, key in _SAMPLERS.items()}
    return {
        # Of single precision; llama.cpp reads six digits, too.
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in found.items()
        if isinstance(value, int | float | str)
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    try:
        print(gguf_directory(Path(sys.argv[1])))
    except ModelLoadError as error:
        sys.exit(str(error))
