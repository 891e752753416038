"""The supported architectures, with their configuration and weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config_fields import ConfigFields, read_model_fields
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.eagle3_head import EAGLE3_ARCHITECTURES
from penstock.engine.models.families import (
    llama_module_names,
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
        module_names: a module of the decoder → the checkpoint's modules it is made of.
    """

    read_config: Callable[[ConfigFields], DecoderConfig]
    module_names: Callable[[str], tuple[str, ...]] = llama_module_names


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
    fields = read_model_fields(path)
    names = fields.texts("architectures")
    for name in names:
        if name in EAGLE3_ARCHITECTURES:
            raise fields.error(
                "architectures",
                f"{name} is a head for another model: choose it by --speculative-config "
                '\'{"method": "eagle3", "model": …}\'',
            )
        if name in ARCHITECTURES:
            architecture = ARCHITECTURES[name]
            return architecture, architecture.read_config(fields)
    raise fields.error(
        "architectures",
        f"{', '.join(names) or 'none'} is not supported; supported: {', '.join(ARCHITECTURES)}",
    )
