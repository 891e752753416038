"""Who waits for resources, for how long, and what becomes of those that cannot have them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import Quarantine, mark_name
from penstock.engine.preparation.preparation_queue import MAX_OVERTAKING, PreparationQueue
from penstock.engine.preparation.resources import AdapterResources
from penstock.engine.request import Adapter, FinishReason, Notice, Request, RequestOutput

from .stores import Running, Stores, adapter, request


class Room:
    """A queue with its stores, before a scheduler that a test empties."""

    def __init__(
        self, *, max_loras: int = 2, max_cpu_loras: int = 3, max_image_bytes: int = 8
    ) -> None:
        self.stores = Stores(
            max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_image_bytes=max_image_bytes
        )
        self.running = Running()
        self.queue = PreparationQueue(self.stores.kinds, self.running)

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.queue.add(each, self.queue.needs(each))

    def load(self, each: Adapter) -> None:
        kind = self.stores.kinds[1]
        assert isinstance(kind, AdapterResources)
        self.queue.load(kind.need(each))

    def run_dry(self) -> list[RequestOutput]:
        """Admit as an engine does: only while there is something to do."""
        outputs: list[RequestOutput] = []
        while self.queue.has_work or self.is_loading:
            if not self.queue.has_work:
                self.queue.wait()
            outputs += self.queue.admit()
        return outputs

    @property
    def is_loading(self) -> bool:
        return any(self.queue.loader(kind).is_loading for kind in self.stores.kinds)


@pytest.fixture
def make_room() -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []

    def make(**bounds: int) -> Room:
        rooms.append(Room(**bounds))
        return rooms[-1]

    yield make
    for room in rooms:
        room.stores.open()
        room.queue.close()


@pytest.fixture
def room(make_room: Callable[..., Room]) -> Room:
    return make_room()


def test_a_request_waits_for_all_that_it_needs_and_for_nothing_else(room: Room) -> None:
    room.load(adapter("known"))
    room.stores.shut()
    everything = request("all", adapter_name="a", images=("i", "j"), grammar="g")
    room.add(everything, request("known", adapter_name="known"), request("g", grammar="g"))
    assert room.queue.admit() == []
    assert list(room.running.requests) == ["known"]
    assert not room.queue.has_work
    room.stores.grammars.gate.open()
    room.queue.wait()
    room.queue.admit()
    assert list(room.running.requests) == ["known", "g"]
    room.stores.adapters.gate.open()
    room.queue.wait()
    room.queue.admit()
    assert room.queue.has_request("all")
    room.stores.images.gate.open()
    assert room.run_dry() == []
    assert list(room.running.requests) == ["known", "g", "all"]
    bare = room.running.requests["all"].images
    assert [(image.digest, image.data) for image in bare] == [("i", b""), ("j", b"")]
    for store, names in zip(room.stores.all, ({"g"}, {"known", "a"}, {"i", "j"}), strict=True):
        assert store.held == names
        assert len(store.order) == len(names)  # nothing was loaded twice


def test_an_engine_is_woken_when_something_is_loaded(room: Room) -> None:
    woken = threading.Event()
    room.queue.wake = woken.set
    room.stores.shut()
    room.add(request("1", grammar="g"))
    room.queue.admit()
    assert not room.queue.has_work
    room.stores.open()
    assert woken.wait(60)
    assert room.queue.has_work


@pytest.mark.parametrize("kind", ["adapter_name", "images", "grammar"])
def test_what_cannot_be_loaded_fails_its_own_requests(room: Room, kind: str) -> None:
    for number, name in enumerate(("good", "wrong", "killer", "good", "wrong")):
        needs = {kind: (name,) if kind == "images" else name}
        room.add(request(str(number), **needs))  # type: ignore[arg-type]
    outputs = room.run_dry()
    assert list(room.running.requests) == ["0", "3"]
    assert sorted(each.request_id for each in outputs) == ["1", "2", "4"]
    param = {"adapter_name": "model", "images": "messages", "grammar": "structured_outputs"}[kind]
    assert {(each.param, each.is_refused) for each in outputs} == {(param, True)}
    assert "MemoryError" in next(each.error or "" for each in outputs if each.request_id == "2")
    assert len(room.queue) == 0


def test_places_go_to_those_who_came_first(room: Room) -> None:
    for name in "ab":
        room.load(adapter(name))
    for number, name in enumerate("abcdab"):
        room.add(request(f"{name}{number}", adapter_name=name))
    room.run_dry()
    running = room.running.requests
    assert list(running) == ["a0", "b1", "a4", "b5"]  # c and d need places
    assert not room.queue.has_work
    del running["a0"]
    room.run_dry()
    assert list(running) == ["b1", "a4", "b5"]
    del running["a4"]
    assert room.queue.has_work
    room.run_dry()
    assert list(running) == ["b1", "b5", "c2"]
    running.clear()
    room.run_dry()
    assert list(running) == ["d3"]
    assert room.stores.adapters.held == {"b", "c", "d"}


def test_only_so_many_go_ahead_of_one_that_waits_for_a_place(room: Room) -> None:
    for number, name in enumerate("abc" + "a" * (MAX_OVERTAKING + 1)):
        room.add(request(f"{name}{number}", adapter_name=name))
    room.add(request("other", grammar="g"))  # needs no place
    room.run_dry()
    assert len(room.running.requests) == 3 + MAX_OVERTAKING
    assert "other" in room.running.requests
    assert len(room.queue) == 2
    room.running.requests.clear()
    room.run_dry()
    assert sorted(room.running.requests) == [f"a{MAX_OVERTAKING + 3}", "c2"]


def test_only_so_many_go_ahead_of_one_that_waits_for_memory(room: Room) -> None:
    """Requests with the image that fills it, which come again and again."""
    room.add(request("first", images=("a8",)), request("waits", images=("b8",)))
    room.run_dry()
    assert list(room.running.requests) == ["first"]
    for number in range(MAX_OVERTAKING + 5):
        room.add(request(str(number), images=("a8",)))
        room.run_dry()
        room.running.requests.pop("first" if number == 0 else str(number - 1), None)
    room.run_dry()
    assert "waits" in room.running.requests
    assert room.stores.images.order == ["a8", "b8"]
    assert len(room.queue) == 5


def test_the_place_of_one_that_never_ran_is_free_again(make_room: Callable[..., Room]) -> None:
    """Of a refused request, and of an aborted one that nobody may go ahead of any more."""
    room = make_room(max_loras=1, max_cpu_loras=2)
    room.add(request("refused", adapter_name="head", prompt_logprobs=1))
    room.add(request("b", adapter_name="b"))
    [output] = room.run_dry()
    assert output.param == "prompt_logprobs"
    assert list(room.running.requests) == ["b"]
    room.add(request("c", adapter_name="c"))
    for number in range(MAX_OVERTAKING + 1):
        room.add(request(f"b{number}", adapter_name="b"))
    room.run_dry()
    assert len(room.queue) == 2
    room.queue.abort("c")
    room.run_dry()
    assert len(room.queue) == 0


@pytest.mark.parametrize("max_cpu_loras", [2, 5], ids=["read again and again", "in memory"])
@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_its_turn(
    make_room: Callable[..., Room], seed: int, max_cpu_loras: int
) -> None:
    rng = random.Random(seed)
    room = make_room(max_cpu_loras=max_cpu_loras)
    if max_cpu_loras == 5:
        for name in "abcde":
            room.load(adapter(name))
    running = room.running.requests
    ahead: dict[str, int] = {}  # of those that wait: later ones that ran

    def admit() -> None:
        """See who went ahead of whom. Who waits for a file is overtaken by all others."""
        room.run_dry()
        for ran in [each for each in ahead if each in running]:
            del ahead[ran]
            for waiting in ahead:
                ahead[waiting] += int(waiting) < int(ran)
        if max_cpu_loras == 5:
            assert max(ahead.values(), default=0) <= MAX_OVERTAKING

    for number in range(400):
        room.add(request(str(number), adapter_name=rng.choice("aaaaaaabbbcde")))
        ahead[str(number)] = 0
        # Never all at once, so that the adapters that are asked for most keep their places.
        if len(running) > 6:
            del running[rng.choice(list(running))]
        if ahead and rng.random() < 0.05:
            aborted = rng.choice(list(ahead))
            room.queue.abort(aborted)
            del ahead[aborted]
        admit()
    while len(room.queue):
        running.pop(next(iter(running)), None)
        admit()
    assert not ahead


@pytest.mark.parametrize("kind", ["adapter_name", "images", "grammar"])
def test_tenants_take_turns(room: Room, kind: str) -> None:
    """The second half of a flood comes after the other's, who has twice the weight of a third."""
    for tenant, weight, number in (("flood", 1, 4), ("double", 2, 2), ("other", 1, 1)):
        for index in range(number):
            name = f"{tenant} {index} "
            needs = {kind: (name,) if kind == "images" else name}
            made = request(name, tenant=tenant, weight=weight, **needs)  # type: ignore[arg-type]
            room.add(made)
    order: list[str] = []
    while len(room.queue):
        room.run_dry()
        order += [each.strip() for each in room.running.requests]
        room.running.requests.clear()
    assert sorted(order[:2]) == ["double 0", "flood 0"] or order[0] == "double 0"
    assert order.index("other 0") < order.index("flood 1")
    assert order.index("double 1") < order.index("flood 1")
    assert [each for each in order if each.startswith("flood")] == [f"flood {n}" for n in range(4)]


