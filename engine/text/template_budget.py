"""Jinja's sandbox with bounds on what one rendering of a chat template uses: CPU time and memory.

The sandbox of Jinja restricts what a template can reach, not what it computes. Here each round of a
loop and each call looks at the clock, and what multiplies sizes is checked before it is computed;
so Jinja does not compute it as a constant when it compiles either. That bounds mistakes. A template
that nobody trusts is rendered in a process of its own too (`template_sandbox`), which takes a
millisecond more.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_CHARS = 64 << 20  # of a text that an operator, a filter or a method makes
_MAX_ITEMS = 1 << 20  # of a list
_MAX_BITS = 1 << 14  # of an integer
_MAX_COUNT = 1 << 20  # widths, repetitions and other numbers given to filters and methods
_WIDTH = re.compile(r"%[-+ #0-9.]*\d{6}|\{[^{}]*\d{6}")  # in a format
_MAKING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "round", "slice",
                   "tojson", "wordwrap")  # fmt: skip


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
