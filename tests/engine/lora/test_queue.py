"""Which adapters are in memory, and who waits for them."""

from __future__ import annotations

import random
import threading

import pytest
from msgspec.structs import replace

from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import Quarantine, mark_name
from penstock.engine.lora.queue import MAX_OVERTAKING, AdapterQueue
from penstock.engine.request import Adapter, FinishReason, Request, SamplingParams


class Memory:
    """Adapters in memory, which are read once a test says so; those named wrong never are."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.may_read = threading.Event()
        self.may_read.set()

    def load(self, adapter: Adapter) -> None:
        assert self.may_read.wait(60)
        if adapter.name == "wrong":
            raise InvalidRequestError("the adapter 'wrong' is wrong", param="model")
        self.held.add(adapter.digest)

    def drop(self, digest: str) -> None:
        self.held.remove(digest)

    def has_head(self, _: str) -> bool:
        return False


class Running:
    """What the scheduler has."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.aborted: list[tuple[str, int | None]] = []

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def abort(self, request_id: str, *, index: int | None = None) -> None:
        self.aborted.append((request_id, index))
        if index is None:
            self.requests.pop(request_id, None)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def running() -> Running:
    return Running()


@pytest.fixture
def queue(memory, running):
    queue = AdapterQueue(memory, running, max_loras=2, max_cpu_loras=3)
    yield queue
    memory.may_read.set()
    queue.close()


def request(request_id: str, name: str, **params: int) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(**params),
        adapter=Adapter(name=name, path=f"/{name}", digest=f"digest of {name}"),
    )


def admit_all(queue: AdapterQueue):
    """Admit until nothing is being read any more."""
    outputs = queue.admit()
    while queue._being_loaded:
        queue.wait()
        outputs += queue.admit()
    return outputs


def test_requests_wait_for_their_own_adapter_only(queue, memory, running):
    queue.load(request("", "known").adapter)
    memory.may_read.clear()
    queue.add(request("1", "slow"))
    queue.add(request("2", "known"))
    assert queue.admit() == []
    assert list(running.requests) == ["2"]
    assert not queue.has_work
    woken = threading.Event()
    queue.wake = woken.set
    memory.may_read.set()
    assert woken.wait(60)
    assert queue.has_work
    queue.admit()
    assert list(running.requests) == ["2", "1"]


def test_what_cannot_be_read_fails_its_own_requests(queue, running):
    for number, name in enumerate(("good", "wrong", "good", "wrong")):
        queue.add(request(str(number), name))
    outputs = admit_all(queue)
    assert list(running.requests) == ["0", "2"]
    assert [(each.request_id, each.param, each.is_refused) for each in outputs] == [
        ("1", "model", True),
        ("3", "model", True),
    ]
    assert len(queue) == 0


def test_places_go_to_those_who_came_first(queue, memory, running):
    for name in "ab":
        queue.load(request("", name).adapter)
    for name in ("a", "b", "c", "d", "a", "b"):
        queue.add(request(name + str(len(queue)), name))
    admit_all(queue)
    assert list(running.requests) == ["a0", "b1", "a4", "b5"]  # c and d need places
    assert not queue.has_work
    del running.requests["a0"]
    admit_all(queue)
    assert list(running.requests) == ["b1", "a4", "b5"]
    del running.requests["a4"]
    assert queue.has_work
    admit_all(queue)
    assert list(running.requests) == ["b1", "b5", "c2"]
    running.requests.clear()
    admit_all(queue)
    assert list(running.requests) == ["d3"]
    assert memory.held == {"digest of b", "digest of c", "digest of d"}


def test_only_so_many_go_ahead_of_one_that_waits_for_a_place(queue, running):
    for name in "ab":
        queue.load(request("", name).adapter)
    for number, name in enumerate("abc" + "a" * (MAX_OVERTAKING + 1)):
        queue.add(request(f"{name}{number}", name))
    admit_all(queue)
    assert len(running.requests) == 2 + MAX_OVERTAKING
    assert len(queue) == 2
    running.requests.clear()
    admit_all(queue)
    assert sorted(running.requests) == [f"a{MAX_OVERTAKING + 3}", "c2"]


def test_the_place_of_one_that_never_ran_is_free_again(memory, running):
    """Of a refused request, and of an aborted one that nobody may go ahead of any more."""
    queue = AdapterQueue(memory, running, max_loras=1, max_cpu_loras=2)
    memory.has_head = lambda _: True
    queue.add(request("refused", "a", prompt_logprobs=1))
    queue.add(request("b", "b"))
    run_dry(queue)
    assert list(running.requests) == ["b"]
    queue.add(request("c", "c"))
    for number in range(MAX_OVERTAKING + 1):
        queue.add(request(f"b{number}", "b"))
    run_dry(queue)
    assert len(queue) == 2
    queue.abort("c")
    run_dry(queue)
    assert len(queue) == 0
    queue.close()


