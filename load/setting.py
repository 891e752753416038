"""A setting of `penstock serve` that benches compare with others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.config import QUANTIZATIONS, EngineConfig
from penstock.gateway.launch.cli import parse_engine_config


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run: what somebody wrote, and the options of `serve` that it stands for."""

    name: str
    words: Sequence[str]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """A command line of `serve` (`--quantization int8 --kv-cache-dtype int8`), or in short its
        options without hyphens, comma-separated (`int8,kv-cache-dtype=int8`): the name of a
        quantization stands for it, `no-…` turns off, and `gguf=FILE` is another model or file."""
        if text.lstrip().startswith("-") or not text:
            return cls(text or "as it is", shlex.split(text))
        words: list[str] = []
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if name in QUANTIZATIONS and not equals:
                words += ["--quantization", name]
            else:
                words.append(f"--model={value}" if name == "gguf" else f"--{part}")
        return cls(text, words)

    def config(self, model: str, *, num_threads: int = 0) -> EngineConfig:
        """The engine's settings; a mistake in them ends the command, as on any command line."""
        config = parse_engine_config(self.words, model=model)
        device = config.device
        return replace(
            config, device=replace(device, num_threads=num_threads or device.num_threads)
        )
