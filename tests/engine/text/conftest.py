"""Two small tokenizers of the two kinds models use."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.engine.text import Tokenizer

_CORPUS = [
    "Hello world, the quick brown fox. naïve café 漢字 emoji 😀👍🏽 end",
    "streams of tokens, one after another\n\nUser: hi\nAssistant: hello",
] * 3


def byte_level() -> Tokenizer:
    """GPT-2's kind: every token is a string of bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind (Llama 2, Mistral): words with ▁, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzH,.", "▁h", "▁he", "el", "lo", "é"]
    merges = [("▁", "h"), ("▁h", "e"), ("e", "l"), ("l", "o")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="session", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = request.param()
    assert isinstance(made, Tokenizer)
    return made


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return byte_level()
