"""Exceptions of the engine's torch-free surface.

    EngineError
    ├── ConfigError             a setting that cannot work; start-up stops with its message
    │   └── ModelLoadError      model files missing, corrupt or of an unsupported kind
    ├── InvalidRequestError     this one request cannot be served; names the invalid parameter
    │   └── PromptTooLongError  prompt (plus requested output) exceeds the context
    └── EngineDeadError         the engine has died; requests in flight are lost

Mistakes in requests and settings raise one of these; `assert` is for bugs in this code.
"""

from __future__ import annotations

_MAX_MESSAGE_CHARS, _NUM_LAST_CHARS = 1000, 200


class EngineError(Exception):
    """Base class of the engine's exceptions."""


class ConfigError(EngineError):
    """A configuration that cannot work. The message says which flag and what to do, in one line
    of bounded length, whatever a file's text in it."""

    def __init__(self, message: str) -> None:
        shown = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode()
            for each in message
        )
        if len(shown) > _MAX_MESSAGE_CHARS:
            shown = f"{shown[: _MAX_MESSAGE_CHARS - _NUM_LAST_CHARS]} … {shown[-_NUM_LAST_CHARS:]}"
        super().__init__(shown)


class ModelLoadError(ConfigError):
    """Model files are missing, corrupt, or of an unsupported architecture."""


class UnsupportedOptionError(ModelLoadError):
    """A configuration makes sense, but has an option that our own code has not."""


class InvalidRequestError(EngineError):
    """One request is invalid; others are not affected.

    Args:
        message: what is wrong, written for the caller.
        param: the invalid parameter, by the caller's name for it, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a token of output within `max_model_len`.

    By its message, not its code, most clients know that they have to shorten the conversation or to
    ask another model: LiteLLM by OpenAI's first sentence, LangChain by the word at the end.

    Args:
        excess: what exceeds the context, as a sentence.
        max_model_len: the model's context; None: whoever catches this error adds it.
    """

    def __init__(
        self, excess: str, *, max_model_len: int | None = None, param: str | None = None
    ) -> None:
        message = excess
        if max_model_len is not None:
            message = (
                f"This model's maximum context length is {max_model_len} tokens. However, {excess} "
                "(context_length_exceeded)"
            )
        super().__init__(message, param=param)


class EngineDeadError(EngineError):
    """The engine process has died or cannot be reached."""
