"""A model's chat template: renders messages as the prompt text that the model was trained on.

Sandboxed Jinja, with the helpers that Hugging Face templates rely on (`raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `generation` blocks, loop controls), and with bounds
on what one rendering uses: CPU time and memory.

The sandbox of Jinja restricts what a template can reach, not what it computes. Here each round of a
loop and each call looks at the clock, and what multiplies sizes is checked before it is computed;
so Jinja does not compute it as a constant when it compiles either. That bounds mistakes. A template
that nobody trusts is rendered in a process of its own too (`template_sandbox`), which takes a
millisecond more.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.model_files.json_file import (
    ADDITIONAL_TEMPLATES,
    is_present,
    read_json,
    read_text,
)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLE = ({"role": "user", "content": "Hello!"},)
_SAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": ""}},
            "required": ["x"],
        },
    },
}
# What templates besides the default one are for: Command R's `rag` crashes without documents.
_SAMPLE_USES = {"tools": [_SAMPLE_TOOL], "documents": [{"title": "Title", "text": "Text"}]}
_MAX_REASON_CHARS = 200
# Names of an assistant's thoughts, the usual one first.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_DEFAULT = "default"
MAX_CPU_S = 2.0  # for one rendering; ordinary ones take milliseconds
_WIDE_PATTERN = re.compile(r"%\D*\d{4}")
_MUTATING = ("append", "pop")  # methods of lists
_MAX_CHARS = 64 << 20  # of a text that an operator, a filter or a method makes
_MAX_ITEMS = 1 << 20  # of a list
_MAX_BITS = 1 << 14  # of an integer
_MAX_COUNT = 1 << 20  # widths, repetitions and other numbers given to filters and methods
_WIDTH = re.compile(r"%[-+ #0-9.]*\d{6}|\{[^{}]*\d{6}")  # in a format
_MAKING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "round", "slice",
                   "tojson", "wordwrap")  # fmt: skip


class TemplateFiles(NamedTuple):
    """The chat templates of a model directory, not compiled.

    Attributes:
        source: of the one that is used by default.
        special_tokens: by their names in templates (`bos_token`, …).
        file: has the source; for messages.
        named: sources of all, by name, where there are several.
    """

    source: str | None
    special_tokens: Mapping[str, str]
    file: Path | None = None
    named: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def read(cls, path: Path) -> TemplateFiles:
        """Read `chat_template.jinja` and `additional_chat_templates/`, else `chat_template` in
        `tokenizer_config.json`, else in `chat_template.json` (of models that take images).

        Raises:
            ModelLoadError: a file cannot be read, or a field has the wrong type.
        """
        file = path / "tokenizer_config.json"
        config = read_json(file) if is_present(file) else {}
        special_tokens = _special_tokens(config, file)
        source, named = config.get("chat_template"), dict[str, str]()
        if source is None and is_present(path / "chat_template.json"):
            file = path / "chat_template.json"
            source = read_json(file).get("chat_template")
        if isinstance(source, list):
            named = _named(source, file)
            source = named.get(_DEFAULT)
        if source is not None and not isinstance(source, str):
            raise ModelLoadError(f"{file}: chat_template: expected a string or a list of templates")
        texts = [*special_tokens.items(), *(("chat_template", each) for each in named.values())]
        for name, text in [*texts, ("chat_template", source or "")]:
            if not _is_unicode(text):
                raise ModelLoadError(f"{file}: {name}: expected valid Unicode, not half a pair")
        if is_present(path / "chat_template.jinja"):
            file = path / "chat_template.jinja"
            source = read_text(file)
            named = {each.stem: read_text(each) for each in sorted(path.glob(ADDITIONAL_TEMPLATES))}
            named |= {_DEFAULT: source} if named else {}
        return cls(source, special_tokens, file, named)


class SlowTemplateError(InvalidRequestError):
    """Rendering took more than its CPU time."""


class ChatTemplate:
    """Renders conversations. For a model without a template, `render` raises.

    Args:
        file: has the source; for messages.
        named: where there are several; the one named `tool_use` is for conversations with tools.

    Raises:
        ModelLoadError: the template cannot be compiled.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        file: Path | None = None,
        named: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self.named = named
        self.special_tokens = dict(special_tokens)
        self._file = file
        self._environment = _environment()
        try:
            self._own = {
                text: self._environment.from_string(text)
                for text in {*named.values(), *(() if source is None else (source,))}
            }
        except Exception as error:  # RecursionError, SyntaxError, … besides Jinja's own
            raise self._broken(error) from error

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate:
        """The template of a model; raises the errors of `TemplateFiles.read`."""
        return cls(*TemplateFiles.read(path))

    def check(self) -> None:
        """Render a sample message; all but the default template with tools and documents, too. A
        template may refuse it, but must not crash.

        Raises:
            ModelLoadError: it crashes.
        """
        for source in self._own:
            self._check(source)

    def _check(self, source: str) -> None:
        try:
            uses = None if source == self.source else _SAMPLE_USES
            text = self.render(_SAMPLE, template=source, kwargs=uses)
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
        return ModelLoadError(f"{located(self._file)}the chat template {what}")

    def source_for(self, template: str | None, *, has_tools: bool) -> str | None:
        """The source that `render` uses.

        Args:
            template: asked for: the name of one of the model's, or a source.
            has_tools: tools are offered.
        """
        if template is not None:
            return self.named.get(template, template)
        return self.named.get("tool_use", self.source) if has_tools else self.source

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
            template: see `source_for`; a source only from trusted callers.
            kwargs: further variables for the template (`enable_thinking`, …).
            max_cpu_s: of this thread.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages, or it needs
                too much memory; `SlowTemplateError`: or takes too long.
        """
        # As in `transformers`: a mark after the last text shows where to cut, and its trailing
        # space shows whether the template trims. It is random, so that no text can contain it.
        mark = f"CONTINUED{secrets.token_hex(8)} "
        messages = [_as_templates_expect(message) for message in messages]
        variables = {
            **self.special_tokens,
            "tools": None,  # templates test for none, and undefined is not none
            "documents": None,
            **(kwargs or {}),
            "messages": _marked(messages, mark) if continue_final_message else messages,
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.source_for(template, has_tools=bool(variables["tools"]))
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        if any(f".{name}(" in source for name in _MUTATING):
            variables = copy.deepcopy(variables)
        chosen = self._own.get(source) or self._compiled(source)
        try:
            with self._environment.spend(max_cpu_s):
                text = chosen.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {_reason(error)}", param="messages"
            ) from error
        except Exception as error:  # a template can raise anything
            name, param = ("the chat template", "messages")
            if source not in self._own:
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


def _as_templates_expect(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as `transformers` gives it to a template, which is what templates are written for:
    without fields that are null, many would write "None"; thoughts by both of their names."""
    if any(value is None for value in message.values()):
        message = {name: value for name, value in message.items() if value is not None}
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _marked(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    last = messages[-1]
    content = last.get("content", "")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + mark}]
    *parts, end = content or [{"type": "text", "text": ""}]
    return [
        *messages[:-1],
        {**last, "content": [*parts, {**end, "text": end.get("text", "") + mark}]},
    ]


