"""The compared models: random weights of known shape, made on the spot.

Prompts and answers consist of words that are one token each, so that a server can tell the text of
every token at once: the output layer's rows of all other tokens are zero, and greedy decoding never
picks one.

A GGUF file is a model too, by its file's name: `link` puts it beside those that are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.load.peers.environments import BUILD

MODELS = BUILD / "models"

END = "<|end|>"
_MAX_MODEL_LEN = 4096
_IDS_OF_FILES = range(1000, 30_000)  # normal tokens in all vocabularies of real models
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ", "aeiouy"


@dataclass(frozen=True, slots=True)
class Shape:
    """`fields` are what `AutoConfig.for_model` takes."""

    model_type: str
    fields: Mapping[str, Any]


_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
SHAPES: Mapping[str, Shape] = {
    **{
        name: Shape(model_type, dict(zip(_FIELDS, values, strict=True)))
        for name, model_type, values in (
            ("T", "llama", (4096, 64, 192, 2, 2, 2, True)),
            ("S", "llama", (4096, 384, 2560, 8, 6, 2, False)),
            ("M", "qwen2", (32000, 896, 4864, 24, 14, 2, True)),
        )
    },
    "GPT2": Shape("gpt2", {"vocab_size": 32000}),  # the defaults but for this
    "MOE": Shape(
        "qwen3_moe",
        dict(zip(_FIELDS, (8192, 512, 1536, 6, 8, 2, False), strict=True))
        | {"head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
}


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]], int]:
    """Tokens by id, the merges that make them, and the first of the words, which come last: the
    special token, bytes, syllables, syllables after a space, and words of two syllables."""
    base = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    num_syllables = next(n for n in range(1, size) if len(base) + 2 * n + n * n >= size)
    syllables = list(islice(product(_CONSONANTS, _VOWELS), num_syllables))
    merges: list[tuple[str, str]] = [*syllables]
    merges += [(space, "".join(pair)) for pair in syllables]
    first_word_id = len(base) + len(merges)
    words = product(map("".join, syllables), repeat=2)
    merges += [(space + one, other) for one, other in islice(words, size - first_word_id)]
    return [*base, *map("".join, merges)], merges, first_word_id


def make(name: str, directory: Path | None = None) -> Path:
    """A file, or the directory of a model of `SHAPES`, made now unless it is there."""
    path = directory or MODELS / name
    if path.is_file() or (path / "tokenizer.json").exists():
        return path
    unfinished = path.with_name(path.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    _write_weights(SHAPES[name], word_ids(name), unfinished)
    _write_tokenizer(SHAPES[name].fields["vocab_size"], unfinished)
    shutil.rmtree(path, ignore_errors=True)
    return unfinished.rename(path)


def link(file: Path) -> str:
    """The name of the model that a GGUF file is."""
    place = MODELS / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(file.resolve(strict=True))
    return file.name


def word_ids(name: str) -> range:
    """The ids of word tokens, of which prompts and answers consist."""
    if name not in SHAPES:
        return _IDS_OF_FILES
    size = SHAPES[name].fields["vocab_size"]
    return range(vocabulary(size)[2], size)


def _write_weights(shape: Shape, word_ids: range, path: Path) -> None:
    config = AutoConfig.for_model(
        shape.model_type,
        max_position_embeddings=_MAX_MODEL_LEN,
        bos_token_id=0,
        eos_token_id=0,
        **shape.fields,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16
    )
    with torch.no_grad():
        model.lm_head.weight[: word_ids.start] = 0
    model.save_pretrained(path)
    # Older releases of transformers look here for the base and for the number of experts.
    file = path / "config.json"
    saved = json.loads(file.read_text("utf-8"))
    if "rope_parameters" in saved:
        saved.setdefault("rope_theta", saved["rope_parameters"]["rope_theta"])
    if "num_local_experts" in saved:
        saved.setdefault("num_experts", saved["num_local_experts"])
    file.write_text(json.dumps(saved, indent=2), encoding="utf-8")


def _write_tokenizer(size: int, path: Path) -> None:
    tokens, merges, _ = vocabulary(size)
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Without the last one, Qwen2's class adds its own, an id too many.
        **dict.fromkeys(("eos_token", "pad_token", "unk_token"), END),
        "model_max_length": _MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
    }
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")
