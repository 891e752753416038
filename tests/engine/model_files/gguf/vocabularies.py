"""Keys of GGUF files: of small vocabularies made by hand, and of real tokenizers, as llama.cpp's
converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.engine.text.tokenizer import byte_level_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_PRE = {
    "llama3_1": "llama-bpe", "qwen3": "qwen2", "gptoss": "gpt-4o", "deepseek_v3": "deepseek-v3",
}  # fmt: skip
_CONVERTERS_CONTROL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def keys_of(
    model: str, tokens: Iterable[tuple[str, int]], *, scores: list[float] | None = None, **ids: int
) -> dict[str, Any]:
    """
    Args:
        tokens: texts and types.
        ids: by the file's names of special tokens.
    """
    texts, types = map(list, zip(*tokens, strict=True))
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()},
    }
    return keys if scores is None else {**keys, "tokenizer.ggml.scores": scores}


def byte_level(
    *more: tuple[str, int], merges: Iterable[str] = (), pre: str = "gpt-2", **ids: int
) -> dict[str, Any]:
    """Ids 0 to 255 are the bytes; then come `more`."""
    bytes_ = sorted(byte_level_alphabet().items(), key=lambda item: item[1])
    tokens = [*((char, NORMAL) for char, _ in bytes_), *more]
    return {
        **keys_of("gpt2", tokens, **ids),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.pre": pre,
    }


def sentencepiece(*pieces: str, more: Iterable[tuple[str, int]] = ()) -> dict[str, Any]:
    """Three special tokens, 256 bytes, then pieces, the first of the highest score."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [*((piece, NORMAL) for piece in pieces), *more]
    scores = [-float(number) for number in range(len(tokens))]
    return keys_of("llama", tokens, scores=scores, bos=1, eos=2, unknown=0)


def bert(*words: str) -> dict[str, Any]:
    """Words as WordPiece spells them: `##` before what does not begin one."""
    special = [("[PAD]", UNUSED), ("[UNK]", UNKNOWN), ("[CLS]", CONTROL), ("[SEP]", CONTROL)]
    spelled = [each.removeprefix("##") if each.startswith("##") else f"▁{each}" for each in words]
    return keys_of(
        "bert", [*special, *((each, NORMAL) for each in spelled)],
        cls=2, seperator=3, unknown=1, padding=0,
    )  # fmt: skip


def converted(name: str, folder: Path) -> dict[str, Any]:
    """What the converter writes for the tokenizer in a folder, whose package is called `name`."""
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    added = {each["id"]: each for each in content["added_tokens"]}
    ids = content["model"]["vocab"] | {each["content"]: number for number, each in added.items()}
    tokens = [[f"[PAD{number}]", UNUSED] for number in range(max(ids.values()) + 1)]
    for text, number in ids.items():
        tokens[number] = [text, BYTE if _BYTE_TOKEN.fullmatch(text) else NORMAL]
    for number, each in added.items():
        tokens[number] = _added(each)
    keys = keys_of("gpt2", ((text, kind) for text, kind in tokens))
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each)
        for each in content["model"]["merges"]
    ]
    if name in _PRE:
        keys["tokenizer.ggml.pre"] = _PRE[name]
        keys["tokenizer.ggml.merges"] = [*map(" ".join, merges)]
    else:
        keys["tokenizer.ggml.model"] = "llama"
        rank = {one + other: number for number, (one, other) in reversed([*enumerate(merges)])}
        keys["tokenizer.ggml.scores"] = [-float(rank.get(text, 0)) for text, _ in tokens]
        keys["tokenizer.ggml.add_space_prefix"] = name == "llama2"
    for key, field in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if text := _text(config.get(field)):
            keys[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    if "add_bos_token" in config:
        keys["tokenizer.ggml.add_bos_token"] = config["add_bos_token"]
    return keys


def _added(token: dict[str, Any]) -> list[Any]:
    text = token["content"]
    if text == "<unk>":
        return [text, UNKNOWN]
    if token["special"] or text in _CONVERTERS_CONTROL or _LOOKS_SPECIAL.fullmatch(text):
        return [text, CONTROL]
    return [text.replace("▁", " "), USER_DEFINED]


def _text(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token
