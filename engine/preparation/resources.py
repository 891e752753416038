"""The kinds of resources that requests wait for: grammars, the vocabulary, adapters, images.

Each kind says which resources a request needs, and how one is loaded and dropped. `loader` loads
them in a thread, `preparation_queue` decides in which order, for all kinds alike. KV blocks from a
disk or from another engine, or another model, would be kinds too: `needs` names what is missing,
`load` brings it, `hand_over` checks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.quarantine import Quarantine
from penstock.engine.process.sandbox import give_way
from penstock.engine.request import Adapter, ImageInput, Request, StructuredOutputs

MAX_GRAMMAR_BYTES = 128 << 20  # of compiled grammars that are kept
MAX_NEEDED_GRAMMAR_BYTES = 512 << 20  # beyond which no more are compiled
_SHORT_COST = 100.0  # of a grammar or an adapter; an image costs its tokens, a second has 1,000


@dataclass(frozen=True, slots=True)
class Need:
    """A resource that a request needs.

    Attributes:
        kind: that loads it.
        key: tells it from others of its kind.
        source: what it is loaded from.
        cost: of loading it, relative to others; tenants get equal shares.
    """

    kind: Resources
    key: Hashable
    source: Any
    cost: float = _SHORT_COST


@dataclass(frozen=True, slots=True)
class Bounds:
    """
    Attributes:
        max_bytes: of resources that nobody needs, with those that are needed.
        max_needed_bytes: of needed ones, beyond which no more are loaded. As the size of one is
            known only when it is loaded, there may be one more than that.
        max_count: in memory; None: any number.
        max_live: different ones that requests in the scheduler have; None: any number.
    """

    max_bytes: int
    max_needed_bytes: int
    max_count: int | None = None
    max_live: int | None = None


class Resources(Protocol):
    """Resources of one kind.

    Attributes:
        name: of the kind, for threads.
        param: the request's parameter that is at fault if one cannot be loaded.
        bounds: on those in memory.
    """

    @property
    def name(self) -> str: ...

    @property
    def param(self) -> str: ...

    @property
    def bounds(self) -> Bounds: ...

    def needs(self, request: Request) -> Sequence[Need]:
        """What a request needs.

        Raises:
            InvalidRequestError: it could not be used, loaded or not.
        """
        ...

    def load(self, need: Need) -> None:
        """Load one, which may take seconds. Called in the kind's own thread, one at a time.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        ...

    def drop(self, key: Hashable) -> None:
        """Forget one that no sequence has."""
        ...

    def size(self, key: Hashable) -> int:
        """The bytes of a loaded one; they may be others when another one has been loaded."""
        ...

    def hand_over(self, request: Request) -> Request:
        """A request whose resources are loaded, as the scheduler gets it.

        Raises:
            InvalidRequestError: it cannot be used with what was loaded.
        """
        ...

    def title(self, need: Need) -> str:
        """What a message calls it."""
        ...


# -- grammars -------------------------------------------------------------------------------


