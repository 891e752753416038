"""The tokenizer of a GGUF file, written as the `tokenizer.json` and `tokenizer_config.json` that
the library `tokenizers` and the rest of penstock read.

    model of the file           tokenizer.json
    gpt2                        BPE on bytes; `tokenizer.ggml.pre` says how words are split
    gemma4, some names of pre   BPE on characters, ▁ for spaces
    llama                       the same, with merges made of SentencePiece's scores
    t5                          Unigram
    bert                        WordPiece

Anything else is refused by its name. What is written is checked (`tokenizer_check`) before it is
used.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from penstock.engine.model_files.gguf.tokenizer_check import check, loaded
from penstock.engine.model_files.gguf.vocabulary import Keys, TokenType, Vocabulary, id_key
from penstock.engine.model_files.json_file import FIM_FIELD

_LOG = logging.getLogger(__name__)
_MERGES = "tokenizer.ggml.merges"
_PRE = "tokenizer.ggml.pre"
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_SPACE = "▁"
_TO_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_FROM_SPACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_BYTES = [_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_MOST_DROPPED = 0.01  # of all merges
_MAX_WORD_CHARS = 100  # as BERT's own; a longer one is unknown
# Tokens of these that are no text take the spaces after them.
_PHI3_EXCEPT = ("<unk>", "<s>", "<|endoftext|>")
_PHI3 = ("phi-3", "phi3")
_MASK_TAKES_SPACE = ("jina-v2", "roberta", "modern-bert")


def write_tokenizer(keys: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Write the tokenizer and the chat templates that a file's metadata describe; the ids of the
    tokens that end an answer, in ascending order.

    Args:
        keys: of the file, with numbers, strings and lists of them as values.

    Raises:
        ModelLoadError: with the key that is missing, wrong or not supported.
        OSError: the files cannot be written.
    """
    values = Keys(keys)
    vocabulary = Vocabulary.read(values)
    text = _tokenizer(values, vocabulary)
    try:
        backend = loaded(text)
    except ModelLoadError:
        if _MERGES not in values:
            raise
        text = _tokenizer(values, vocabulary, are_checked=True)
        backend = loaded(text)
    check(backend, vocabulary)
    config = _config(values, vocabulary)
    (folder / "tokenizer.json").write_text(text, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return vocabulary.end_ids


def _tokenizer(keys: Keys, vocabulary: Vocabulary, *, are_checked: bool = False) -> str:
    """A `tokenizer.json`.

    Args:
        are_checked: the merges (`_merges`).
    """
    parts = _parts(keys, vocabulary, are_checked)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(keys, vocabulary),
            **parts,
        },
        ensure_ascii=False,
    )


def _parts(keys: Keys, vocabulary: Vocabulary, are_checked: bool) -> dict[str, Any]:
    """All of it but its added tokens."""
    match vocabulary.model:
        case "gpt2" | "gemma4":
            return _bpe(keys, vocabulary, are_checked)
        case "llama":
            return _sentencepiece(keys, vocabulary)
        case "t5":
            return _unigram(keys, vocabulary)
        case "bert":
            return _word_piece(keys, vocabulary)
        case "":
            raise ModelLoadError("tokenizer.ggml.model is missing: the file has no tokenizer")
    raise ModelLoadError(f"tokenizer.ggml.model: {vocabulary.model!r} is not supported")


def _bpe(keys: Keys, vocabulary: Vocabulary, are_checked: bool) -> dict[str, Any]:
    pre = _pre_tokenizer(keys, vocabulary)
    model = {
        "type": "BPE",
        "ignore_merges": pre.ignore_merges,
        "vocab": _ids(vocabulary),
        "merges": _merges(keys, vocabulary.tokens, are_checked=are_checked),
    }
    if pre.is_byte_level:
        normalizer: dict[str, Any] | None = {"type": "NFC"} if pre.is_composed else None
        decoder: dict[str, Any] = {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
        }  # fmt: skip
    else:
        normalizer = _FROM_SPACE
        decoder = {"type": "Sequence", "decoders": _BYTES}
        model |= _for_unknown(vocabulary)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre.as_json(),
        "post_processor": _ends(
            keys, vocabulary, bos=pre.add_bos, sep=pre.add_sep,
            is_bos_forced=pre.add_bos and not pre.is_byte_level,
        ),
        "decoder": decoder,
        "model": model,
    }  # fmt: skip


