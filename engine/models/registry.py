"""The supported architectures, with their configuration and weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.config import ModelConfig
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
        is_headless: it makes vectors or scores; the embedding takes the place of an output head,
            which is never used.
    """

    read_config: Callable[[ConfigFields], DecoderConfig]
    module_names: Callable[[str], tuple[str, ...]] = llama_module_names
    is_headless: bool = False

    def without_prefix(self) -> Architecture:
        """The same for a checkpoint that was saved from the model without its head."""
        return replace(
            self,
            module_names=lambda module: tuple(
                each.removeprefix("model.") for each in self.module_names(module)
            ),
        )


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(read_config=read_llama_config),
    "MistralForCausalLM": Architecture(read_config=read_mistral_config),
    "Qwen2ForCausalLM": Architecture(read_config=read_qwen2_config),
    "Qwen3ForCausalLM": Architecture(read_config=read_qwen3_config),
}
_HEADLESS = ("Model", "ForSequenceClassification")


def is_native(config: ModelConfig, path: Path) -> bool:
    """Whether the model in directory `path` runs as one of our families, or through transformers.

    Raises:
        ModelLoadError: no readable `config.json`.
    """
    if config.model_impl != "auto":
        return config.model_impl == "native"
    names = read_model_fields(path).texts("architectures")
    ours = {*ARCHITECTURES, *EAGLE3_ARCHITECTURES}  # a head is refused by its name
    return not names or any(each in ours or _family_of(each) for each in names)


def _family_of(name: str) -> str:
    """The native architecture of which `name` makes vectors or scores; empty: of none."""
    families = (name.removesuffix(each) for each in _HEADLESS if name.endswith(each))
    found = f"{next(families, '')}ForCausalLM"
    return found if found in ARCHITECTURES else ""


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
        if family := _family_of(name):
            architecture = replace(ARCHITECTURES[family], is_headless=True)
            return architecture, replace(architecture.read_config(fields), is_tied=True)
    raise fields.error(
        "architectures",
        f"{', '.join(names) or 'none'} is not native; native are {', '.join(ARCHITECTURES)}; "
        "--model-impl transformers runs others",
    )


def own_dtype(fields: ConfigFields) -> str:
    """The checkpoint's dtype, as named in its config."""
    return fields.text("dtype" if "dtype" in fields else "torch_dtype", "float32")
