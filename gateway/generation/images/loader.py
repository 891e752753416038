"""The images of a request: from what a caller sent to files that have been checked, and from there
to the places of their tokens in the prompt.

A file is opened, and its pixels are decoded, before anything else is done for the request, so a
damaged or hostile one gets a 400 that names it. That happens in one thread, one image at a time:
many at once take no more memory, and no time from the event loop.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import ImageInput
from penstock.engine.vision.image_file import LoadedImage, data_of_url, load_image
from penstock.engine.vision.image_tokens import ImageTokens
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images.fetch import ImageFetcher
from penstock.gateway.generation.images.local import LocalImages

_MAX_WAITING = 64  # images that wait for the thread; each keeps its file in memory
_MEDIA_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """What a caller sent for an image.

    Attributes:
        url: a data URL, or one of a listed host, or of a file in a directory that is open.
        param: where it is in the request.
    """

    url: str
    param: str


def media_type(data: bytes) -> str:
    """The media type of an image file that was checked."""
    found = (name for magic, name in _MEDIA_TYPES.items() if data.startswith(magic))
    return next(found, "image/webp")


class ImageLoader:
    """
    Args:
        tokens: how the model takes images; None: it takes none.
        local: reads those of this machine.
        max_images: of a prompt.
        max_bytes: of an image's file.
    """

    def __init__(
        self,
        tokens: ImageTokens | None,
        fetcher: ImageFetcher,
        local: LocalImages,
        *,
        max_images: int,
        max_bytes: int,
    ) -> None:
        self._tokens, self._fetcher, self._local = tokens, fetcher, local
        self._max_images, self._max_bytes = max_images, max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-image")
        self._num_waiting = 0

    def close(self) -> None:
        """Drop work that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def load(self, sources: Sequence[ImageSource]) -> list[LoadedImage]:
        """The images of a request, in order.

        Raises:
            RequestRefusedError: 400 naming the image that cannot be used, or is too many. 503: too
                many are waiting.
        """
        if not sources:
            return []
        if self._tokens is None:
            raise RequestRefusedError(
                "the model takes no images", code="unsupported_parameter", param=sources[0].param
            )
        self.check_number(
            len(sources), param=sources[min(self._max_images, len(sources) - 1)].param
        )
        return [await self._load(source) for source in sources]

    def check_number(self, num_images: int, *, param: str) -> None:
        """
        Raises:
            RequestRefusedError: a prompt may not have so many.
        """
        if num_images > self._max_images:
            raise RequestRefusedError(
                f"the prompt has {num_images} images, but this server accepts {self._max_images} "
                "(--limit-mm-per-prompt)",
                code="invalid_value",
                param=param,
            )

    async def _load(self, source: ImageSource) -> LoadedImage:
        data = None
        scheme = source.url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            data = await self._fetcher.fetch(source.url, param=source.param)
        elif scheme not in ("data", "file"):
            raise _refusal(source, "must be a data URL, or begin with https:// or file://")
        if self._num_waiting >= _MAX_WAITING:
            raise RequestRefusedError(
                f"{_MAX_WAITING} images are already being checked",
                code="server_overloaded",
                status=503,
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._checked, source, data
            )
        finally:
            self._num_waiting -= 1

    def _checked(self, source: ImageSource, data: bytes | None) -> LoadedImage:
        """In the thread.

        Args:
            data: the file, if it was fetched.
        """
        try:
            if data is None and source.url[:5].lower() == "file:":
                data = self._local.read(source.url)
            elif data is None:
                data = data_of_url(source.url, max_bytes=self._max_bytes)
            if len(data) > self._max_bytes:
                raise InvalidRequestError(
                    f"the image has {len(data)} bytes, but this server accepts {self._max_bytes}"
                )
            return load_image(data)
        except InvalidRequestError as error:
            raise _refusal(source, str(error)) from error

    # -- in a prompt -------------------------------------------------------------------------

    def expanded(self, text: str, images: Sequence[LoadedImage], *, param: str) -> str:
        """A rendered prompt with the tokens of its images in the place of their placeholders.

        Raises:
            RequestRefusedError: it has another number of placeholders.
        """
        assert self._tokens is not None, "they were loaded"
        try:
            return self._tokens.expanded(text, images)
        except InvalidRequestError as error:
            raise RequestRefusedError(str(error), code="invalid_value", param=param) from error

    def located(
        self, token_ids: Sequence[int], images: Sequence[LoadedImage], *, param: str
    ) -> tuple[ImageInput, ...]:
        """The images of a prompt with the places of their tokens.

        Raises:
            RequestRefusedError: the prompt has other image tokens than theirs.
        """
        if not images:
            return ()
        assert self._tokens is not None, "they were loaded"
        try:
            return self._tokens.located(token_ids, images)
        except InvalidRequestError as error:
            raise RequestRefusedError(str(error), code="invalid_value", param=param) from error


# -- in stored items ------------------------------------------------------------------------------

_STORED = "sha256:"


def stored_url(image: LoadedImage) -> str:
    """What stands for an image in a stored item: its digest and size."""
    return f"{_STORED}{image.digest};{image.width}x{image.height}"


def stored_image(url: str, files: Mapping[str, bytes]) -> LoadedImage:
    """The image that `stored_url` named.

    Args:
        files: by digest.
    """
    digest, _, size = url.removeprefix(_STORED).partition(";")
    width, height = map(int, size.split("x"))
    return LoadedImage(digest=digest, data=files[digest], width=width, height=height)


def shown_url(url: str, files: Mapping[str, bytes]) -> str:
    """The image that `stored_url` named, as a data URL."""
    data = stored_image(url, files).data
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def _refusal(source: ImageSource, why: str) -> RequestRefusedError:
    return RequestRefusedError(f"{source.param}: {why}", code="invalid_image", param=source.param)
