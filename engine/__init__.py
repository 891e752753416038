"""penstock's engine: continuous batching over a paged KV cache.

This is the torch-free public surface. What needs a third-party package is loaded when it is first
asked for, so the supervisor can read settings without importing any.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.engine.config import EngineConfig
from penstock.engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
)
from penstock.engine.request import FinishReason, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.text import ChatTemplate, OutputText, Tokenizer

__all__ = [
    "ChatTemplate",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "ModelLoadError",
    "OutputText",
    "PromptTooLongError",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Tokenizer",
]

_LAZY = {
    "ChatTemplate": "penstock.engine.text",
    "OutputText": "penstock.engine.text",
    "Tokenizer": "penstock.engine.text",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
