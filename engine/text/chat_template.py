"""A model's chat template: renders messages as the prompt text that the model was trained on.

Sandboxed Jinja, with the helpers that Hugging Face templates rely on (`raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `generation` blocks, loop controls).
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.json_file import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLE = ({"role": "user", "content": "Hello!"},)
_MAX_REASON_CHARS = 200


class TemplateFiles(NamedTuple):
    """The chat template of a model directory, not compiled.

    Attributes:
        special_tokens: by their names in templates (`bos_token`, …).
    """

    source: str | None
    special_tokens: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> TemplateFiles:
        """Read `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        file = path / "tokenizer_config.json"
        config = read_json(file) if file.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates: use `default`
            named = {item["name"]: item["template"] for item in source}
            source = named.get("default")
        if source is not None and not isinstance(source, str):
            raise ModelLoadError(f"{file}: chat_template must be a string or a list of templates")
        if (path / "chat_template.jinja").is_file():
            source = (path / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(source, _special_tokens(config))


class ChatTemplate:
    """Renders conversations. For a model without a template, `render` raises.

    Raises:
        ModelLoadError: the template cannot be compiled.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)
        self._environment = _environment()
        try:
            self._default = None if source is None else self._environment.from_string(source)
        except Exception as error:  # RecursionError, SyntaxError, … besides Jinja's own
            raise ModelLoadError(_broken(error)) from error

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
            self.render(_SAMPLE)
        except InvalidRequestError as error:
            cause = error.__cause__
            if isinstance(cause, Exception) and not isinstance(cause, jinja2.TemplateError):
                raise ModelLoadError(_broken(cause)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            continue_final_message: end inside the last message, right after its text.
            template: a template to use instead of the model's; only from trusted callers.
            kwargs: further variables for the template (`enable_thinking`, …).

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
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
            text = chosen.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
            ) from error
        except Exception as error:  # a template can raise anything
            name, param = ("the chat template", "messages")
            if template is not None:
                name = param = "chat_template"
            raise InvalidRequestError(f"{name} fails: {_reason(error)}", param=param) from error
        return _cut(text, mark, messages[-1]["content"]) if continue_final_message else text

    def _compiled(self, template: str) -> jinja2.Template:
        """A caller's template. Raises: InvalidRequestError."""
        try:
            return self._environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            reason = f"is not valid Jinja: {error}"
        except Exception as error:
            reason = f"cannot be compiled: {_reason(error)}"
        raise InvalidRequestError(f"chat_template {reason}", param="chat_template")


def _broken(error: Exception) -> str:
    return f"the model's chat template is broken: {_reason(error)}"


def _reason(error: Exception) -> str:
    """Why a template does not work, in words for its author."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or recurses without end"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = str(error)[:_MAX_REASON_CHARS]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + mark}]


def _cut(text: str, mark: str, final_message: str) -> str:
    """The rendering up to the mark. Raises: InvalidRequestError."""
    before, found, after = text.rpartition(mark.strip())
    if not found or final_message.strip() not in before:
        raise InvalidRequestError(
            "the chat template changes the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, Mapping):  # older files spell a token as an AddedToken object
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
    return datetime.datetime.now().astimezone().strftime(pattern)
