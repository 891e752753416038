"""Compiled grammars are kept within a bound of memory, not of text."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from penstock.engine.preparation.loader import Loader
from penstock.engine.preparation.resources import Bounds, GrammarResources
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


def keep(grammars: KeptGrammars, heap: Heap, text: str, size: int = MB) -> KeptGrammar:
    made: Any = grammars.made(regex(text), lambda: Matcher(heap, size))  # type: ignore[arg-type,return-value]
    return made  # type: ignore[no-any-return]


def test_what_outputs_make_of_a_grammar_counts() -> None:
    heap = Heap()
    grammars = KeptGrammars(heap=heap)
    used, unused = keep(grammars, heap, "a"), keep(grammars, heap, "b")
    for _ in range(4):
        used.num_masks += 10
        used.matcher.grow(2 * MB)  # type: ignore[attr-defined]
        keep(grammars, heap, "c")
    assert used.num_bytes == pytest.approx(9 * MB, rel=0.01)
    assert unused.num_bytes == pytest.approx(MB, rel=0.01)
    assert grammars.size(regex("a")) == used.num_bytes
    assert grammars.num_bytes == pytest.approx(11 * MB, rel=0.01)
    grammars.drop(regex("a"))
    assert regex("a") not in grammars
    assert grammars.num_bytes == pytest.approx(2 * MB, rel=0.01)


def test_one_that_was_dropped_while_in_use_is_not_taken_for_what_others_freed() -> None:
    heap = Heap()
    grammars = KeptGrammars(heap=heap)
    in_use = keep(grammars, heap, "a")
    used = keep(grammars, heap, "b")
    keep(grammars, heap, "c", 2 * MB)
    for text in "ab":
        grammars.drop(regex(text))
    assert len(grammars) == 1
    used = keep(grammars, heap, "b", MB // 2)
    used.num_masks += 1
    del in_use  # its sequence has ended
    gc.collect()
    keep(grammars, heap, "d", MB // 4)
    assert used.num_bytes == pytest.approx(MB // 2, rel=0.01)


@pytest.mark.skipif(heap_bytes() == 0, reason="the heap does not say how large it is")
def test_memory_of_used_grammars_is_bounded(compiler: GrammarCompiler) -> None:
    """Each takes 0.5 MB when it is compiled, and several after a hundred tokens."""
    kind = GrammarResources(compiler)
    kind.bounds = Bounds(16 * MB, 16 * MB)
    loader = Loader(kind, lambda: None)
    compiler.compile(regex("a"))
    memory = GrammarMasks(1, 1024, torch.device("cpu"))
    began = heap_bytes()
    for number in range(12):
        grammar = regex(rf"(\w{{1,40}}[ ,.]){{1,240}}{number}")
        loader.start(kind.need(grammar), "").result()
        loader.collect()
        assert loader.fit({grammar})
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
    assert loader.num_bytes <= 16 * MB
    loader.close()


def test_what_was_freed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = list[int]()
    monkeypatch.setattr(kept_grammars, "_malloc_trim", trimmed.append)
    heap = Heap()
    grammars = KeptGrammars(heap=heap)
    keep(grammars, heap, "a", 9 * MB)
    grammars.drop(regex("a"))
    gc.collect()
    keep(grammars, heap, "b")  # which sees that it is gone
    with grammars._trimming:  # until the thread has ended
        assert trimmed
