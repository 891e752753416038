"""Which requests with images may run: those whose images are encoded.

A request waits here, outside the scheduler, while a thread encodes its images, so the steps go on.
One image is encoded at a time. The next one is that of the tenant for which the fewest tokens have
been encoded; within a tenant, of the request that came first. Features are kept as long as a
request needs them, and after that, least recently used first, up to a number of bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import ImageInput, Request, RequestOutput, Requests, refusal


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


class ImageQueue:
    """
    Args:
        images: None: the model takes none.
        max_bytes: of features; more only while requests need them.

    Attributes:
        wake: called in another thread when an image has been encoded.
        num_encoded: images that were encoded so far.
        num_hits: images of requests whose features were there already.
    """

    def __init__(self, images: Images | None, requests: Requests, *, max_bytes: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.num_encoded = self.num_hits = 0
        self._images, self._requests, self._max_bytes = images, requests, max_bytes
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="penstock-images")
        self._waiting: dict[str, Request] = {}  # by request id, in the order of arrival
        self._aborted: dict[str, list[int]] = {}  # of waiting requests: branches to abort
        self._live: dict[str, frozenset[str]] = {}  # by request id, in the scheduler: digests
        self._bytes: dict[str, int] = {}  # by digest, the least recently used first
        self._num_features: dict[str, int] = {}  # by digest
        self._served: dict[str, float] = {}  # by tenant with waiting requests: encoded tokens
        self._in_thread: str | None = None  # the digest that is encoded now
        self._done: deque[tuple[str, tuple[int, int], InvalidRequestError | None]] = deque()
        self._has_news = threading.Event()
        self._lacks_room = False

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `admit` would do something."""
        if self._has_news.is_set():
            return True
        return self._lacks_room and not all(map(self._requests.has_request, self._live))

    @property
    def num_bytes(self) -> int:
        """The size of the features that are kept."""
        return sum(self._bytes.values())

    def check(self, request: Request) -> None:
        """
        Raises:
            InvalidRequestError: the model takes no images, or theirs are not in the prompt.
        """
        if self._images is None:
            raise InvalidRequestError("the model takes no images", param="messages")
        end = 0
        for image in request.images:
            is_inside = end <= image.offset < image.offset + image.num_tokens
            end = image.offset + image.num_tokens
            if not is_inside or end > len(request.prompt_token_ids):
                raise InvalidRequestError("an image is not in the prompt", param="images")

    def add(self, request: Request) -> None:
        digests = {image.digest for image in request.images}
        self.num_hits += len(digests & self._bytes.keys())
        self._waiting[request.request_id] = request
        least = min(self._served.values(), default=0.0)  # who was away has no claim for it
        self._served.setdefault(request.tenant, least)
        self._has_news.set()

    def abort(self, request_id: str, *, index: int | None = None) -> bool:
        """Drop a waiting request, or one of its samples; whether it waits here."""
        request = self._waiting.get(request_id)
        if request is None:
            return False
        if index is None or request.sampling_params.num_branches == 1:
            self._leave(request)
        else:
            self._aborted.setdefault(request_id, []).append(index)
        return True

    def has_request(self, request_id: str) -> bool:
        """Whether it waits here."""
        return request_id in self._waiting

    def wait(self) -> None:
        """Wait until an image has been encoded."""
        self._has_news.wait()

    def admit(self) -> list[RequestOutput]:
        """Hand over the requests that may run, and have an image of another encoded; the outputs
        of those that cannot run."""
        self._has_news.clear()
        outputs = self._collect()
        has_request = self._requests.has_request
        self._live = {key: each for key, each in self._live.items() if has_request(key)}
        for request in list(self._waiting.values()):
            if all(image.digest in self._bytes for image in request.images):
                outputs += self._hand_over(request)
        self._make_room()
        self._encode_next()
        return outputs

    def close(self) -> None:
        self._encoding.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, request: Request) -> list[RequestOutput]:
        request_id, digests = request.request_id, [image.digest for image in request.images]
        for digest in digests:
            self._bytes[digest] = self._bytes.pop(digest)
        aborted = self._aborted.get(request_id, ())
        self._leave(request)
        bare = tuple(msgspec.structs.replace(image, data=b"") for image in request.images)
        try:
            for image in request.images:
                self._check_number(image)
            self._requests.add(msgspec.structs.replace(request, images=bare))
        except InvalidRequestError as error:
            return [refusal(request_id, error, param="messages")]
        self._live[request_id] = frozenset(digests)
        for index in aborted:
            self._requests.abort(request_id, index=index)
        return []

    def _check_number(self, image: ImageInput) -> None:
        number = self._num_features[image.digest]
        if image.num_features != number:
            raise InvalidRequestError(
                f"the image has {number} features, but {image.num_features} tokens in the prompt"
            )

    def _encode_next(self) -> None:
        """Begin with the next image, unless one is being encoded, or features take too much."""
        if self._in_thread is not None or not self._waiting:
            return
        is_full = sum(self._bytes[each] for each in self._needed()) >= self._max_bytes
        self._lacks_room = is_full and bool(self._live)
        if self._lacks_room:
            return
        # `min` takes the first of equal ones, so a tenant's requests keep their order.
        request = min(self._waiting.values(), key=lambda each: self._served[each.tenant])
        image = next(each for each in request.images if each.digest not in self._bytes)
        self._served[request.tenant] += image.num_features / request.weight
        self._in_thread = image.digest
        self._encoding.submit(self._encode, image)

    def _encode(self, image: ImageInput) -> None:
        """In the thread."""
        size, error = (0, 0), None
        assert self._images is not None
        try:
            size = self._images.encode(image.digest, image.data)
        except InvalidRequestError as refusal:
            error = refusal
        except BaseException as failure:  # the thread's, which nobody waits for
            error = InvalidRequestError(f"the image cannot be encoded: {failure!r:.200}")
        self._done.append((image.digest, size, error))
        self._has_news.set()
        self.wake()

    def _collect(self) -> list[RequestOutput]:
        """Note what the thread has done; the ends of requests with an image that it could not
        encode."""
        outputs: list[RequestOutput] = []
        while self._done:
            digest, size, error = self._done.popleft()
            self._in_thread = None
            if error is None:
                self._num_features[digest], self._bytes[digest] = size
                self.num_encoded += 1
                continue
            for request in list(self._waiting.values()):
                if any(image.digest == digest for image in request.images):
                    self._leave(request)
                    outputs.append(refusal(request.request_id, error, param="messages"))
        return outputs

    def _leave(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._aborted.pop(request.request_id, None)
        if all(each.tenant != request.tenant for each in self._waiting.values()):
            del self._served[request.tenant]

    def _needed(self) -> set[str]:
        """Digests of features that requests need."""
        needed = set[str]().union(*self._live.values())
        for request in self._waiting.values():
            needed |= {image.digest for image in request.images} & self._bytes.keys()
        return needed

    def _make_room(self) -> None:
        """Forget features that nobody needs until the rest is small enough."""
        if self.num_bytes <= self._max_bytes:
            return
        needed = self._needed()
        for digest in [each for each in self._bytes if each not in needed]:
            assert self._images is not None
            self._images.drop(digest)
            del self._bytes[digest], self._num_features[digest]
            if self.num_bytes <= self._max_bytes:
                break