def _text_of(message: Mapping[str, Any]) -> str:
    """The end of a message's text."""
    content = message.get("content", "")
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


def _named(templates: list[Any], file: Path) -> dict[str, str]:
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


class _Checks(Extension):
    """What templates call besides what they say."""

    def tick(self) -> None:
        """Called in each round of a loop, since calls look at the clock."""

    def concatenate(self, *values: object) -> str:
        """Stands for `~`, which cannot be intercepted."""
        texts = [str(value) for value in values]
        _check_size("", sum(map(len, texts)))
        return "".join(texts)


class _AddChecks(NodeTransformer):
    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (Jinja's name)
        self.generic_visit(node)
        tick = self._extension.call_method("tick", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._extension.call_method("concatenate", node.nodes, lineno=node.lineno)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Raises MemoryError where a template makes something too large, and TimeoutError after the
    time of `spend`. Threads may share it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = threading.local()
        self.add_extension(_Checks)
        del self.globals["lipsum"]
        for name in _MAKING_FILTERS:
            self.filters[name] = _checked(self.filters[name], name)

    @contextmanager
    def spend(self, max_cpu_s: float) -> Iterator[None]:
        """Templates that this thread renders in this context take at most `max_cpu_s` of its CPU
        time."""
        self._local.cpu_end_s = time.thread_time() + max_cpu_s
        # No CPU time is spent sooner, and the monotonic clock is quicker to read.
        self._local.end_s = time.monotonic() + max_cpu_s
        try:
            yield
        finally:
            self._local.end_s = math.inf

    def call(
        __self,  # noqa: N805  (as Jinja's)
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        local = __self._local
        is_late = time.monotonic() > getattr(local, "end_s", math.inf)
        if is_late and time.thread_time() > local.cpu_end_s:
            raise TimeoutError
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_making(method.__name__, text, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Kimi K2's templates append to lists of their own; the caller's are copied (`render`)."""
        if isinstance(obj, list) and attr in _MUTATING:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _AddChecks(self.extensions[_Checks.identifier]).visit(template)
        return template


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises: MemoryError."""
    if isinstance(left, int) and isinstance(right, int):
        sizes = left.bit_length(), right.bit_length()
        if (operator == "*" and sum(sizes) > _MAX_BITS) or (
            operator == "**" and right > 0 and sizes[0] * right > _MAX_BITS
        ):
            raise MemoryError
    elif operator == "+" and isinstance(left, str | list | tuple):
        _check_size(left, len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
    elif operator == "*":
        sequence, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            _check_size(sequence, len(sequence) * count)
    elif operator == "%" and isinstance(left, str):
        _check_making("format", left, right if isinstance(right, tuple) else (right,), {})


def _check_size(sequence: str | list[Any] | tuple[Any, ...], size: int) -> None:
    if size > (_MAX_CHARS if isinstance(sequence, str) else _MAX_ITEMS):
        raise MemoryError


def _check_making(name: str, text: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Check a method of a text, or a filter, that makes a longer one. Raises: MemoryError."""
    given = (*args, *kwargs.values())
    if any(isinstance(each, int) and each > _MAX_COUNT for each in given):
        raise MemoryError
    num_chars = 0
    if name == "format" and _WIDTH.search(text):
        raise MemoryError
    if name == "join" and given and isinstance(given[0], list | tuple):
        num_chars = sum(len(each) + len(text) for each in given[0] if isinstance(each, str))
    elif name == "replace" and len(given) > 1 and all(isinstance(e, str) for e in given[:2]):
        num_chars = len(text) * len(given[1])
        if num_chars > _MAX_CHARS:
            num_chars = len(text) + text.count(given[0]) * len(given[1])
    elif name == "indent" and given:
        width = len(given[0]) if isinstance(given[0], str) else int(given[0])
        num_chars = len(text) + (text.count("\n") + 1) * width
    _check_size(text, num_chars)


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The filter `name`, checked before it computes."""
    num_own = 1 if hasattr(function, "jinja_pass_arg") else 0  # such as the context

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        own, (value, *given) = args[:num_own], args[num_own:]
        if name == "join":  # the separator is the text whose method it would be
            value = list(value)
            separator = given[0] if given else kwargs.get("d", "")
            _check_making(name, str(separator), (value,), {})
        elif isinstance(value, str):
            _check_making(name, value, given, kwargs)
        else:
            _check_making("", "", given, kwargs)
        return function(*own, value, *given, **kwargs)

    return checked