class Grammars(Protocol):
    """The device's part: compiled grammars. Threads may share it."""

    @property
    def num_kept(self) -> int: ...

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        """Compile a grammar, which may take a second, for the sequences that will have it.

        Args:
            is_checked: somebody has checked that it is supported and compiles in time.

        Raises:
            InvalidRequestError: it is invalid or too large.
        """
        ...

    def read_vocabulary(self) -> None:
        """Read what limits of thoughts need of the tokens, which may take seconds.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        ...

    def drop(self, grammar: StructuredOutputs) -> None:
        """Forget a grammar; sequences that have it keep it."""
        ...

    def size(self, grammar: StructuredOutputs) -> int:
        """The bytes that a kept grammar takes, as far as they are known."""
        ...


class GrammarResources:
    """
    Attributes:
        check: raises `InvalidRequestError` for a grammar that must not be compiled; None: the
            compiler checks it.
    """

    name, param = "grammar", "structured_outputs"

    def __init__(self, grammars: Grammars) -> None:
        self.check: Callable[[StructuredOutputs], None] | None = None
        self.bounds = Bounds(MAX_GRAMMAR_BYTES, MAX_NEEDED_GRAMMAR_BYTES)
        self._grammars = grammars
        self._has_given_way = False

    @property
    def num_kept(self) -> int:
        return self._grammars.num_kept

    def need(self, grammar: StructuredOutputs) -> Need:
        return Need(self, grammar, grammar)

    def needs(self, request: Request) -> Sequence[Need]:
        grammar = request.sampling_params.structured_outputs
        return () if grammar is None else (self.need(grammar),)

    def load(self, need: Need) -> None:
        try:
            if self.check is not None:
                self.check(need.source)
            self._grammars.compile(need.source, is_checked=self.check is not None)
        finally:
            if not self._has_given_way:
                # The first one reads the vocabulary, for which it holds Python's lock: at full
                # priority.
                give_way(threading.get_native_id())
                self._has_given_way = True

    def drop(self, key: Any) -> None:
        self._grammars.drop(key)

    def size(self, key: Any) -> int:
        return self._grammars.size(key)

    def hand_over(self, request: Request) -> Request:
        return request

    def title(self, _: Need) -> str:
        return "structured_outputs"


class VocabularyResources:
    """What limits of thoughts need to know of the tokens: the same for all requests.

    Args:
        grammars: whose vocabulary it is.
    """

    name, param = "vocabulary", "thinking_token_budget"
    bounds = Bounds(1, 1)  # one that is not counted

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def needs(self, request: Request) -> Sequence[Need]:
        return () if request.sampling_params.thought_limit is None else (Need(self, None, None),)

    def load(self, _: Need) -> None:
        self._grammars.read_vocabulary()

    def drop(self, _: Hashable) -> None:
        """It stays in memory."""

    def size(self, _: Hashable) -> int:
        """It is not counted."""
        return 0

    def hand_over(self, request: Request) -> Request:
        return request

    def title(self, _: Need) -> str:
        return "the vocabulary"


# -- adapters -------------------------------------------------------------------------------


class Adapters(Protocol):
    """The device's part: adapters in memory, by digest.

    Attributes:
        max_bytes: of an adapter's file, at most.
    """

    @property
    def max_bytes(self) -> int: ...

    def load(self, adapter: Adapter) -> None:
        """Read an adapter into memory, which may take seconds; any thread may call this.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forget an adapter that no sequence has."""
        ...

    def size(self, digest: str) -> int:
        """The bytes of an adapter in memory."""
        ...

    def has_head(self, digest: str) -> bool:
        """Whether an adapter in memory changes the output head."""
        ...


class AdapterResources:
    """
    Args:
        max_loras: adapters that have requests in the scheduler at once.
        max_cpu_loras: adapters in memory; no fewer.
        quarantine: of adapters whose reading has ended engines.
    """

    name, param = "adapter", "model"

    def __init__(
        self,
        adapters: Adapters,
        *,
        max_loras: int,
        max_cpu_loras: int,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._adapters, self._quarantine = adapters, quarantine
        # Its file is larger than what is kept of it, so their number bounds their bytes.
        max_bytes = max_cpu_loras * adapters.max_bytes
        self.bounds = Bounds(max_bytes, max_bytes, max_count=max_cpu_loras, max_live=max_loras)

    @property
    def max_bytes(self) -> int:
        """The largest file of an adapter."""
        return self._adapters.max_bytes

    def need(self, adapter: Adapter) -> Need:
        return Need(self, adapter.digest, adapter)

    def needs(self, request: Request) -> Sequence[Need]:
        return () if request.adapter is None else (self.need(request.adapter),)

    def load(self, need: Need) -> None:
        with self._quarantine.reading(need.source) if self._quarantine else nullcontext():
            self._adapters.load(need.source)

    def drop(self, key: Any) -> None:
        self._adapters.drop(key)

    def size(self, key: Any) -> int:
        return self._adapters.size(key)

    def hand_over(self, request: Request) -> Request:
        wants, adapter = request.sampling_params.prompt_logprobs, request.adapter
        if wants is not None and adapter is not None and self._adapters.has_head(adapter.digest):
            raise InvalidRequestError(
                "prompt_logprobs is not available with an adapter of the output head",
                param="prompt_logprobs",
            )
        return request

    def title(self, need: Need) -> str:
        return f"the adapter {need.source.name!r}"


# -- images ---------------------------------------------------------------------------------


class Images(Protocol):
    """The device's part: features of images, by digest."""

    def encode(self, digest: str, data: bytes) -> tuple[int, int]:
        """Encode an image, which may take seconds, in a thread; the number of its features, and
        the bytes that they take.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forget the features of an image that no sequence has."""
        ...


class ImageResources:
    """
    Args:
        images: None: the model takes none.
        max_bytes: of features.

    Attributes:
        num_encoded: images that were encoded so far.
    """

    name, param = "images", "messages"

    def __init__(self, images: Images | None, *, max_bytes: int) -> None:
        self.bounds = Bounds(max_bytes, max_bytes)
        self.num_encoded = 0
        self._images = images
        self._found: dict[Hashable, tuple[int, int]] = {}  # features and bytes, by digest

    def needs(self, request: Request) -> Sequence[Need]:
        if not request.images:
            return ()
        if self._images is None:
            raise InvalidRequestError("the model takes no images", param="messages")
        end = 0
        for image in request.images:
            is_inside = end <= image.offset < image.offset + image.num_tokens
            end = image.offset + image.num_tokens
            if not is_inside or end > len(request.prompt_token_ids):
                raise InvalidRequestError("an image is not in the prompt", param="images")
        each = {image.digest: image for image in request.images}  # one may be there twice
        return [
            Need(self, digest, image, cost=image.num_features) for digest, image in each.items()
        ]

    def load(self, need: Need) -> None:
        assert self._images is not None
        image: ImageInput = need.source
        self._found[image.digest] = self._images.encode(image.digest, image.data)
        self.num_encoded += 1

    def drop(self, key: Any) -> None:
        assert self._images is not None
        self._images.drop(key)
        del self._found[key]

    def size(self, key: Hashable) -> int:
        return self._found[key][1]

    def hand_over(self, request: Request) -> Request:
        if not request.images:
            return request
        for image in request.images:
            number, _ = self._found[image.digest]
            if image.num_features != number:
                raise InvalidRequestError(
                    f"the image has {number} features, but {image.num_features} tokens in the "
                    "prompt",
                    param="messages",
                )
        bare = tuple(msgspec.structs.replace(image, data=b"") for image in request.images)
        return msgspec.structs.replace(request, images=bare)

    def title(self, _: Need) -> str:
        return "the image"
