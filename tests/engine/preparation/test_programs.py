"""Random programs of requests for all kinds of resources, on the core and the device of tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.config import LoraConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.preparation.resources import Bounds
from penstock.engine.request import FinishReason, Request, RequestOutput
from penstock.engine.scheduling import Scheduler

from ..scheduling.fake_device import FakeDevice, expected_output
from .stores import AdapterStore, GrammarStore, ImageStore, request, size_of

ADAPTERS = (None, "a1", "b1", "c1", "d1", "wrong1", "killer1")
IMAGES = ("i1", "j2", "k3", "l1", "m2", "wrong2", "killer3")
GRAMMARS = (None, "g1", "h2", "r3", "s1", "wrong1", "killer2")
MAX_LORAS, MAX_CPU_LORAS, MAX_BYTES, LARGEST, MOST_OWN = 2, 3, 4, 3, 6
BOUNDS = Bounds(MAX_BYTES, MAX_BYTES)
TENANTS = ("", "x", "y")


class Device(FakeDevice):
    """Sees that every sequence has its resources, from its first step to its last."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(num_blocks=48, block_size=4)
        self.grammars: Any = engine.grammars
        self.adapters: Any = engine.adapters
        self.images = engine.images

    def submit(self, batch: Batch) -> Any:
        handle = super().submit(batch)
        for row in self.rows.values():
            entry = row.entry
            assert entry.adapter is None or entry.adapter in self.adapters.held
            assert {image.digest for image in entry.images} <= self.images.held
            grammar = entry.params.structured_outputs
            assert grammar is None or grammar.text in self.grammars.held
        in_use = {row.entry.adapter for row in self.rows.values()} - {None}
        assert len(in_use) <= MAX_LORAS
        return handle


class Engine:
    """A core and its stores, which load one resource at a time when they are let."""

    def __init__(self) -> None:
        self.grammars, self.adapters, self.images = GrammarStore(), AdapterStore(), ImageStore()
        self.stores = (self.grammars, self.adapters, self.images)
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            BlockManager(num_blocks=48, block_size=4),
            eos_token_ids=(),
            max_model_len=64,
        )
        self.device = Device(self)
        self.core = EngineCore(
            scheduler,
            self.device,  # type: ignore[arg-type]
            lora=LoraConfig(enable_lora=True, max_loras=MAX_LORAS, max_cpu_loras=MAX_CPU_LORAS),
            images=self.images,
            max_image_bytes=MAX_BYTES,
        )
        self.core.grammars.bounds = BOUNDS
        self.kinds = (self.core.grammars, self.core.adapters, self.core.images)
        self._loaded = threading.Semaphore(0)
        self.core.wake_by(self._loaded.release)
        for store in self.stores:
            store.gate.shut()

    def is_loading(self, number: int) -> bool:
        return self.core.preparation.loader(self.kinds[number]).is_loading

    def finish_loading(self, number: int) -> None:
        """Let one kind load what its thread has, and wait for that."""
        if self.is_loading(number):
            self.stores[number].gate.let()
            assert self._loaded.acquire(timeout=60)
            self.core.preparation._collect()

    def check_bounds(self) -> None:
        assert len(self.adapters.held) <= MAX_CPU_LORAS
        for store in (self.grammars, self.images):
            # One that is larger than the rest of the room, or those of one request.
            assert sum(map(size_of, store.held)) <= max(MAX_BYTES - 1, MOST_OWN) + LARGEST

    def close(self) -> None:
        for store in self.stores:
            store.gate.open()
        self.core.close()


@dataclass
class Asked:
    """What was asked, and what came.

    Attributes:
        may_end: an error is right: its adapter was unloaded.
        aborted: branches that were aborted.
    """

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    may_end: bool = False
    aborted: set[int] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        grammar, adapter = self.request.sampling_params.structured_outputs, self.request.adapter
        return [
            *([] if grammar is None else [grammar.text]),
            *([] if adapter is None else [adapter.name]),
            *(image.digest for image in self.request.images),
        ]


