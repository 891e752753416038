"""Messages as frames: one msgpack array each, whose first element is the type's tag.

On a byte stream each frame is preceded by its length. `messages` defines the messages; msgspec
encodes and decodes them from these definitions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from penstock.engine.errors import InvalidRequestError
from penstock.engine.protocol.messages import Message, Submit

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 28
_ENCODER = msgspec.msgpack.Encoder(enc_hook=int)  # for `DefaultLimit`
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def framed(frame: bytes) -> bytes:
    """A frame preceded by its length."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Cuts a connection's bytes into frames."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # the start of an incomplete frame
        self._num_missing = 0  # bytes of it, as far as that is known

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete now; consume all of them before the next call.

        Raises:
            ValueError: not a stream of frames; the connection cannot be used any further.
        """
        if self._rest:
            self._rest.append(data)
            self._num_missing -= len(data)
            if self._num_missing > 0:
                return  # a long frame is put together once, not with each part
            data = b"".join(self._rest)
        start = 0
        self._num_missing = 0
        while (begin := start + _LENGTH.size) <= len(data):
            (size,) = _LENGTH.unpack_from(data, start)
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if begin + size > len(data):
                self._num_missing = begin + size - len(data)
                break
            start = begin + size
            yield data[begin:start]
        self._rest = [data[start:]] if start < len(data) else []


def encode(message: Message) -> bytes:
    """One frame."""
    if isinstance(message, Submit):
        message = _without_text_fields(message)
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message:
    """The message in a frame; raises ValueError if it is not one of ours, or a field's value cannot
    be. What depends on an engine's sizes is checked in `checks`."""
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError, InvalidRequestError) as error:
        raise ValueError(f"not a penstock frame: {error}") from error


def submitted_id(frame: bytes) -> str | None:
    """The id of the request in a `Submit` that cannot be decoded; None: it is something else."""
    try:
        [tag, [request_id, *_], *_] = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        return None
    return request_id if tag == "submit" and isinstance(request_id, str) else None


def _without_text_fields(submit: Submit) -> Submit:
    """Only `engine.text` reads these fields; it runs where ids become text."""
    params = submit.request.sampling_params
    if (
        not (params.stop or params.bad_words)
        and not params.include_stop_str_in_output
        and params.skip_special_tokens
        and params.spaces_between_special_tokens
    ):
        return submit
    params = msgspec.structs.replace(
        params,
        stop=(),
        bad_words=(),
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    request = msgspec.structs.replace(submit.request, sampling_params=params)
    return msgspec.structs.replace(submit, request=request)
