"""From a `StructuredOutputs` to a matcher, by llguidance, with limits.

The library and the vocabulary are loaded when the first grammar comes. Compiled grammars are kept,
by content (`kept_grammars`); each sequence gets a copy.
"""

from __future__ import annotations

import importlib
import json
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.process.native_panics import is_panic
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.json_schema import check_schema, subschemas
from penstock.engine.structured_outputs.kept_grammars import KeptGrammar, KeptGrammars
from penstock.engine.structured_outputs.lark import FORMS
from penstock.engine.structured_outputs.patterns import check_lark, repetition_fault

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_MESSAGE_CHARS = 300
_MAX_NAMED_PATHS = 3
_MAX_SEARCHED = 64  # schemas, for the one that is at fault
# A step waits for its masks. llguidance does some 14,000 units of lexer fuel or 20,000 items in a
# millisecond; a grammar that needs more ends its output.
_STEP_LIMITS = {"step_lexer_fuel": 60_000, "step_max_items": 40_000, "max_lexer_states": 50_000}
_SIZE_LIMITS = {"initial_lexer_fuel": 1_000_000, "max_grammar_size": 500_000}


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Threads may share it.

    Args:
        directory: of the model's files.
        vocab_size: of the logits; ids without a token never match.
        eos_token_ids: they end an output where its grammar lets it end.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._file = directory / "tokenizer.json"
        self._library: Any = None
        self._tokenizer: LLTokenizer | None = None
        self.kept = KeptGrammars()
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Compiled grammars that are kept."""
        return len(self.kept)

    def drop(self, grammar: StructuredOutputs) -> None:
        """Forget a grammar; sequences that have it keep it."""
        self.kept.drop(grammar)

    def size(self, grammar: StructuredOutputs) -> int:
        """The bytes that a kept grammar takes, as far as they are known."""
        return self.kept.size(grammar)

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        """Compile a grammar for later, the first mask included: it can take far longer than those
        that follow.

        Args:
            is_checked: not again whether it is supported, which holds Python's lock; a sandbox has
                compiled it.

        Raises:
            InvalidRequestError: the grammar is invalid, not supported or too large, or the model's
                tokenizer cannot be used. `param` begins with `structured_outputs`.
        """
        try:
            self.compiled(grammar, is_checked=is_checked)
        except InvalidRequestError as error:
            param = f"structured_outputs{error.param or ''}"
            raise InvalidRequestError(f"structured_outputs: {error}", param=param) from error
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), param="structured_outputs") from error
        except BaseException as error:
            if not (isinstance(error, MemoryError | RecursionError) or is_panic(error)):
                raise
            message = "structured_outputs: it is too large or nested too deeply to be compiled"
            raise InvalidRequestError(message, param="structured_outputs") from error

    @property
    def tokenizer(self) -> LLTokenizer:
        """That of the grammars, which must have been read."""
        assert self._tokenizer is not None
        return self._tokenizer

    def read_tokenizer(self) -> LLTokenizer:
        """The same; the first call reads it, which may take a second.

        Raises:
            ModelLoadError: it cannot be used.
        """
        with self._lock:
            if self._tokenizer is None:
                self._library = importlib.import_module("llguidance")
                self._tokenizer = self._made_tokenizer()
            return self._tokenizer

    @cached_property
    def whole_tokens(self) -> npt.NDArray[np.uint32]:
        """A mask of the tokens that are whole characters. Raises as `read_tokenizer`."""
        tokenizer = self.read_tokenizer()
        is_whole = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.bool_)
        for token_id in range(min(self.vocab_size, tokenizer.vocab_size)):
            is_whole[token_id] = _is_text(tokenizer.decode_bytes([token_id]))
        return np.packbits(is_whole, bitorder="little").view(np.uint32)

    def read_vocabulary(self) -> None:
        """Read what limits of thoughts need of the tokens, which may take seconds.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        try:
            _ = self.whole_tokens
        except ModelLoadError as error:
            raise InvalidRequestError(str(error), param="thinking_token_budget") from error

    def matcher(self, grammar: StructuredOutputs) -> LLMatcher:
        """A matcher at the beginning of an output. Raises as `compiled`."""
        return self.compiled(grammar).matcher.deep_copy()

    def compiled(
        self,
        grammar: StructuredOutputs,
        *,
        stale: KeptGrammar | None = None,
        is_checked: bool = False,
    ) -> KeptGrammar:
        """The grammar with a matcher that others are copies of.

        Args:
            stale: not this one; its lexer has too many states.
            is_checked: as for `compile`.

        Raises:
            InvalidRequestError: the grammar is invalid, not supported or too large. `param` is the
                path in its schema that is at fault, or empty.
            ModelLoadError: the tokenizer cannot be used.
        """
        known = self.kept.get(grammar)
        if known is not None and known is not stale:
            return known
        self.read_tokenizer()

        def compiled() -> LLMatcher:
            if not is_checked and stale is None:
                _check(grammar)
            matcher = self._compile(grammar)
            matcher.deep_copy().compute_bitmask()
            return matcher

        return self.kept.made(grammar, compiled)

    def _made_tokenizer(self) -> LLTokenizer:
        try:
            text = self._file.read_text(encoding="utf-8")
            text = _without_special_texts(text, vocab_size=self.vocab_size)
            ends = list(self.eos_token_ids)
            tokenizer: LLTokenizer = self._library.LLTokenizer(
                text, n_vocab=self.vocab_size, eos_token=ends or None
            )
        except Exception as error:
            reason = getattr(error, "strerror", None) or error  # without a path: it may be a copy
            raise ModelLoadError(f"its tokens cannot be used for grammars: {reason}") from error
        return tokenizer

    def _compile(self, grammar: StructuredOutputs) -> LLMatcher:
        library = self._library
        try:
            if grammar.kind == "json_schema":
                source = library.LLMatcher.grammar_from_json_schema(grammar.text)
            elif grammar.kind == "regex":
                source = library.LLMatcher.grammar_from_regex(grammar.text)
            else:
                source = library.LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise InvalidRequestError(_first_line(str(error)), param="") from error
        matcher = self._matcher_of(source)
        if matcher.is_error():
            raise self._refusal(grammar, matcher.get_error())
        return matcher

    def _matcher_of(self, source: str) -> LLMatcher:
        limits = self._library.LLParserLimits(**_STEP_LIMITS, **_SIZE_LIMITS, verbose_errors=False)
        matcher: LLMatcher = self._library.LLMatcher(
            self._tokenizer, source, log_level=0, limits=limits
        )
        return matcher

    def _refusal(self, grammar: StructuredOutputs, message: str) -> InvalidRequestError:
        reason = _reason_of(message)
        if grammar.kind == "lark" and "%json" not in grammar.text:  # tools' grammars have it
            reason = f"{reason}; {FORMS}"
        if grammar.kind != "json_schema":
            return InvalidRequestError(reason, param="")
        schema = json.loads(grammar.text)
        if message.startswith("oneOf"):
            return _refusal_of_one_of(schema)
        path = self._path_at_fault(schema, message)
        return InvalidRequestError(f"{path}: {reason}" if path else reason, param=path)

    def _path_at_fault(self, schema: Any, message: str) -> str:
        """The innermost part that is refused for the same reason, among the last ones."""
        parts = [(path, each) for path, each in subschemas(schema) if isinstance(each, dict)]
        for path, each in reversed(parts[1:][-_MAX_SEARCHED:]):
            part = {**each, "x-guidance": schema.get("x-guidance", {})}
            source = self._library.LLMatcher.grammar_from_json_schema(json.dumps(part))
            matcher = self._matcher_of(source)
            if matcher.is_error() and str(matcher.get_error()) == message:
                return path
        return ""


