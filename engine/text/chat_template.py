"""A model's chat template: renders messages as the prompt text that the model was trained on.

Sandboxed Jinja, with the helpers that Hugging Face templates rely on (`raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `generation` blocks, loop controls).
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.json_file import is_present, read_json, read_text
from penstock.engine.text.template_budget import BudgetedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLE = ({"role": "user", "content": "Hello!"},)
_MAX_REASON_CHARS = 200
MAX_CPU_S = 2.0  # for one rendering; ordinary ones take milliseconds
_WIDE_PATTERN = re.compile(r"%\D*\d{4}")


class TemplateFiles(NamedTuple):
    """The chat template of a model directory, not compiled.

    Attributes:
        special_tokens: by their names in templates (`bos_token`, …).
        file: has the source; for messages.
    """

    source: str | None
    special_tokens: Mapping[str, str]
    file: Path | None = None

    @classmethod
    def read(cls, path: Path) -> TemplateFiles:
        """Read `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`.

        Raises:
            ModelLoadError: a file cannot be read, or a field has the wrong type.
        """
        file = path / "tokenizer_config.json"
        config = read_json(file) if is_present(file) else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates: use `default`
            source = _named(source, file).get("default")
        if source is not None and not isinstance(source, str):
            raise ModelLoadError(f"{file}: chat_template: expected a string or a list of templates")
        special_tokens = _special_tokens(config, file)
        for name, text in {**special_tokens, "chat_template": source or ""}.items():
            if not _is_unicode(text):
                raise ModelLoadError(f"{file}: {name}: expected valid Unicode, not half a pair")
        if is_present(path / "chat_template.jinja"):
            file = path / "chat_template.jinja"
            source = read_text(file)
        return cls(source, special_tokens, file)


class SlowTemplateError(InvalidRequestError):
    """Rendering took more than its CPU time."""


class ChatTemplate:
    """Renders conversations. For a model without a template, `render` raises.

    Args:
        file: has the source; for messages.

    Raises:
        ModelLoadError: the template cannot be compiled.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], file: Path | None = None
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._file = file
        self._environment = _environment()
        try:
            self._default = None if source is None else self._environment.from_string(source)
        except Exception as error:  # RecursionError, SyntaxError, … besides Jinja's own
            raise self._broken(error) from error

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate:
        """The template of a model; raises the errors of `TemplateFiles.read`."""
        return cls(*TemplateFiles.read(path))

    def check(self) -> None:
        """Render a sample message. A template may refuse it, but must not crash.

        Raises:
            ModelLoadError: it crashes.
        """
        if self._default is None:
            return
        try:
            text = self.render(_SAMPLE)
            if not _is_unicode(text):
                raise self._fault("produces invalid Unicode")
        except SlowTemplateError as error:
            raise self._fault(f"takes more than {MAX_CPU_S:g} s to render") from error
        except InvalidRequestError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and not isinstance(cause, jinja2.TemplateError):
                raise self._broken(cause) from error

    def _broken(self, error: Exception) -> ModelLoadError:
        return self._fault(f"is broken: {_reason(error)}")

    def _fault(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{located(self._file)}the model's chat template {what}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        max_cpu_s: float = MAX_CPU_S,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            continue_final_message: end inside the last message, right after its text.
            template: a template to use instead of the model's; only from trusted callers.
            kwargs: further variables for the template (`enable_thinking`, …).
            max_cpu_s: of this thread.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages, or it needs
                too much memory; `SlowTemplateError`: or takes too long.
        """
        # As in `transformers`: a mark after the last text shows where to cut, and its trailing
        # space shows whether the template trims. It is random, so that no text can contain it.
        mark = f"CONTINUED{secrets.token_hex(8)} "
        variables = {
            **self.special_tokens,
            "tools": None,  # templates test for none, and undefined is not none
            "documents": None,
            **(kwargs or {}),
            "messages": _marked(messages, mark) if continue_final_message else messages,
            "add_generation_prompt": add_generation_prompt,
        }
        chosen = self._default if template is None else self._compiled(template)
        if chosen is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            with self._environment.spend(max_cpu_s):
                text = chosen.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
            ) from error
        except Exception as error:  # a template can raise anything
            name, param = ("the chat template", "messages")
            if template is not None:
                name = param = "chat_template"
            if isinstance(error, TimeoutError):
                text = f"{name} takes more than {max_cpu_s:g} s to render"
                raise SlowTemplateError(text, param=param) from error
            raise InvalidRequestError(f"{name} fails: {_reason(error)}", param=param) from error
        return _cut(text, mark, _text_of(messages[-1])) if continue_final_message else text

    def _compiled(self, template: str) -> jinja2.Template:
        """A caller's template. Raises: InvalidRequestError."""
        try:
            return self._environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            reason = f"is not valid Jinja: {error}"
        except Exception as error:
            reason = f"cannot be compiled: {_reason(error)}"
        raise InvalidRequestError(f"chat_template {reason}", param="chat_template")


def located(file: Path | None) -> str:
    """How a message about a file begins."""
    return "" if file is None else f"{file}: "


def _reason(error: Exception) -> str:
    """Why a template does not work, in words for its author."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or recurses without end"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = str(error)[:_MAX_REASON_CHARS]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _is_unicode(text: str) -> bool:
    """Whether it has no surrogate, which JSON can hold and UTF-8 cannot."""
    return text == text.encode(errors="ignore").decode()


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + mark}]
    *parts, end = content or [{"type": "text", "text": ""}]
    return [
        *messages[:-1],
        {**last, "content": [*parts, {**end, "text": end.get("text", "") + mark}]},
    ]


def _text_of(message: Mapping[str, Any]) -> str:
    """The end of a message's text."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content[-1:])


def _cut(text: str, mark: str, final_message: str) -> str:
    """The rendering up to the mark. Raises: InvalidRequestError."""
    before, found, after = text.rpartition(mark.strip())
    if not found or final_message.strip() not in before:
        raise InvalidRequestError(
            "the chat template changes the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _named(templates: list[Any], file: Path) -> dict[str, Any]:
    """Several templates by name."""
    for each in templates:
        if not isinstance(each, dict) or not all(
            isinstance(each.get(name), str) for name in ("name", "template")
        ):
            raise ModelLoadError(
                f"{file}: chat_template: each of a list must be an object with `name` and "
                "`template`, both strings"
            )
    return {each["name"]: each["template"] for each in templates}


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):  # older files spell a token as an AddedToken object
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ModelLoadError(f"{file}: {name}: expected a string")
        tokens[name] = value
    return tokens


def _environment() -> BudgetedEnvironment:
    environment = BudgetedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving only renders it."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own signature)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt. The
    # parameters are those of `transformers`.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if _WIDE_PATTERN.search(pattern):
        raise MemoryError
    return datetime.datetime.now().astimezone().strftime(pattern)