def test_who_waits_for_different_things_never_waits_for_another(
    make_room: Callable[..., Room],
) -> None:
    """The first holds an image and needs the adapter of the second, which needs room for an
    image."""
    room = make_room(max_loras=1, max_cpu_loras=1, max_image_bytes=4)
    room.stores.shut()
    room.add(request("1", adapter_name="a", images=("i4", "j4")))
    room.add(request("2", adapter_name="b", images=("k4",)))
    room.queue.admit()
    room.queue.abort("1")
    room.queue.admit()
    room.add(request("3", adapter_name="a", images=("l4", "i4"), tenant="other", weight=10))
    room.stores.open()
    room.run_dry()
    for _ in range(2):
        assert len(room.running.requests) == 1
        room.running.requests.clear()
        room.run_dry()
    assert len(room.queue) == 0
    assert not room.running.requests


def test_a_request_that_needs_more_than_there_is_runs_alone(room: Room) -> None:
    room.add(request("large", images=("a6", "b6", "c6")), request("small", images=("d1",)))
    room.run_dry()
    assert list(room.running.requests) == ["large"]
    room.running.requests.clear()
    room.run_dry()
    assert list(room.running.requests) == ["small"]
    assert sum(int(name[-1]) for name in room.stores.images.held) <= 8


def test_what_is_too_much_goes_when_those_end_that_need_it(room: Room) -> None:
    room.add(request("large", images=("a6", "b6")))
    room.run_dry()
    assert not room.queue.has_work
    room.running.requests.clear()
    assert room.queue.has_work
    room.run_dry()
    assert room.stores.images.held == {"b6"}