def _pre_tokenizer(keys: Keys, vocabulary: Vocabulary) -> PreTokenizer:
    name = "gemma4" if vocabulary.model == "gemma4" else keys.text(_PRE)
    if not name:
        _LOG.warning(
            "the file does not say how its tokenizer splits words (%s), as files of before May "
            "2024: the model may answer worse than it could",
            _PRE,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(f"{_PRE}: {name!r} is not supported")
    return PRE_TOKENIZERS[name]


def _merges(keys: Keys, tokens: list[str], *, are_checked: bool) -> list[Any]:
    """The merges, each as the file has it: two tokens with a space between them.

    Args:
        are_checked: as pairs, without those of other texts than tokens. llama.cpp ignores such
            ones, and the library refuses them; it takes as long again to look.

    Raises:
        ModelLoadError: with `are_checked`: more than a few are left out.
    """
    merges = keys.strings(_MERGES)
    if not are_checked:
        return merges
    known = set(tokens)
    spaces = ((each, each.find(" ", 1)) for each in merges)
    pairs = ((each[:at], each[at + 1 :]) for each, at in spaces if at > 0)
    kept = [
        (one, other)
        for one, other in pairs
        if one in known and other in known and one + other in known
    ]
    if len(merges) - len(kept) > _MOST_DROPPED * len(merges):
        raise ModelLoadError(
            f"{_MERGES}: {len(merges) - len(kept):,} of {len(merges):,} do not join two tokens "
            "into a third"
        )
    return kept


def _sentencepiece(keys: Keys, vocabulary: Vocabulary) -> dict[str, Any]:
    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    prepend = {"type": "Prepend", "prepend": _SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        # A space comes before the text, and before what follows a special token.
        "normalizer": (
            {"type": "Sequence", "normalizers": [prepend, _FROM_SPACE]}
            if has_prefix else _FROM_SPACE
        ),
        "pre_tokenizer": None,
        "post_processor": _ends(keys, vocabulary, bos=True),
        "decoder": {"type": "Sequence", "decoders": _BYTES + [strip] * has_prefix},
        "model": {
            "type": "BPE",
            "vocab": _ids(vocabulary),
            "merges": _merges_of_scores(vocabulary),
            **_for_unknown(vocabulary),
        },
    }  # fmt: skip


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the token of the highest score: that is BPE
    with the merges of all tokens in the order of their scores. Among equal scores it takes the
    leftmost, which merges cannot say; these are in the order of transformers'."""
    scores = vocabulary.scores
    if scores is None:
        raise ModelLoadError("tokenizer.ggml.scores is missing")
    joined = (TokenType.NORMAL, TokenType.USER_DEFINED)
    pieces = {
        text: scores[number]
        for number, text in enumerate(vocabulary.tokens)
        if vocabulary.types[number] in joined
    }
    by_score = sorted(pieces, key=pieces.__getitem__, reverse=True)
    merges = list[tuple[str, str]]()
    for _, group in groupby(by_score, key=pieces.__getitem__):
        found = [
            (left, text[at:])
            for text in group
            for at in range(len(text) - 1, 0, -1)
            if (left := text[:at]) in pieces and text[at:] in pieces
        ]
        merges += sorted(found, key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return merges


def _for_unknown(vocabulary: Vocabulary) -> dict[str, Any]:
    """What becomes of characters that are no tokens: their bytes do, or the unknown token."""
    unknown = vocabulary.text(vocabulary.special.unk)
    has_bytes = TokenType.BYTE in vocabulary.types
    if unknown is None and not has_bytes:
        raise ModelLoadError(f"{id_key('unknown')} is missing, and there are no tokens of bytes")
    return {"unk_token": unknown, "fuse_unk": True, "byte_fallback": has_bytes}


def _unigram(keys: Keys, vocabulary: Vocabulary) -> dict[str, Any]:
    if vocabulary.scores is None:
        raise ModelLoadError("tokenizer.ggml.scores is missing")
    if vocabulary.special.unk is None:
        raise ModelLoadError(f"{id_key('unknown')} is missing")
    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix", False)
    metaspace = {
        "type": "Metaspace", "replacement": _SPACE, "split": True,
        "prepend_scheme": "always" if has_prefix else "never",
    }  # fmt: skip
    splits = [metaspace]
    if keys.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        splits.insert(0, {"type": "WhitespaceSplit"})
    pairs = zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True)
    return {
        "normalizer": _charsmap(keys),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": _ends(keys, vocabulary, eos=True, sep=vocabulary.special.bos is not None),
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.special.unk,
            "vocab": [*pairs],
            "byte_fallback": TokenType.BYTE in vocabulary.types,
        },
    }


def _charsmap(keys: Keys) -> dict[str, Any] | None:
    if _CHARSMAP not in keys:
        return None
    try:
        content = bytes(each & 0xFF for each in keys.integers(_CHARSMAP))
    except ValueError as error:
        raise ModelLoadError(f"{_CHARSMAP} is not a list of bytes") from error
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def _word_piece(keys: Keys, vocabulary: Vocabulary) -> dict[str, Any]:
    if vocabulary.special.unk is None:
        raise ModelLoadError(f"{id_key('unknown')} is missing")
    is_lower = keys.flag("tokenizer.ggml.normalizer.lowercase", True)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": keys.flag("tokenizer.ggml.normalizer.strip_accents", is_lower),
        "lowercase": is_lower,
    }
    # The file has ▁ before what begins a word, `tokenizer.json` has ## before what does not.
    special = {*vocabulary.added_ids}
    for number, text in enumerate(vocabulary.tokens):
        if text.startswith(_SPACE):
            vocabulary.tokens[number] = text[1:]
        elif number not in special and not (text.startswith("[") and text.endswith("]")):
            vocabulary.tokens[number] = f"##{text}"
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _bert_ends(vocabulary),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.text(vocabulary.special.unk),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _MAX_WORD_CHARS,
            "vocab": _ids(vocabulary),
        },
    }


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return dict(zip(vocabulary.tokens, range(len(vocabulary.tokens)), strict=True))


