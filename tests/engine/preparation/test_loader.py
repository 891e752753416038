"""Which resources stay in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.engine.preparation.loader import Claims, Loader
from penstock.engine.preparation.resources import Bounds, GrammarResources
from penstock.engine.request import StructuredOutputs

from .stores import GrammarStore


class Kind(GrammarResources):
    """Grammars of which those are kept that fit into eight bytes."""

    def __init__(self, store: GrammarStore) -> None:
        super().__init__(store)
        self.bounds = Bounds(max_bytes=8, max_needed_bytes=8)


@pytest.fixture
def store() -> GrammarStore:
    return GrammarStore()


@pytest.fixture
def loader(store: GrammarStore) -> Iterator[Loader]:
    loader = Loader(Kind(store), lambda: None)
    yield loader
    store.gate.open()
    loader.close()


def key(text: str) -> StructuredOutputs:
    return StructuredOutputs("regex", text)


def load(loader: Loader, text: str, tenant: str = "") -> None:
    assert isinstance(loader.kind, Kind)
    loader.start(loader.kind.need(key(text)), tenant).result()
    done = loader.collect()
    assert done is not None
    assert done[1] is None


def test_the_least_recently_used_goes_first(loader: Loader, store: GrammarStore) -> None:
    for text in ("a2", "b2", "c2", "d2"):
        load(loader, text)
        assert loader.fit({key(text)})
    loader.touch(key("a2"))
    load(loader, "e2")
    assert loader.fit({key("e2")})
    assert store.held == {"a2", "c2", "d2", "e2"}
    assert loader.num_bytes == 8


def test_what_is_needed_stays_beyond_the_bound(loader: Loader, store: GrammarStore) -> None:
    for text in ("a4", "b4", "c4"):
        load(loader, text)
    claims = Claims(loader)
    for text in ("a4", "b4", "c4"):
        assert claims.has_room() == (text != "c4")
        claims.add(key(text))
    assert not loader.fit(claims.keys)
    assert store.held == {"a4", "b4", "c4"}
    assert loader.fit({key("b4")})
    assert store.held == {"b4", "c4"}


def test_what_is_not_loaded_yet_counts_as_the_mean(loader: Loader) -> None:
    for text in ("a1", "b5"):
        load(loader, text)
    claims = Claims(loader)
    for text in ("b5", "new", "newer"):
        assert claims.has_room() == (text != "newer")
        claims.add(key(text))


def test_a_tenant_with_many_loses_its_own(loader: Loader, store: GrammarStore) -> None:
    for text in "ab":
        load(loader, text, "small")
    for text in "cdefgh":
        load(loader, text, "flood")
    load(loader, "i2", "third")
    assert loader.fit({key("i2")})
    assert store.held == {"a", "b", "e", "f", "g", "h", "i2"}


def test_a_number_of_them_is_a_bound_too(loader: Loader, store: GrammarStore) -> None:
    assert isinstance(loader.kind, Kind)
    loader.kind.bounds = Bounds(max_bytes=8, max_needed_bytes=8, max_count=2)
    for text in "ab":
        load(loader, text)
    claims = Claims(loader)
    claims.add(key("a"))
    assert claims.has_room()
    claims.add(key("other"))
    assert not claims.has_room()
    assert loader.fit({key("b")}, num_more=1)
    assert store.held == {"b"}


def test_what_fails_says_why_and_is_not_there(loader: Loader) -> None:
    assert isinstance(loader.kind, Kind)
    for text, message in (
        ("wrong", "'wrong' is wrong"),
        ("killer", "structured_outputs cannot be loaded: MemoryError('killer')"),
    ):
        loader.start(loader.kind.need(key(text)), "").result()
        assert loader.is_loading
        done = loader.collect()
        assert done is not None
        assert (str(done[1]), done[1] and done[1].param) == (message, "structured_outputs")
        assert key(text) not in loader
        assert not loader.is_loading
    assert loader.collect() is None


def test_who_waits_hears_of_it_when_it_can_be_collected(store: GrammarStore) -> None:
    heard = threading.Event()
    loader = Loader(Kind(store), heard.set)
    store.gate.shut()
    loader.start(Kind(store).need(key("a")), "")
    assert not heard.is_set()
    assert loader.collect() is None
    store.gate.let()
    assert heard.wait(60)
    assert loader.collect() is not None
    loader.close()