def _check(grammar: StructuredOutputs) -> None:
    """Raises: InvalidRequestError: it is not supported, which llguidance does not say well."""
    try:
        if grammar.kind == "json_schema":
            check_schema(json.loads(grammar.text))
        elif grammar.kind == "regex":
            fault = repetition_fault(grammar.text)
            if fault is not None:
                raise InvalidRequestError(f"it {fault}", param="")
        else:
            check_lark(grammar.text)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise InvalidRequestError(_first_line(str(error)), param="") from error


def _is_text(written: bytes) -> bool:
    try:
        written.decode()
    except UnicodeDecodeError:
        return False
    return True


def _without_special_texts(tokenizer: str, *, vocab_size: int) -> str:
    """The file of a tokenizer whose special tokens have names that nobody writes. Otherwise a text
    such as `<|end|>` in a grammar would be that token, which is no text. Tokens that were added
    beyond the model's vocabulary are left out: there are no logits of them."""
    made = json.loads(tokenizer)
    added = [token for token in made.get("added_tokens", ()) if token["id"] < vocab_size]
    made["added_tokens"] = added
    names = {
        token["content"]: f"\ufdd0{token['id']}\ufdd0"
        for token in added
        if token["special"] or _looks_special(token["content"])
    }
    for token in added:
        token["special"] = token["content"] in names
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = made["model"].get("vocab")
    if isinstance(vocabulary, dict):
        made["model"]["vocab"] = {names.get(name, name): each for name, each in vocabulary.items()}
    elif isinstance(vocabulary, list):  # with scores
        made["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    return json.dumps(made)


def _looks_special(name: str) -> bool:
    """llguidance takes such tokens for special ones, and fails where it forced their text."""
    return name.startswith("<") and name.endswith(">")


def _refusal_of_one_of(schema: Any) -> InvalidRequestError:
    paths = [
        f"{path}.oneOf"
        for path, each in subschemas(schema)
        if isinstance(each, dict) and "oneOf" in each
    ]
    shown = ", ".join(paths[:_MAX_NAMED_PATHS]) + (" …" if paths[_MAX_NAMED_PATHS:] else "")
    return InvalidRequestError(
        f"{shown} uses 'oneOf' with alternatives that may hold at the same time, which is not "
        "supported; 'anyOf' is",
        param=paths[0] if paths else "",
    )


def _reason_of(message: str) -> str:
    if "Regex is empty" in message:
        return "no output can match it: what it says of a text excludes itself"
    _, is_regex, reason = message.rpartition("\nerror: ")
    return f"not a regular expression: {_first_line(reason)}" if is_regex else _first_line(message)


def _first_line(message: str) -> str:
    return message.split("\n")[0][:_MAX_MESSAGE_CHARS]
