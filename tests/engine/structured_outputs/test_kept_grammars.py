"""Compiled grammars are kept within a bound of memory, not of text."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from penstock.engine.request import StructuredOutputs
from penstock.engine.sampling.grammars import GrammarMasks, SequenceGrammar
from penstock.engine.structured_outputs import kept_grammars
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.structured_outputs.kept_grammars import KeptGrammar, KeptGrammars, heap_bytes

torch = pytest.importorskip("torch")
MB = 1 << 20


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs("regex", text)


class Heap:
    """A heap in which one's matchers are sizes."""

    def __init__(self) -> None:
        self.num_bytes = 5 * MB

    def __call__(self) -> int:
        return self.num_bytes


class Matcher:
    def __init__(self, heap: Heap, size: int) -> None:
        self.heap, self.size = heap, 0
        self.grow(size)

    def grow(self, size: int) -> None:
        self.size += size
        self.heap.num_bytes += size

    def __del__(self) -> None:
        self.heap.num_bytes -= self.size


def keep(
    grammars: KeptGrammars, heap: Heap, text: str, size: int = MB, *, tenant: str = ""
) -> KeptGrammar:
    made: Any = grammars.made(regex(text), lambda: Matcher(heap, size), tenant=tenant)  # type: ignore[arg-type,return-value]
    return made  # type: ignore[no-any-return]


def kept(grammars: KeptGrammars, texts: str) -> str:
    return "".join(text for text in texts if regex(text) in grammars)


def test_the_least_recently_used_is_dropped_first() -> None:
    heap = Heap()
    grammars = KeptGrammars(3 * MB + 1000, heap=heap)
    for text in "abc":
        keep(grammars, heap, text)
    assert grammars.get(regex("a")) is not None
    keep(grammars, heap, "d")
    assert kept(grammars, "abcd") == "acd"
    keep(grammars, heap, "e", 9 * MB)  # larger than all; it is wanted now
    assert kept(grammars, "abcde") == "e"
    keep(grammars, heap, "f")
    assert kept(grammars, "abcdef") == "f"
    assert grammars.num_bytes == pytest.approx(MB, rel=0.01)


def test_what_outputs_make_of_a_grammar_counts() -> None:
    heap = Heap()
    grammars = KeptGrammars(10 * MB, heap=heap)
    used, unused = keep(grammars, heap, "a"), keep(grammars, heap, "b")
    for _ in range(4):
        used.num_masks += 10
        used.matcher.grow(2 * MB)  # type: ignore[attr-defined]
        keep(grammars, heap, "c")
    assert used.num_bytes == pytest.approx(9 * MB, rel=0.01)
    assert unused.num_bytes == pytest.approx(MB, rel=0.01)
    assert kept(grammars, "abc") == "bc"
    assert grammars.num_bytes == pytest.approx(2 * MB, rel=0.01)


def test_one_that_was_dropped_while_in_use_is_not_taken_for_what_others_freed() -> None:
    heap = Heap()
    grammars = KeptGrammars(3 * MB, heap=heap)
    in_use = keep(grammars, heap, "a")
    used = keep(grammars, heap, "b")
    keep(grammars, heap, "c", 2 * MB)
    assert kept(grammars, "abc") == "c"
    used = keep(grammars, heap, "b", MB // 2)
    used.num_masks += 1
    del in_use  # its sequence has ended
    gc.collect()
    keep(grammars, heap, "d", MB // 4)
    assert used.num_bytes == pytest.approx(MB // 2, rel=0.01)


def test_a_tenant_with_many_drops_its_own() -> None:
    heap = Heap()
    grammars = KeptGrammars(6 * MB + 1000, heap=heap)
    for text in "ab":
        keep(grammars, heap, text, tenant="small")
    for text in "cdefgh":
        keep(grammars, heap, text, tenant="flood")
    assert kept(grammars, "abcdefgh") == "abefgh"
    keep(grammars, heap, "i", 2 * MB, tenant="third")
    assert kept(grammars, "abcdefghi") == "abghi"


@pytest.mark.skipif(heap_bytes() == 0, reason="the heap does not say how large it is")
def test_memory_of_used_grammars_is_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.5 MB when it is compiled, and several after a hundred tokens."""
    compiler.kept = KeptGrammars(16 * MB)
    compiler.compile(regex("a"))
    memory = GrammarMasks(1, 1024, torch.device("cpu"))
    began = heap_bytes()
    for number in range(12):
        grammar = regex(rf"(\w{{1,40}}[ ,.]){{1,240}}{number}")
        compiler.compile(grammar)
        token_ids = [7]
        sequence = SequenceGrammar(
            compiler, grammar, token_ids, 1,
            min_tokens=0, end_token_ids=(4,), never_token_ids=(), is_beam=False,
        )  # fmt: skip
        for at in range(120):
            assert memory.write(0, sequence) is None
            allowed = memory.on_device[0].numpy().view("uint8")
            word = int(allowed.nonzero()[0][at % len(allowed.nonzero()[0])])
            token_ids.append(8 * word + int(allowed[word]).bit_length() - 1)
        del sequence
    assert heap_bytes() - began < 2 * 16 * MB
    assert 2 <= compiler.num_kept < 12
    assert compiler.kept.num_bytes <= 16 * MB


def test_what_was_freed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = list[int]()
    monkeypatch.setattr(kept_grammars, "_malloc_trim", trimmed.append)
    heap = Heap()
    grammars = KeptGrammars(20 * MB, heap=heap)
    for number in range(4):
        keep(grammars, heap, str(number), 9 * MB)
    with grammars._trimming:  # until the thread has ended
        assert trimmed
