"""What a device has of resources, without a device: loaded when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from penstock.engine.errors import InvalidRequestError
from penstock.engine.preparation.resources import (
    AdapterResources,
    GrammarResources,
    ImageResources,
)
from penstock.engine.request import (
    Adapter,
    ImageInput,
    Request,
    SamplingParams,
    StructuredOutputs,
)


class Gate:
    """Lets loading through, all of it or one at a time."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = True

    def pass_through(self) -> None:
        if not self._is_open:
            assert self._permits.acquire(timeout=60)

    def shut(self) -> None:
        self._permits, self._is_open = threading.Semaphore(0), False

    def let(self, number: int = 1) -> None:
        self._permits.release(number)

    def open(self) -> None:
        self._is_open = True
        self.let(100)


class Store:
    """Of one kind. A name with "wrong" is refused, one with "killer" ends in another error; a digit
    at its end is its size.

    Attributes:
        held: names.
        order: those that were loaded, one after the other.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.held: set[str] = set()
        self.order: list[str] = []

    def take(self, name: str, param: str) -> None:
        self.gate.pass_through()
        if "wrong" in name:
            raise InvalidRequestError(f"{name!r} is wrong", param=param)
        if "killer" in name:
            raise MemoryError(name)
        self.order.append(name)
        self.held.add(name)

    def release(self, name: str) -> None:
        self.held.remove(name)


def size_of(name: str) -> int:
    return int(name[-1]) if name[-1:].isdigit() else 1


class AdapterStore(Store):
    max_bytes = 9

    def load(self, adapter: Adapter) -> None:
        self.take(adapter.digest, "model")

    def drop(self, digest: str) -> None:
        self.release(digest)

    def size(self, digest: str) -> int:
        return size_of(digest)

    def has_head(self, digest: str) -> bool:
        return "head" in digest


class ImageStore(Store):
    def encode(self, digest: str, data: bytes) -> tuple[int, int]:
        assert data, "a file that was there"
        self.take(digest, "messages")
        return 16, size_of(digest)

    def drop(self, digest: str) -> None:
        self.release(digest)


class GrammarStore(Store):
    @property
    def num_kept(self) -> int:
        return len(self.held)

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        del is_checked
        self.take(grammar.text, "structured_outputs")

    def read_vocabulary(self) -> None:
        """There is none."""

    def drop(self, grammar: StructuredOutputs) -> None:
        self.release(grammar.text)

    def size(self, grammar: StructuredOutputs) -> int:
        return size_of(grammar.text)


class Running:
    """What a scheduler has, and never computes."""

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


def adapter(name: str) -> Adapter:
    return Adapter(name=name, path=f"/{name}", digest=name)


def request(
    request_id: str,
    *,
    adapter_name: str | None = None,
    images: tuple[str, ...] = (),
    grammar: str | None = None,
    tenant: str = "",
    weight: float = 1.0,
    prompt: tuple[int, ...] = (),
    wants_queue_position: bool = False,
    **params: int,
) -> Request:
    """With one token of the prompt for each image."""
    return Request(
        request_id=request_id,
        prompt_token_ids=(*prompt, *range(1, len(images) + 1), 1),
        tenant=tenant,
        wants_queue_position=wants_queue_position,
        weight=weight,
        adapter=None if adapter_name is None else adapter(adapter_name),
        images=tuple(
            ImageInput(
                digest=name, offset=len(prompt) + number, num_tokens=1, num_features=16, data=b"x"
            )
            for number, name in enumerate(images)
        ),
        sampling_params=SamplingParams(
            structured_outputs=None if grammar is None else StructuredOutputs("regex", grammar),
            **params,  # type: ignore[arg-type]
        ),
    )


class Stores:
    """Stores of all kinds, and the kinds that use them."""

    def __init__(self, *, max_loras: int, max_cpu_loras: int, max_image_bytes: int) -> None:
        self.adapters, self.images, self.grammars = AdapterStore(), ImageStore(), GrammarStore()
        self.all = (self.grammars, self.adapters, self.images)
        self.kinds = (
            GrammarResources(self.grammars),
            AdapterResources(self.adapters, max_loras=max_loras, max_cpu_loras=max_cpu_loras),
            ImageResources(self.images, max_bytes=max_image_bytes),
        )

    def shut(self) -> None:
        for store in self.all:
            store.gate.shut()

    def open(self) -> None:
        for store in self.all:
            store.gate.open()

    def assert_has(self, key: Hashable) -> None:
        assert any(key in store.held for store in self.all), key
