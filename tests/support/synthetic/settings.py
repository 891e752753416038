"""Settings of the synthetic server, one flag each; a request may change some for itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_FLAG = "--"


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSettings:
    """What the server does unless a request says otherwise in its field `synthetic`."""

    port: int = _setting(0, "port of 127.0.0.1 to listen on; 0 takes a free one")
    model: str = _setting("synthetic", "name of the model")
    ttft_ms: float = _setting(50.0, "from a request to its first token")
    itl_ms: float = _setting(10.0, "from one token to the next")
    ttft_jitter_ms: float = _setting(0.0, "the first token comes up to so much earlier or later")
    itl_jitter_ms: float = _setting(
        0.0, "each token comes up to so much earlier or later; at most half of --itl-ms counts"
    )
    tokens_per_event: int = _setting(1, "tokens in each event but the first, which has one")
    default_tokens: int = _setting(64, "of an answer whose length nobody asks for")
    max_model_len: int = _setting(8192, "tokens of prompt and answer")
    max_body_bytes: int = _setting(4 << 20, "largest request body")
    seed: int = _setting(0, "of jitter, faults and refusals")
    fault: str = _setting("", "of a stream after so many tokens, as cut:17 (see plan.py)")
    fault_share: float = _setting(1.0, "share of streams that have the fault")
    refuse_share: float = _setting(0.0, "share of requests that are refused")
    refuse_status: int = _setting(503, "with this status")
    leak_bytes: int = _setting(0, "memory never given back, per response")


# What a request may change for itself.
PER_REQUEST = (
    "ttft_ms",
    "itl_ms",
    "ttft_jitter_ms",
    "itl_jitter_ms",
    "tokens_per_event",
    "seed",
    "fault",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for item in fields(SyntheticSettings):
        parser.add_argument(
            _FLAG + item.name.replace("_", "-"),
            type=type(item.default),
            default=item.default,
            help=item.metadata["help"],
        )


def from_arguments(parsed: argparse.Namespace) -> SyntheticSettings:
    return SyntheticSettings(
        **{item.name: getattr(parsed, item.name) for item in fields(SyntheticSettings)}
    )


def as_arguments(settings: SyntheticSettings) -> Sequence[str]:
    """The flags that give these settings."""
    return [f"{_FLAG}{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
