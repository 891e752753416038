"""A tiny checkpoint whose tokens are the printable characters of ASCII, so that grammars apply."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS = 2  # of the tiny checkpoints
_SPECIAL = ("<pad>", "<begin>", "<end>")
_LETTERS = [each for each in string.printable if each.isprintable() and each != " "]


def lettered(checkpoint: Path, path: Path) -> Path:
    """A copy of a checkpoint at `path`, with a tokenizer; further ids have no text."""
    shutil.copytree(checkpoint, path)
    tokens = [*_SPECIAL, *_LETTERS]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def text_of(token_ids: list[int]) -> str:
    """What the tokens stand for, without those that end it."""
    return "".join(_LETTERS[each - len(_SPECIAL)] for each in token_ids if each != EOS)
