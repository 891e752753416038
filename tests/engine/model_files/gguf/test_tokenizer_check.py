"""The check of a tokenizer that was made of a GGUF file's keys."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.gguf.tokenizer_check import check, loaded
from penstock.engine.model_files.gguf.tokenizers import write_tokenizer
from penstock.engine.model_files.gguf.vocabulary import Keys, Vocabulary

from .vocabularies import CONTROL, NORMAL, UNUSED, byte_level


def _swapped(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _respelled(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["content"] = "<B>"


def _another_end(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 259, "content": "<end>"})


def _replaced(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "e"}


def _undecoded(content: dict[str, Any]) -> None:
    content["decoder"] = {"type": "Fuse"}


def _dropped(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


def _missing(content: dict[str, Any]) -> None:
    content["added_tokens"].clear()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_swapped, "token 97 is 'a', but decoded it is 'b'"),
        (_respelled, "has 258 tokens, and 259 were made of it"),
        (_another_end, "has 258 tokens, and 259 were made of it"),
        (_replaced, "token 97, 'a', becomes [101] when it is encoded"),
        (_undecoded, "becomes [196, 128] when it is encoded"),
        (_dropped, "becomes [] when it is encoded"),
        (_missing, "token 256, '<b>', becomes [60, 98, 62] when it is encoded"),
    ],
)
def test_the_check_of_what_is_written(
    spoil: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
):
    keys = byte_level(("<b>", CONTROL), ("Ġa", NORMAL), merges=["Ġ a"], bos=256)
    write_tokenizer(keys, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    spoil(content)
    with pytest.raises(ModelLoadError) as caught:
        check(loaded(json.dumps(content)), Vocabulary.read(Keys(keys)))
    assert message in str(caught.value)


def test_what_was_checked_is_told_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    more = [("ab", NORMAL), ("ac", NORMAL), ("<b>", CONTROL), ("<u>", UNUSED)]
    write_tokenizer(byte_level(*more, merges=["a b"]), tmp_path)
    text = "tokenizer of 260 tokens: 258 have a text, 131 were encoded, 1 became others"
    assert text in caplog.text
