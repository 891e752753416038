"""How byte-level BPE splits a text into words before it merges: a GGUF file says it by a name,
`tokenizer.ggml.pre`, and leaves the rest to its reader.

The names and the options that they imply are those of llama.cpp (`llama-vocab.cpp`). The regular
expressions are those of the models' own `tokenizer.json`, where they are known: llama.cpp spells
some of them in another way, for its own engine, and the models were trained with these ones. Each
runs in Oniguruma, inside `tokenizers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATION_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# A word begins a new token where its case changes: "camelCase".
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_LOWER, _CASED_UPPER = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
)  # fmt: skip

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CASED_LOWER}|{_CASED_UPPER}|\p{{N}}|{_PUNCTUATION_OR_PATH}|{_SPACES}"
_O200K_WORDS = rf"{_CASED_LOWER}{_CONTRACTION}?|{_CASED_UPPER}{_CONTRACTION}?"
_O200K = rf"{_O200K_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_PATH}|{_SPACES}"
_NOT_HAN = r"&&[^\p{Han}]]"  # the end of a set of characters
_KIMI_K2 = (
    r"\p{Han}+|"
    + _O200K_WORDS.replace(_UPPER, _UPPER[:-1] + _NOT_HAN).replace(_LOWER, _LOWER[:-1] + _NOT_HAN)
    + rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
)
_DIGITS_BY_THREE = r"\d{1,3}(?=(?:\d{3})*\b)"  # from the right
_DEEPSEEK3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _DEEPSEEK3_CJK,
    rf"{_DEEPSEEK3_SYMBOL}|{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|[\n]+"
# Letters of European scripts.
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What a name implies.

    Attributes:
        patterns: a text is split by each in turn: what matches and what is between are parts.
        byte_patterns: these split what the bytes are spelled as, after the others.
        ignore_merges: a word that is a token becomes it, whatever the merges make of it.
        add_bos: the default of `add_bos_token`.
        add_sep: pairs have a separator, as in RoBERTa.
        is_composed: the text is brought to Unicode's form NFC first.
        is_byte_level: else the tokens are plain text with ▁ for spaces, and bytes as <0xNN>.
    """

    patterns: tuple[str, ...]
    byte_patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False
    is_composed: bool = False
    is_byte_level: bool = True

    def as_json(self) -> dict[str, Any]:
        """What `tokenizer.json` has for it."""
        spelled = [_BYTE_LEVEL] if self.is_byte_level else []
        steps = [*map(_split, self.patterns), *spelled, *map(_split, self.byte_patterns)]
        return {"type": "Sequence", "pretokenizers": steps}


_BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
}  # fmt: skip


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def _of(*patterns: str, **options: Any) -> PreTokenizer:
    return PreTokenizer(patterns=patterns, **options)


_KINDS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): _of(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    (
        "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0",
        "mellum", "jais", "exaone4", "trillion", "granite-docling",
    ): _of(_GPT2),
    ("mpt", "olmo", "modern-bert"): _of(_GPT2, is_composed=True),
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): _of(_GPT2, add_sep=True),
    (
        "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
        "mellum2",
    ): _of(r"\p{N}", _GPT2),
    (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    ): _of(_LLAMA3, ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): _of(_LLAMA3),
    ("glm4", "glm5"): _of(_LLAMA3, ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "f2llmv2", "megrez", "stablelm2"): _of(_QWEN2, is_composed=True),
    ("kormo", "hunyuan", "solar-open", "grok-2"): _of(_QWEN2),
    ("qwen35",): _of(_QWEN35),
    ("ufakzeka",): _of(rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"),
    ("laguna",): _of(_LINES, _QWEN2),
    ("minicpm5",): _of(
        r"\p{N}{1,3}",
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}",
        ignore_merges=True,
    ),
    ("tekken",): _of(_TEKKEN, ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _of(_O200K),
    ("granite-embed-multi-97m",): _of(_O200K, ignore_merges=True),
    ("tiny_aya", "cohere2moe"): _of(_DIGITS_BY_THREE, _O200K),
    ("kimi-k2",): _of(_KIMI_K2),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _of(*_DEEPSEEK3),
    ("spark2_5",): _of(
        r"\p{N}{1,3}",
        _DEEPSEEK3_CJK,
        rf"{_DEEPSEEK3_SYMBOL}|{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    ("afmoe",): _of(
        _DIGITS_BY_THREE,
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
        "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
        "\u1100-\u11ff]+",
        rf"{_DEEPSEEK3_SYMBOL}|{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    ("deepseek-llm",): _of(
        "[\r\n]", rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        _DEEPSEEK_CJK, r"\p{N}",
    ),
    ("deepseek-coder",): _of("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    ("falcon",): _of(
        r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, byte_patterns=(r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    ("bloom", "gpt3-finnish", "poro-chat"): _of(_BLOOM),
    ("viking",): _of(_BLOOM, r"\p{N}"),
    ("jais-2",): _of(
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{number}}}(?!\S)" for number in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}"
    ),
    ("youtu",): _of(
        "[\uac00-\ud7a3\u3131-\u318e]+|"
        "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
        "[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"{_O200K_WORDS}|\p{{N}}|{_PUNCTUATION_OR_PATH}|{_SPACES}",
        ignore_merges=True,
    ),
    ("chameleon",): _of(
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )",
        r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        add_bos=True,
    ),
    ("superbpe",): _of(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _of(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    ("seed-coder",): _of(
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
    ),
    ("exaone-moe",): _of(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    ("gemma4", "granite-embed-multi-311m"): _of(_LINES, add_bos=True, is_byte_level=False),
    ("sarvam-moe",): _of(_LINES, is_byte_level=False),
}  # fmt: skip
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS.items() for name in names}