class Program:
    def __init__(self) -> None:
        self.engine = Engine()
        self.live: dict[str, Asked] = {}
        self.ended: set[str] = set()
        self.num_asked = 0

    def do(self, action: Sequence[Any]) -> None:
        getattr(self, action[0])(*action[1:])
        self.engine.check_bounds()

    def submit(
        self, adapter: str | None, images: tuple[str, ...], grammar: str | None, tenant: str, n: int
    ) -> None:
        name = str(self.num_asked)
        self.num_asked += 1
        made = request(
            name,
            adapter_name=adapter, images=images, grammar=grammar, tenant=tenant,
            prompt=(self.num_asked % 40, 7), max_tokens=5, n=n,
        )  # fmt: skip
        self.live[name] = Asked(made)
        self.engine.core.add(made)

    def step(self) -> None:
        if self.engine.core.has_work():
            for output in self.engine.core.step():
                self._note(output)
            self.engine.core.scheduler.blocks.check_integrity()

    def finish(self, number: int) -> None:
        self.engine.finish_loading(number)

    def abort(self, number: int) -> None:
        if self.live:
            name = list(self.live)[number % len(self.live)]
            self.engine.core.abort(name)
            assert not self.engine.core.has_request(name)
            del self.live[name]

    def abort_branch(self, number: int, index: int) -> None:
        if self.live:
            name = list(self.live)[number % len(self.live)]
            self.engine.core.abort(name, index=index)
            self.live[name].aborted.add(index)
            if not self.engine.core.has_request(name):
                del self.live[name]

    def unload(self, name: str) -> None:
        self.engine.core.unload_adapter(name)
        for asked in self.live.values():
            if asked.request.adapter is not None and asked.request.adapter.name == name:
                asked.may_end = True

    def evict(self) -> None:
        """Everything that nobody needs has to go, for one round."""
        core = self.engine.core
        for kind in (core.grammars, core.images):
            kind.bounds = replace(BOUNDS, max_bytes=0)
        core.preparation.has_news = True
        self.step()
        for kind in (core.grammars, core.images):
            kind.bounds = BOUNDS

    def kill(self) -> None:
        """The engine dies; the next one goes on with what is left of single outputs, and begins
        with others again."""
        self.engine.close()
        self.engine = Engine()
        for asked in list(self.live.values()):
            output = asked.tokens.get(0, [])
            if asked.request.sampling_params.n > 1:
                asked.tokens.clear()
                asked.aborted.clear()
                output = []
            again = msgspec.structs.replace(asked.request, output_token_ids=tuple(output))
            self.engine.core.add(again)

    def _note(self, output: RequestOutput) -> None:
        asked = self.live[output.request_id]  # nothing speaks after its end
        if output.finish_reason is FinishReason.ERROR:
            is_wrong = any("wrong" in each or "killer" in each for each in asked.names)
            assert asked.may_end or (is_wrong and output.is_refused)
            assert not output.is_refused or not asked.tokens
        asked.tokens.setdefault(output.index, []).extend(output.token_ids)
        if not output.is_last:
            return
        del self.live[output.request_id]
        if output.finish_reason is not FinishReason.ERROR:
            assert not any("wrong" in each or "killer" in each for each in asked.names)
            for index in set(range(asked.request.sampling_params.n)) - asked.aborted:
                expected = expected_output(asked.request.prompt_token_ids, 5, index)
                assert asked.tokens[index] == expected

    def end(self) -> None:
        """Everybody gets an answer, and nothing is left."""
        for _ in range(2000):
            if not self.live:
                break
            self.do(("step",))
            if self.live and not self.engine.core.has_work():
                loading = [number for number in range(3) if self.engine.is_loading(number)]
                assert loading, "they wait for nothing"
                self.do(("finish", loading[0]))
        assert not self.live, "stuck"
        assert len(self.engine.core.preparation) == 0


SUBMIT = st.tuples(
    st.just("submit"),
    st.sampled_from(ADAPTERS),
    st.lists(st.sampled_from(IMAGES), max_size=2).map(tuple),
    st.sampled_from(GRAMMARS),
    st.sampled_from(TENANTS),
    st.sampled_from((1, 1, 2)),
)
FINISH = st.tuples(st.just("finish"), st.integers(0, 2))
STEP = st.just(("step",))
OTHER = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("abort_branch"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.just("unload"), st.sampled_from([each for each in ADAPTERS if each])),
    st.just(("evict",)),
    st.just(("kill",)),
)
ACTIONS = st.one_of(SUBMIT, SUBMIT, STEP, STEP, FINISH, FINISH, OTHER)


def run(actions: Sequence[Sequence[Any]]) -> None:
    program = Program()
    try:
        for action in actions:
            program.do(action)
        program.end()
    finally:
        program.engine.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=50))
def test_nobody_is_stuck_or_served_without_what_it_needs(actions: list[Any]) -> None:
    run(actions)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, min_size=40, max_size=120))
def test_400_programs(actions: list[Any]) -> None:
    run(actions)
