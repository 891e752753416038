"""Exceptions of the engine's torch-free surface.

    EngineError
    ├── ConfigError             a setting that cannot work; start-up stops with this text
    │   └── ModelLoadError      model files missing, corrupt or of an unsupported kind
    ├── InvalidRequestError     this one request cannot be served; names the parameter at fault
    │   └── PromptTooLongError  prompt (plus requested output) exceeds the context
    └── EngineDeadError         the engine is gone; requests in flight were lost

`assert` is for our own bugs; a user's or a config's mistake raises from here.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """A configuration that cannot work. The message says which flag and what to do."""


class ModelLoadError(ConfigError):
    """Model files are missing, corrupt, or of an architecture we do not run."""


class InvalidRequestError(EngineError):
    """One request is at fault; others go on.

    Args:
        message: what is wrong, in words for the caller.
        param: the parameter at fault, as the caller spelt it, if one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a token of output within `max_model_len`."""


class EngineDeadError(EngineError):
    """The engine process has died or cannot be reached."""
