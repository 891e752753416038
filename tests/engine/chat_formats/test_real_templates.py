"""Loops of calls in the templates that llama.cpp keeps, and in formats that no model has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.text.tokenizer import Tokenizer
from tests.support.real_models import published_templates
from tests.support.template_loop import Loop, faults_of
from tests.support.tiers import tiered

DIRECTORY = DEMO_MODEL_PATH
TABLE = Path(__file__).parents[3] / "engine" / "chat_formats" / "TEMPLATES.md"
# What is wrong with a template itself, or with how it is read.
WRONG = {
    "LFM2.5-8B-A1B": "it writes texts with quotes as no Python does: nobody can tell their end",
    "MiniMax-M3": "lists and objects within arguments are tags within tags, which are not read",
    "NVIDIA-Nemotron-Nano-v2": "it writes earlier answers into a thought that never ends",
    "fireworks-ai-llama-3-firefunction-v2": "it wants variables of its own in every conversation",
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DIRECTORY, vocab_size=1024, eos_token_ids=(4,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DIRECTORY)


def row(name: str, loop: Loop) -> str:
    """A template's row of the table."""
    about, _, _ = loop.formats.described.partition("; ")
    about = about.replace("|", "\\|").replace("`", "'")
    again = f"{loop.facts.rewritten:.0%}".replace("%", " %")
    return f"| {name} | `{about}` | {again} | {loop.facts.late_system} | {WRONG.get(name, 'yes')} |"


@pytest.mark.external
def test_published_templates(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """What is written is read back as the same items, and the grammar accepts it."""
    rows, wrong = [], {}
    for name, source in sorted(published_templates().items()):
        loop, faults = faults_of(source, compiler, tokenizer)
        rows.append(row(name, loop))
        if faults:
            wrong[name] = faults[0]
    assert len(rows) >= 70
    assert wrong.keys() == WRONG.keys(), {name: wrong[name] for name in wrong.keys() - WRONG.keys()}
    assert len(rows) - len(wrong) >= 66
    table = TABLE.read_text("utf-8")
    missing = [each for each in rows if each not in table]
    assert not missing, "\n".join(rows)


# Pieces of formats: around all calls, around one, between them.
_AROUND = (("", ""), ("<calls>", "</calls>"), ("[[CALLS]]\\n", "\\n[[END]]"))
_JSON = (
    ('<do>{"fn": "', '", "with": ', "}</do>"),
    ("<|fn|>", "<|args|>", "<|/fn|>"),
    ("@call ", " <= ", " ;;"),
    ('<x n="', '">', "</x>"),
)
_TAGS = (
    ("<do>", "", "</do>", "<k>", "</k><v>", "</v>"),
    ('<run f="', '">', "</run>", '<arg n="', '">', "</arg>"),
)
_LITERALS = (("<py>", "(", ")</py>", "=", ", "),)


def _invented() -> Iterator[tuple[str, str]]:
    """Name and source of templates in formats that no model has."""
    for (first, last), between in itertools.product(_AROUND, ("", "\\n")):
        for begin, middle, end in _JSON:
            arguments = "{{ c.function.arguments | tojson }}"
            yield _template(first, last, between, begin, middle, end, arguments)
        for begin, middle, end, key, mid, value_end in _TAGS:
            value = "{{ v if v is string else v | tojson }}"
            arguments = (
                "{% for k, v in c.function.arguments.items() %}"
                f"{key}{{{{ k }}}}{mid}{value}{value_end}{{% endfor %}}"
            )
            yield _template(first, last, between, begin, middle, end, arguments)
        for begin, middle, end, sign, comma in _LITERALS:
            arguments = (
                "{% for k, v in c.function.arguments.items() %}{{ k }}"
                f"{sign}{{{{ v | tojson }}}}{{{{ '' if loop.last else '{comma}' }}}}{{% endfor %}}"
            )
            yield _template(first, last, between, begin, middle, end, arguments)


def _template(
    first: str, last: str, between: str, begin: str, middle: str, end: str, arguments: str
) -> tuple[str, str]:
    name = f"{first}{begin}f{middle}{end}{between}{last}"
    calls = (
        f"{first}{{% for c in m.tool_calls %}}{begin}{{{{ c.function.name }}}}{middle}{arguments}"
        f"{end}{{{{ '' if loop.last else '{between}' }}}}{{% endfor %}}{last}"
    ).replace("\\n", "\n")
    return name, (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<mull>{{ m.reasoning_content }}</mull>{% endif %}"
        "{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


INVENTED = dict(_invented())


@pytest.mark.parametrize("name", tiered(INVENTED, list(INVENTED)[::5]))
def test_formats_of_no_model(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    loop, faults = faults_of(INVENTED[name], compiler, tokenizer)
    assert loop.facts.calls, "they are found"
    assert not faults
