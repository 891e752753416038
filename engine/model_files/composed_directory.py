"""A model directory with another tokenizer, another chat template or other fields of `config.json`:
`--tokenizer`, `--chat-template` and `--hf-overrides`.
`python -m penstock.engine.model_files.composed_directory JSON` prints it.

It has links to the files of the directories that it is made of, so that whatever reads a model's
directory reads it. It is named by a digest of these and of the fields. A process of its own makes
it, as with `gguf.directory`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.json_file import is_present, read_json
from penstock.engine.model_files.users_files import ORIGIN, TEMPLATE
from penstock.kernels.cache_folder import NoCacheError, cache_dir, remove_orphans, unfinished

_VERSION = 1  # of what is written; a change makes other directories
_CONFIG = "config.json"
_ROPE = ("rope_scaling", "rope_theta")
_TEMPLATES = (TEMPLATE, "chat_template.json", "additional_chat_templates")
_OF_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", *_TEMPLATES,
)  # fmt: skip


def composed_directory(
    model: Path,
    tokenizer: Path | None,
    fields: Mapping[str, Any],
    template: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The model's directory with the tokenizer of another one, made unless it is there.

    Args:
        fields: replace those of `config.json`; those of its sections (`text_config`, …) one by one.
        template: the `file` or the `text` of the one chat template; empty: those that are there.

    Raises:
        ModelLoadError: a directory cannot be read, or there is no place for a new one.
    """
    try:
        files = {each.name: each.absolute() for each in model.iterdir()}
        if tokenizer is not None:
            files = {name: file for name, file in files.items() if name not in _OF_TOKENIZER}
            there = {each.name: each.absolute() for each in tokenizer.iterdir()}
            files |= {name: there[name] for name in _OF_TOKENIZER if name in there}
        if template:
            files = {name: file for name, file in files.items() if name not in _TEMPLATES}
        if "file" in template:
            files[TEMPLATE] = Path(template["file"])
        config = _with_fields(read_json(model / _CONFIG), fields)
        texts = {_CONFIG: json.dumps(config, indent=1)} if fields else {}
        if "text" in template:
            texts[TEMPLATE] = template["text"]
        facts = [_VERSION, sorted((name, str(file)) for name, file in files.items()), texts]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        folder = cache_dir() / "composed" / f"{model.name}-{digest}"
        if not is_present(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_orphans(folder.parent, link=ORIGIN)
            files[ORIGIN] = model.absolute()
            _make(folder, files, texts)
    except NoCacheError as error:
        raise ModelLoadError(f"{model}: no place for its configuration: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{model}: {error}") from error
    return folder


def _with_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Since transformers 5, `rope_parameters` has what two fields had before."""
    before = config.get("rope_parameters")
    if not isinstance(before, dict) or not any(name in fields for name in _ROPE):
        return _replaced(config, fields)
    after = dict(fields.get("rope_scaling", before))
    for source in (before, fields):
        if "rope_theta" in source:
            after["rope_theta"] = source["rope_theta"]
    rest = {name: each for name, each in fields.items() if name not in _ROPE}
    return _replaced(config, {**rest, "rope_parameters": after})


def _replaced(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config with fields replaced as transformers and vLLM do: a section's one by one, other
    objects as a whole."""
    found = dict(config)
    for name, value in fields.items():
        is_section = name.endswith("_config") and isinstance(value, dict)
        before = found.get(name)
        found[name] = _replaced(before, value) if is_section and isinstance(before, dict) else value
    return found


def _make(folder: Path, files: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Links to files, and new files with these texts."""
    with unfinished(folder.parent) as temporary:
        made = temporary / "made"
        made.mkdir()
        for name, file in files.items():
            if name not in texts:
                (made / name).symlink_to(file)
        for name, text in texts.items():
            (made / name).write_text(text)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not is_present(folder):
                raise


def main(settings: str) -> str:
    """settings: a JSON list of the arguments of `composed_directory`."""
    model, tokenizer, fields, template = json.loads(settings)
    other = None if tokenizer is None else Path(tokenizer)
    return str(composed_directory(Path(model), other, fields, template))


if __name__ == "__main__":
    try:
        print(main(sys.argv[1]))
    except ModelLoadError as error:
        sys.exit(str(error))
