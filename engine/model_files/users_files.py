"""What messages call the files of a model: as its user did.

A model may be read from a directory that its user has never seen: one that was made for a GGUF
file or for `--tokenizer`, `--chat-template` and `--hf-overrides`, or the Hub's cache. Errors name a
file there; here they get the name of the file that the user can look at, and a GGUF file's own key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.json_file import GGUF_FILE, GGUF_INDEX, is_present, read_json

ORIGIN = ".origin"  # in a directory that was composed: a link to the model's own
TEMPLATE = "chat_template.jinja"  # there: a link to a file, or a text of the command line


@contextmanager
def named_as_users_do(model: str, path: Path) -> Iterator[None]:
    """Errors of this context about files in directory `path` name those of the user.

    Args:
        model: as the user named it.
    """
    try:
        yield
    except ConfigError as error:
        text = in_users_words(str(error), model, path)
        if text == str(error):
            raise
        raise type(error)(text) from error


def in_users_words(text: str, model: str, path: Path) -> str:
    """A message about files in directory `path`, as its user knows them. Arguments as above."""
    pattern = re.compile(rf"{re.escape(str(path))}(?:/(?P<name>[\w.-]+))?(?P<key>: [\w.]+(?=:))?")

    def shown(found: re.Match[str]) -> tuple[str, str]:
        folder, name = path, found["name"] or ""
        while is_present(folder / ORIGIN):
            file = folder / name
            own = file.readlink() if name and file.is_symlink() else None
            if name == TEMPLATE and own is None and is_present(file):
                return "--chat-template", ""
            origin = (folder / ORIGIN).readlink()
            folder, name = (origin, name) if own is None else (own.parent, own.name)
        key = (found["key"] or "").removeprefix(": ")
        if not is_present(folder / GGUF_INDEX):
            place = _on_the_hub(folder) or str(folder)
            return (f"{place}/{name}" if name else place), key
        file, given = (folder / GGUF_FILE).readlink(), Path(model).expanduser()
        if given.is_file() and given.samefile(file):
            return str(given), _keys(folder).get(key, key)
        repository = _on_the_hub(file.parent)
        place = f"{repository}/{file.name}" if repository else str(file)
        return place, _keys(folder).get(key, key)

    def replaced(found: re.Match[str]) -> str:
        file, key = shown(found)
        return f"{file}: {key}" if key else file

    return pattern.sub(replaced, text)


def _keys(folder: Path) -> Mapping[str, str]:
    """The keys of a GGUF file by the fields of `config.json` that were made of them."""
    keys: Mapping[str, str] = {}
    with suppress(ModelLoadError):
        keys = read_json(folder / GGUF_INDEX).get("keys", {})
    return keys


def _on_the_hub(folder: Path) -> str:
    """The repository of a folder in the Hub's cache; empty for another one."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return ""
    return repository.removeprefix("models--").replace("--", "/", 1)
