"""The supported architectures, with their configuration and weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.json_file import read_json
from penstock.engine.models.config_fields import ConfigFields
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.families import (
    llama_weight_names,
    read_llama_config,
    read_mistral_config,
    read_qwen2_config,
    read_qwen3_config,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How checkpoints of one kind become our decoder.

    Attributes:
        read_config: `config.json` → the decoder's configuration.
        weight_names: a parameter of the decoder → the checkpoint's tensors it is made of.
    """

    read_config: Callable[[ConfigFields], DecoderConfig]
    weight_names: Callable[[str], tuple[str, ...]] = llama_weight_names


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(read_config=read_llama_config),
    "MistralForCausalLM": Architecture(read_config=read_mistral_config),
    "Qwen2ForCausalLM": Architecture(read_config=read_qwen2_config),
    "Qwen3ForCausalLM": Architecture(read_config=read_qwen3_config),
}


def read_model_config(path: Path) -> tuple[Architecture, DecoderConfig]:
    """The architecture and configuration of the model in directory `path`.

    Raises:
        ModelLoadError: no readable `config.json`, an unsupported architecture, or a field that is
            missing, malformed or unsupported.
    """
    config_path = path / "config.json"
    fields = ConfigFields(read_json(config_path), path=config_path)
    names = fields.texts("architectures")
    for name in names:
        if name in ARCHITECTURES:
            architecture = ARCHITECTURES[name]
            return architecture, architecture.read_config(fields)
    raise fields.error(
        "architectures",
        f"{', '.join(names) or 'none'} is not supported; supported: {', '.join(ARCHITECTURES)}",
    )