@pytest.mark.parametrize("max_cpu_loras", [2, 5], ids=["read again and again", "in memory"])
@pytest.mark.parametrize("seed", range(10))
def test_every_request_gets_its_turn(memory, running, seed, max_cpu_loras):
    rng = random.Random(seed)
    queue = AdapterQueue(memory, running, max_loras=2, max_cpu_loras=max_cpu_loras)
    if max_cpu_loras == 5:
        for name in "abcde":
            queue.load(request("", name).adapter)
    ahead: dict[str, int] = {}  # of those that wait: later ones that ran
    for number in range(400):
        name = rng.choice("aaaaaaabbbcde")
        queue.add(request(str(number), name))
        ahead[str(number)] = 0
        # Never all at once, so that the adapters that are asked for most keep their places.
        if len(running.requests) > 6:
            ended = rng.choice(list(running.requests))
            del running.requests[ended]
        if ahead and rng.random() < 0.05:
            aborted = rng.choice(list(ahead))
            queue.abort(aborted)
            del ahead[aborted]
        count_overtaking(queue, running, ahead)
    while len(queue):
        running.requests.pop(next(iter(running.requests)), None)
        count_overtaking(queue, running, ahead)
    assert not ahead
    queue.close()


def count_overtaking(queue: AdapterQueue, running: Running, ahead: dict[str, int]) -> None:
    """Admit, and see who went ahead of whom. Who waits for a file is overtaken by all others."""
    run_dry(queue)
    for ran in [each for each in ahead if each in running.requests]:
        del ahead[ran]
        for waiting in ahead:
            ahead[waiting] += int(waiting) < int(ran)
    if queue._max_cpu_loras == 5:
        assert max(ahead.values(), default=0) <= MAX_OVERTAKING


def run_dry(queue: AdapterQueue) -> None:
    """Admit as an engine does: only while there is something to do."""
    while queue.has_work or queue._being_loaded:
        if not queue.has_work:
            queue.wait()
        queue.admit()


def test_the_least_recently_used_leaves_memory(queue, memory, running):
    for name in ("a", "b", "c", "a", "d"):
        queue.add(request(name, name))
        admit_all(queue)
        running.requests.clear()
    assert memory.held == {"digest of a", "digest of c", "digest of d"}


def test_unloading_ends_what_has_the_name(queue, running):
    queue.add(request("1", "a"))
    queue.add(request("2", "b"))
    admit_all(queue)
    queue.add(request("3", "a"))
    queue.unload("a")
    outputs = queue.admit()
    assert {each.request_id for each in outputs} == {"1", "3"}
    assert {each.error for each in outputs} == {"the adapter 'a' was unloaded"}
    assert all(each.finish_reason is FinishReason.ERROR for each in outputs)
    assert list(running.requests) == ["2"]


def test_an_aborted_request_never_runs_or_speaks(queue, memory, running):
    memory.may_read.clear()
    queue.add(request("1", "a"))
    queue.add(request("2", "a", n=2))
    queue.add(request("3", "wrong"))
    queue.admit()
    assert queue.abort("1")
    assert queue.abort("2", index=1)
    assert queue.has_request("2")
    assert not queue.abort("4")
    memory.may_read.set()
    outputs = admit_all(queue)
    assert [each.request_id for each in outputs] == ["3"]
    assert list(running.requests) == ["2"]
    assert running.aborted == [("2", 1)]
    queue.unload("a")
    assert not queue.abort("2")
    assert queue.admit() == []


def test_equal_contents_are_read_once(queue, memory):
    first = request("1", "a").adapter
    queue.load(first)
    memory.may_read.clear()  # reading again would not end
    queue.load(replace(first, name="other name"))


def test_what_has_ended_engines_is_not_read(memory, running, tmp_path):
    """Two marks that nobody holds: of engines that died while they read it."""
    one = request("a", "killer")
    for number in range(2):
        (tmp_path / f"{mark_name(one.adapter)}-{number}").touch()
    queue = AdapterQueue(
        memory, running, max_loras=2, max_cpu_loras=3, quarantine=Quarantine(tmp_path)
    )
    queue.add(one)
    assert not queue.admit()
    queue.wait()
    [output] = queue.admit()
    assert output.is_refused
    assert "has ended 2 engines" in output.error
    assert not memory.held
    queue.close()
