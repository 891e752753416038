"""penstock's engine: continuous batching over a paged KV cache.

This is the torch-free public surface. Names that need a third-party package, or much else, are
loaded on first use, so the supervisor can read settings without; only `LLM` loads torch.
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
from penstock.engine.request import (
    BeamSearch,
    FinishReason,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    StructuredOutputs,
    TokenLogprobs,
)
from penstock.engine.structured_outputs.forms import structured_outputs

if TYPE_CHECKING:
    from penstock.engine.offline.llm import LLM
    from penstock.engine.offline.outputs import CompletionOutput, Logprob, PromptOutput
    from penstock.engine.offline.prompts import LoRARequest
    from penstock.engine.text import ChatTemplate, OutputText, Tokenizer

__all__ = [
    "BeamSearch",
    "ChatTemplate",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "LLM",
    "LoRARequest",
    "Logprob",
    "ModelLoadError",
    "OutputText",
    "PromptOutput",
    "PromptTooLongError",
    "Request",
    "RequestOutput",
    "Retention",
    "SamplingParams",
    "StructuredOutputs",
    "TokenLogprobs",
    "Tokenizer",
    "structured_outputs",
]

_LAZY = {
    "ChatTemplate": "penstock.engine.text",
    "CompletionOutput": "penstock.engine.offline.outputs",
    "Logprob": "penstock.engine.offline.outputs",
    "LLM": "penstock.engine.offline.llm",
    "LoRARequest": "penstock.engine.offline.prompts",
    "OutputText": "penstock.engine.text",
    "PromptOutput": "penstock.engine.offline.outputs",
    "Tokenizer": "penstock.engine.text",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
