"""A command line's parser that reports a mistake in one line: what is wrong, the nearest option or
command, and where help is; and one for commands with settings."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.engine.settings.declaration import Setting, grouped

_NUMBERS = {"int": "a whole number", "float": "a number"}
_MESSAGES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # What argparse says, as against what it should say.
    (
        re.compile(r"argument BENCH: invalid choice: '([^']*)' \(choose from (.*)\)"),
        lambda said: (
            f"unknown command {said[1]!r}{nearest(said[1], re.findall(r'[a-z]+', said[2]))}"
        ),
    ),
    (
        re.compile(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)"),
        lambda said: f"{said[1]} must be one of {said[3].replace(chr(39), '')}, not {said[2]}",
    ),
    (
        re.compile(r"argument (\S+): invalid (\w+) value: (.*)"),
        lambda said: (
            f"{said[1]} must be {_NUMBERS[said[2]]}, not {said[3]}"
            if said[2] in _NUMBERS
            else f"{said[1]} has the invalid value {said[3]}"
        ),
    ),
    (
        re.compile(r"argument (\S+): ignored explicit argument (.*)"),
        lambda said: f"{said[1]} takes no value, but got {said[2]}",
    ),
    (re.compile(r"argument (\S+): must be (.*)"), lambda said: f"{said[1]} must be {said[2]}"),
    (re.compile(r"argument (.*)"), lambda said: said[1]),
)
_ALIASES = re.compile(r"(argument --[\w-]+)/[^: ]+")  # which argparse adds
_MAX_CHARS = 1000


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line. Options are written out, with hyphens or, as vLLM also has
    them, with underscores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.object_options: set[str] = set()  # whose value is a JSON object
        self.options_elsewhere: frozenset[str] = frozenset()  # of vLLM, and not here
        # Otherwise vLLM's `--model X` would be `--model-impl X`.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(map(_hyphenated, sys.argv[1:] if args is None else args))
        parsed, unknown = super().parse_known_args(self._joined(given), namespace)
        options = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if options:
            is_elsewhere = options[0].partition(".")[0] in self.options_elsewhere
            why = " (vLLM's; this server has nothing like it)"
            hint = why if is_elsewhere else nearest(options[0], self._names())
            self.error(f"unknown option {options[0]}{hint}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed, unknown

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """With `--option.key.other value`, as vLLM also writes JSON objects, made one object."""
        rest, objects = list[str](), dict[str, dict[str, Any]]()
        left = iter(arguments)
        for argument in left:
            name, equals, value = argument.partition("=")
            option, *keys = name.split(".")
            is_part = keys and option in self.object_options
            if not is_part:
                rest.append(argument)
                continue
            where = objects.setdefault(option, {})
            for key in keys[:-1]:
                where = where.setdefault(key, {})
                if not isinstance(where, dict):
                    self.error(f"{option}.{key} is {where!r}, so {name} has no place")
            where[keys[-1]] = _value(value if equals else next(left, ""))
        for option, values in objects.items():
            rest += [option, json.dumps(values)]
        return rest

    def error(self, message: str) -> NoReturn:
        text = _ALIASES.sub(r"\1", " ".join(message.split()))
        for pattern, say in _MESSAGES:
            if said := pattern.fullmatch(text):
                text = say(said)
                break
        if len(text) > _MAX_CHARS:
            text = f"{text[:_MAX_CHARS]} …"
        self.exit(2, f"{self.prog}: error: {text}; see {self.prog} --help\n")

    def _names(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


class SettingsParser(OneLineParser):
    """A parser of settings. `--help` shows those of daily use, `--help=all` all of them, and
    `--help=WORD` those of a group, or with the word in their names.

    Values are as `settings` declare them; what was not given is not in the result.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {"argument_default": argparse.SUPPRESS, "formatter_class": _Formatter}
        super().__init__(*args, **{**own, **kwargs}, add_help=False)
        self._rare: set[str] = set()
        self._names_of: dict[str, tuple[str, ...]] = {}  # all options that are shown as one
        self._about = ""  # what `--help` was asked for
        self.add_argument("-h", "--help", nargs="?", const="", action=_Help, metavar="all",
                          help="show the options of daily use; =all: all of them; =WORD: those of "
                          "a group, or with this word in their names")  # fmt: skip

    def add_settings(self, settings: Sequence[Setting], *, model: str) -> None:
        """Add settings by their groups, the model as an argument, too, and a file of them.

        Args:
            model: the help for the argument.
        """
        self.add_argument("model", nargs="?", metavar="MODEL", action=_OneModel, help=model)
        self.add_argument("--config", type=Path, metavar="FILE",
                          help="a TOML or YAML file of options")  # fmt: skip
        for title, them in grouped(settings).items():
            group = self.add_argument_group(title)
            for each in them:
                add_setting(group, each)
        self._rare |= {each.key for each in settings if not each.is_daily}
        self._names_of |= {each.key: each.options for each in settings}
        with_twins = (twin for each in settings for twin in (each, *each.twins))
        self.object_options |= {each.flag for each in with_twins if each.kind.is_object}

    def print_help_about(self, word: str) -> None:
        """Print the help that `--help=WORD` asks for."""
        self._about = word.strip("-").lower()
        if not self._chosen():
            self.error(f"--help={word}: no option or group has this name")
        self.print_help()

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in self._chosen():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if self._rare and not self._about:
            formatter.add_text(f"{len(self._rare)} options of rarer use: --help=all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _chosen(self) -> list[tuple[str, list[argparse.Action]]]:
        """Titles of groups, and those of their actions that are shown."""
        found = []
        for group in self._action_groups:
            title = group.title or ""
            shown = [each for each in group._group_actions if self._is_shown(each, title.lower())]
            if shown:
                found.append((title, shown))
        return found

    def _is_shown(self, action: argparse.Action, title: str) -> bool:
        if not self._about:
            return action.dest not in self._rare
        names = self._names_of.get(action.dest, action.option_strings)
        is_named = any(self._about in name for name in names)
        is_hidden = action.help == argparse.SUPPRESS
        return not is_hidden and (is_named or self._about in ("all", title))


class _Formatter(argparse.HelpFormatter):
    """Shows a value once, after all names of its option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: Any, __: object = None
    ) -> None:
        assert isinstance(parser, SettingsParser)
        parser.print_help_about(values)
        parser.exit()


class _OneModel(argparse.Action):
    """Takes the model, of which there is one, from `MODEL` and `--model`."""

    def __call__(
        self,
        _: argparse.ArgumentParser,
        found: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        before = getattr(found, self.dest, values)
        if before != values:
            first, other = (before, values) if option else (values, before)
            raise argparse.ArgumentError(None, f"MODEL is {first!r}, but --model is {other!r}")
        setattr(found, self.dest, values)


class _Extend(argparse.Action):
    """Adds values to a list. A value that is a list itself, as in JSON, stands for its items."""

    def __call__(
        self, _: argparse.ArgumentParser, found: argparse.Namespace, values: Any, __: object = None
    ) -> None:
        items = [each if isinstance(each, list) else [each] for each in values]
        before = getattr(found, self.dest, [])
        setattr(found, self.dest, [*before, *itertools.chain.from_iterable(items)])


def add_setting(
    group: argparse._ArgumentGroup | argparse.ArgumentParser,
    each: Setting,
    *,
    is_hidden: bool = False,
) -> None:
    """Add a setting's option, its aliases and, without help, its twins."""
    twins = "".join(f"; {flag}: {meaning}" for flag, meaning in each.meanings.items())
    shown = each.shown_default
    text = f"{each.help}{twins}{f' (default: {shown})' * bool(shown)}".replace("%", "%%")
    names = (each.flag, *each.aliases)
    more: dict[str, Any] = {"dest": each.key, "help": argparse.SUPPRESS if is_hidden else text}
    if each.is_switch:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **more)
    elif each.is_list:
        more |= {"action": _Extend, "nargs": "+"}
    elif each.key == "model":
        more |= {"action": _OneModel}
    if not each.is_switch:
        group.add_argument(*names, type=_reader(each), metavar=each.kind.metavar, **more)
    for twin in each.twins:
        add_setting(group, twin, is_hidden=True)


def _reader(each: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return each.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(each.fault(text)) from error

    return read


def _hyphenated(argument: str) -> str:
    """`--max_model_len=x_y` → `--max-model-len=x_y`"""
    name, equals, value = argument.partition("=")
    name, dot, keys = name.partition(".")
    if not name.startswith("--"):
        return argument
    return f"{name.replace('_', '-')}{dot}{keys}{equals}{value}"


def _value(text: str) -> Any:
    """The value of a JSON text; if it is none, the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def nearest(name: str, names: Iterable[str]) -> str:
    """A question about the most similar name, if there is one."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