def _ends(
    keys: Keys,
    vocabulary: Vocabulary,
    *,
    bos: bool = False,
    eos: bool = False,
    sep: bool = False,
    is_bos_forced: bool = False,
) -> dict[str, Any] | None:
    """What comes before and after a text, and between two.

    Args:
        bos, eos, sep: whether these do, unless the file says.
    """
    special = vocabulary.special
    before = _added(keys, "bos", special.bos, bos, is_forced=is_bos_forced)
    after = _added(keys, "eos", special.eos, eos)
    between = _added(keys, "sep", special.eos if special.sep is None else special.sep, sep)
    if before is after is None:
        return None
    # Models that read pairs have BOS once; for others it is as in transformers.
    second = None if between is not None or after is not None else before
    return _template(vocabulary, before, after, between if after is not None else None, second)


def _added(
    keys: Keys, name: str, token_id: int | None, default: bool, *, is_forced: bool = False
) -> int | None:
    key = f"tokenizer.ggml.add_{name}_token"
    is_added = keys.flag(key, default) or is_forced
    if is_added and token_id is None and key in keys and name != "sep":
        raise ModelLoadError(f"{id_key(name)} is missing, and {key} is true")
    return token_id if is_added else None


def _bert_ends(vocabulary: Vocabulary) -> dict[str, Any]:
    special = vocabulary.special
    for key, token_id in (("cls", special.cls), ("seperator", special.sep)):
        if token_id is None:
            raise ModelLoadError(f"{id_key(key)} is missing")
    return _template(vocabulary, special.cls, special.sep, None, None)


def _template(
    vocabulary: Vocabulary,
    before: int | None,
    after: int | None,
    between: int | None,
    second: int | None,
) -> dict[str, Any]:
    """Token ids around a text, and around two.

    Args:
        between: after what ends the first.
        second: before the second.
    """

    def special(token_id: int | None, type_id: int = 0) -> Iterator[dict[str, Any]]:
        if token_id is not None:
            yield {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": type_id}}

    def sequence(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    ids = {each for each in (before, after, between, second) if each is not None}
    first = [*special(before), sequence("A", 0), *special(after)]
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [
            *first, *special(between), *special(second, 1), sequence("B", 1), *special(after, 1)
        ],
        "special_tokens": {
            vocabulary.tokens[each]: {
                "id": vocabulary.tokens[each], "ids": [each], "tokens": [vocabulary.tokens[each]]
            }
            for each in sorted(ids)
        },
    }  # fmt: skip


def _added_tokens(keys: Keys, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    name, pre = keys.text("general.name").lower(), keys.text(_PRE)
    is_phi3 = vocabulary.model == "llama" and any(each in name for each in _PHI3)
    mask = None
    if vocabulary.model == "t5" or pre.startswith(_MASK_TAKES_SPACE):
        mask = vocabulary.special.mask
    return [
        {
            "id": number,
            "content": vocabulary.tokens[number],
            "single_word": False,
            "lstrip": number == mask,
            "rstrip": is_phi3 and vocabulary.tokens[number] not in _PHI3_EXCEPT,
            "normalized": False,
            "special": vocabulary.types[number] != TokenType.USER_DEFINED,
        }
        for number in vocabulary.added_ids
    ]


def _config(keys: Keys, vocabulary: Vocabulary) -> dict[str, Any]:
    special = vocabulary.special
    named = {
        f"{name}_token": vocabulary.text(getattr(special, name))
        for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    }
    templates = _templates(keys)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in named.items() if text is not None},
        **({"chat_template": templates} if templates else {}),
        **({FIM_FIELD: dict(vocabulary.fim_ids)} if vocabulary.fim_ids else {}),
    }


def _templates(keys: Keys) -> str | list[dict[str, str]]:
    """What `tokenizer_config.json` has: the chat template, or a list of several, by name."""
    names = keys.strings(_TEMPLATES) if _TEMPLATES in keys else []
    found = {"default": keys.text(_TEMPLATE)}
    found |= {name: keys.text(f"{_TEMPLATE}.{name}") for name in names}
    found = {name: text for name, text in found.items() if text}
    if not found.keys() - {"default"}:
        return found.get("default", "")
    return [{"name": name, "template": text} for name, text in found.items()]
