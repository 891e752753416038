"""How a model fills in the middle: the tokens around what is before a gap and what is after it.

    prefix first    <|fim_prefix|> before <|fim_suffix|> after <|fim_middle|>    nearly all
    suffix first    [SUFFIX] after [PREFIX] before                               Codestral

They are found by the tokens' names, as in llama.cpp, or in a GGUF file's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.model_files.json_file import FIM_FIELD, is_present, read_json
from penstock.engine.text.tokenizer import Tokenizer

# Before what is before the gap, before what is after it, and before what fills it.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>", "<fim-repo>", "<REPO>")
_FILE = ("<|file_sep|>", "<file_sep>")
_ENDS = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "<|file_separator|>", "<|endoftext|>",
    "▁<EOT>", "<EOT>",
)  # fmt: skip
# All that mark a part of such a prompt.
MARKERS = tuple(
    dict.fromkeys(text for text in (*(text for names in _NAMES for text in names),
                                    *_REPOSITORY, *_FILE) if text)
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInMiddle:
    """Token ids.

    Attributes:
        middle: None: what is after the gap comes first, and nothing follows what is before it.
        repository: before a repository's name; None: the model has no such token.
        file: before a file's name.
        ends: an output is over where it has one of these.
        start: what the tokenizer puts before every text.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer) -> FillInMiddle | None:
        """That of the model in directory `path`; None if it has no such tokens.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        ids = tokenizer.added_tokens
        file = path / "tokenizer_config.json"
        given = ConfigFields(read_json(file) if is_present(file) else {}, path=file).section(
            FIM_FIELD
        )
        known = {name: given.integer(name, minimum=0) for name in given}
        names = next((names for names in _NAMES if all(n in ids for n in names if n)), None)
        if names is not None:
            prefix, suffix, middle = names
            found = {"pre": ids[prefix], "suf": ids[suffix]}
            known = {**found, **({"mid": ids[middle]} if middle else {}), **known}
        if not known.keys() >= {"pre", "suf"} or (names is None and "mid" not in known):
            return None
        repository = known.get("rep", _first(_REPOSITORY, ids))
        separator = known.get("sep", _first(_FILE, ids))
        markers = (known["pre"], known["suf"], known.get("mid"), repository, separator)
        others = (known.get("pad"), known.get("eot"), *(ids.get(name) for name in _ENDS))
        return cls(
            prefix=known["pre"],
            suffix=known["suf"],
            middle=known.get("mid"),
            repository=repository,
            file=separator,
            ends=tuple(dict.fromkeys(each for each in (*markers, *others) if each is not None)),
            start=_start(tokenizer),
        )

    def prompt(
        self,
        before: Sequence[int],
        after: Sequence[int],
        *,
        context: Sequence[int] = (),
        has_start: bool = True,
    ) -> list[int]:
        """The prompt of a gap.

        Args:
            context: goes before it.
            has_start: the prompt begins with what the tokenizer puts before every text.
        """
        start = [*context, *(self.start if has_start else ())]
        if self.middle is None:
            return [*start, self.suffix, *after, self.prefix, *before]
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a prompt without any text."""
        return len(self.prompt((), ()))


def _first(names: Sequence[str], ids: dict[str, int]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _start(tokenizer: Tokenizer) -> tuple[int, ...]:
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()