def test_an_unloaded_adapter_ends_what_has_its_name(room: Room) -> None:
    room.add(request("1", adapter_name="a"), request("2", adapter_name="b", images=("i",)))
    room.run_dry()
    room.add(request("3", adapter_name="a", images=("j",)))
    error = InvalidRequestError("the adapter 'a' was unloaded", param="model")
    room.queue.end(lambda each: each.adapter == adapter("a"), error)
    outputs = room.queue.admit()
    assert {each.request_id for each in outputs} == {"1", "3"}
    assert {each.error for each in outputs} == {"the adapter 'a' was unloaded"}
    assert all(each.finish_reason is FinishReason.ERROR for each in outputs)
    assert list(room.running.requests) == ["2"]


def test_an_aborted_request_never_runs_or_speaks(room: Room) -> None:
    room.stores.shut()
    room.add(request("1", adapter_name="a", grammar="g"))
    room.add(request("2", adapter_name="a", images=("i",), n=2))
    room.add(request("3", adapter_name="wrong"))
    room.queue.admit()
    assert room.queue.abort("1")
    assert room.queue.abort("2", index=1)
    assert room.queue.has_request("2")
    assert not room.queue.abort("4")
    room.add(request("5", grammar="g", n=2))
    for index in range(2):
        assert room.queue.has_request("5")
        assert room.queue.abort("5", index=index)
    assert not room.queue.has_request("5")
    room.stores.open()
    outputs = room.run_dry()
    assert [each.request_id for each in outputs] == ["3"]
    assert list(room.running.requests) == ["2"]
    assert room.running.aborted == [("2", 1)]
    room.queue.end(lambda _: True, InvalidRequestError("gone"))
    assert not room.queue.abort("2")
    assert room.queue.admit() == []


def test_equal_contents_are_loaded_once(room: Room) -> None:
    room.load(adapter("a"))
    room.stores.shut()  # loading again would not end
    room.load(Adapter(name="other name", path="/b", digest="a"))


def test_loading_at_once_waits_for_what_is_being_loaded(room: Room) -> None:
    room.stores.shut()
    room.add(request("1", adapter_name="a"))
    room.queue.admit()
    room.stores.open()
    room.load(adapter("b"))
    with pytest.raises(InvalidRequestError, match="'wrong' is wrong"):
        room.load(adapter("wrong"))
    room.run_dry()
    assert list(room.running.requests) == ["1"]


def test_what_has_ended_engines_is_not_read(room: Room, tmp_path: Path) -> None:
    """Two marks that nobody holds: of engines that died while they read it."""
    one = request("a", adapter_name="deadly")
    assert one.adapter is not None
    for number in range(2):
        (tmp_path / f"{mark_name(one.adapter)}-{number}").touch()
    kind = room.stores.kinds[1]
    assert isinstance(kind, AdapterResources)
    kind._quarantine = Quarantine(tmp_path)
    room.add(one)
    [output] = room.run_dry()
    assert output.is_refused
    assert "has ended 2 engines" in (output.error or "")
    assert not room.stores.adapters.held


def test_who_asked_is_told_what_it_waits_for(make_room: Callable[..., Room]) -> None:
    """Each kind once, in the order in which they are there; nothing of what is there already."""
    room = make_room()
    room.stores.shut()
    needs = {"grammar": "a", "adapter_name": "b", "images": ("c",)}
    room.add(
        request("asks", wants_queue_position=True, **needs),  # type: ignore[arg-type]
        request("does not", **needs),  # type: ignore[arg-type]
    )
    told = room.queue.admit()
    room.stores.open()
    told += room.run_dry()
    assert {output.request_id for output in told} == {"asks"}
    assert all(output.notice is Notice.PREPARING for output in told)
    kinds = [output.param for output in told]
    assert kinds[0] == "grammar"
    assert kinds == sorted(set(kinds), key=["grammar", "adapter", "image"].index)
    room.add(request("again", wants_queue_position=True, **needs))  # type: ignore[arg-type]
    assert not room.run_dry()
    assert room.running.requests.keys() == {"asks", "does not", "again"}
