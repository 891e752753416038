"""The models rivals are compared on: random weights of known shape, made on the spot.

T is nearly nothing (what is measured is the front end), S and M are the sizes a CPU serves. A
conversation sends back the text of its answers, and a cache finds its past again only if that
text becomes the very tokens that were generated. So the tokenizer is made of words that are one
token each, and rows of the output layer that belong to anything but such a word are zero: greedy
decoding then never picks one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
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

SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MESSAGE_ENDS, ANSWER_BEGINS = "<|end|>", "<|assistant|>"
# A space before the words makes the first of them the same token as any other.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MAX_MODEL_LEN = 4096
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ", "aeiouy"


@dataclass(frozen=True, slots=True)
class Shape:
    """What `AutoConfig.for_model` takes."""

    model_type: str
    fields: Mapping[str, Any]


SHAPES: Mapping[str, Shape] = {
    "T": Shape(
        "llama",
        {
            "vocab_size": 4096,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "S": Shape(
        "llama",
        {
            "vocab_size": 4096,
            "hidden_size": 384,
            "intermediate_size": 2560,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "M": Shape(
        "qwen2",
        {
            "vocab_size": 32000,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, the merges that make them, and where the words begin (they go to the end)."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    first_word_id: int


def vocabulary(size: int) -> Vocabulary:
    """Special tokens, bytes, syllables, syllables after a space, and words of two syllables."""
    base = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    num_syllables = next(n for n in range(1, size) if len(base) + 2 * n + n * n >= size)
    syllables = list(islice(product(_CONSONANTS, _VOWELS), num_syllables))
    merges: list[tuple[str, str]] = [*syllables]
    merges += [(space, "".join(pair)) for pair in syllables]
    first_word_id = len(base) + len(merges)
    merges += islice(_words(space, syllables), size - first_word_id)
    return Vocabulary((*base, *map("".join, merges)), tuple(merges), first_word_id)


def _words(space: str, syllables: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for first, second in product(map("".join, syllables), repeat=2):
        yield space + first, second


def make(name: str, directory: Path | None = None) -> Path:
    """The directory of model T, S or M, made now unless it is there."""
    path = directory or MODELS / name
    if (path / "tokenizer.json").exists():
        return path
    unfinished = path.with_name(path.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokens = _vocabulary_of(name)
    _write_weights(SHAPES[name], tokens.first_word_id, unfinished)
    _write_tokenizer(tokens, unfinished)
    shutil.rmtree(path, ignore_errors=True)
    return unfinished.rename(path)


def word_ids(name: str) -> range:
    """The ids of the tokens that are words: what prompts are made of, and what is generated."""
    tokens = _vocabulary_of(name)
    return range(tokens.first_word_id, len(tokens.tokens))


def words(name: str) -> Sequence[str]:
    """The text of each token by id; a word has its space in front."""
    return [text.replace("Ġ", " ") for text in _vocabulary_of(name).tokens]


def message(role: str, content: str) -> str:
    """As `CHAT_TEMPLATE` writes it."""
    return f"<|{role}|> {content.strip()}{MESSAGE_ENDS}"


def _vocabulary_of(name: str) -> Vocabulary:
    return vocabulary(SHAPES[name].fields["vocab_size"])


def _write_weights(shape: Shape, first_word_id: int, path: Path) -> None:
    end = SPECIAL_TOKENS.index(MESSAGE_ENDS)
    config = AutoConfig.for_model(
        shape.model_type,
        max_position_embeddings=_MAX_MODEL_LEN,
        bos_token_id=end,
        eos_token_id=end,
        **shape.fields,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16
    )
    with torch.no_grad():
        model.lm_head.weight[:first_word_id] = 0
    model.save_pretrained(path)
    # Releases before 5 look for the base here.
    file = path / "config.json"
    saved = json.loads(file.read_text("utf-8"))
    theta = saved.get("rope_theta") or saved["rope_parameters"]["rope_theta"]
    file.write_text(json.dumps({**saved, "rope_theta": theta}, indent=2), encoding="utf-8")


def _write_tokenizer(vocabulary: Vocabulary, path: Path) -> None:
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MESSAGE_ENDS,
        "pad_token": MESSAGE_ENDS,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": _MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")
