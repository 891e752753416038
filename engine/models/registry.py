"""The supported architectures, with their configuration and weight names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ModelLoadError, UnsupportedOptionError
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.families import (
    alibi,
    cohere,
    experts,
    gemma,
    gpt,
    llama,
    phi,
    post_norm,
)
from penstock.engine.models.families.with_images import (
    WITH_IMAGES,
    text_architecture,
    text_fields,
)
from penstock.engine.models.names import LLAMA_NAMES, WeightNames
from penstock.engine.speculative.device.eagle3_head import EAGLE3_ARCHITECTURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How checkpoints of one kind become our decoder.

    Attributes:
        read_config: `config.json` → the decoder's configuration.
        names: of the checkpoint's modules.
        is_headless: it makes vectors or scores; the embedding takes the place of an output head,
            which is never used.
        has_transposed_experts: their tensors are as gpt-oss's.
        takes_images: it is within a model that encodes some.
    """

    read_config: Callable[[ConfigFields], DecoderConfig]
    names: WeightNames = LLAMA_NAMES
    is_headless: bool = False
    has_transposed_experts: bool = False
    takes_images: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(read_config=llama.read_llama_config),
    "ArceeForCausalLM": Architecture(read_config=llama.read_arcee_config),
    "MistralForCausalLM": Architecture(read_config=llama.read_mistral_config),
    "Qwen2ForCausalLM": Architecture(read_config=llama.read_qwen2_config),
    "Qwen3ForCausalLM": Architecture(read_config=llama.read_qwen3_config),
    "GptOssForCausalLM": Architecture(
        read_config=experts.read_gpt_oss_config,
        names=experts.GPT_OSS_NAMES,
        has_transposed_experts=True,
    ),
    "GraniteMoeForCausalLM": Architecture(
        read_config=experts.read_granite_moe_config, names=experts.GRANITE_MOE_NAMES
    ),
    "MixtralForCausalLM": Architecture(
        read_config=experts.read_mixtral_config, names=experts.MIXTRAL_NAMES
    ),
    "OlmoeForCausalLM": Architecture(read_config=experts.read_olmoe_config),
    "Qwen2MoeForCausalLM": Architecture(read_config=experts.read_qwen2_moe_config),
    "Qwen3MoeForCausalLM": Architecture(read_config=experts.read_qwen3_moe_config),
    "BloomForCausalLM": Architecture(read_config=alibi.read_bloom_config, names=alibi.BLOOM_NAMES),
    "CohereForCausalLM": Architecture(read_config=cohere.read_cohere_config),
    "Cohere2ForCausalLM": Architecture(read_config=cohere.read_cohere2_config),
    "Ernie4_5ForCausalLM": Architecture(read_config=llama.read_ernie_config),
    "Exaone4ForCausalLM": Architecture(
        read_config=post_norm.read_exaone4_config, names=post_norm.POST_NORM_NAMES
    ),
    "FalconForCausalLM": Architecture(
        read_config=alibi.read_falcon_config, names=alibi.FALCON_NAMES
    ),
    "GemmaForCausalLM": Architecture(read_config=gemma.read_gemma_config),
    "Gemma2ForCausalLM": Architecture(
        read_config=gemma.read_gemma2_config, names=gemma.SANDWICH_NAMES
    ),
    "Gemma3ForCausalLM": Architecture(
        read_config=gemma.read_gemma3_config, names=gemma.SANDWICH_NAMES
    ),
    "GlmForCausalLM": Architecture(
        read_config=post_norm.read_glm_config, names=post_norm.GLM_NAMES
    ),
    "Glm4ForCausalLM": Architecture(
        read_config=post_norm.read_glm4_config, names=post_norm.GLM4_NAMES
    ),
    "GPT2LMHeadModel": Architecture(read_config=gpt.read_gpt2_config, names=gpt.GPT2_NAMES),
    "GPTBigCodeForCausalLM": Architecture(
        read_config=gpt.read_gpt_bigcode_config, names=gpt.GPT_BIGCODE_NAMES
    ),
    "GPTJForCausalLM": Architecture(read_config=gpt.read_gptj_config, names=gpt.GPTJ_NAMES),
    "GPTNeoXForCausalLM": Architecture(
        read_config=gpt.read_gpt_neox_config, names=gpt.GPT_NEOX_NAMES
    ),
    "GraniteForCausalLM": Architecture(read_config=llama.read_granite_config),
    "MptForCausalLM": Architecture(read_config=alibi.read_mpt_config, names=alibi.MPT_NAMES),
    "OlmoForCausalLM": Architecture(
        read_config=post_norm.read_olmo_config, names=post_norm.OLMO_NAMES
    ),
    "Olmo2ForCausalLM": Architecture(
        read_config=post_norm.read_olmo2_config, names=post_norm.POST_NORM_NAMES
    ),
    "OPTForCausalLM": Architecture(read_config=gpt.read_opt_config, names=gpt.OPT_NAMES),
    "PhiForCausalLM": Architecture(read_config=phi.read_phi_config, names=phi.PHI_NAMES),
    "Phi3ForCausalLM": Architecture(read_config=phi.read_phi3_config, names=phi.PHI3_NAMES),
    "SeedOssForCausalLM": Architecture(read_config=llama.read_seed_oss_config),
    "SmolLM3ForCausalLM": Architecture(read_config=llama.read_smollm3_config),
    "StableLmForCausalLM": Architecture(
        read_config=cohere.read_stablelm_config, names=cohere.STABLELM_NAMES
    ),
    "Starcoder2ForCausalLM": Architecture(
        read_config=gpt.read_starcoder2_config, names=gpt.STARCODER2_NAMES
    ),
}
_HEADLESS = ("Model", "ForSequenceClassification")


def is_native(config: ModelConfig, path: Path) -> bool:
    """Whether the model in directory `path` runs as one of our families, or through transformers.

    Raises:
        ModelLoadError: no readable `config.json`.
    """
    if config.model_impl != "auto":
        return config.model_impl == "native"
    fields = read_model_fields(path)
    names = fields.texts("architectures")
    if set(names) & WITH_IMAGES.keys():
        is_known = bool(text_architecture(fields)) and config.load_format != "dummy"
        return is_known and missing_option(config, path) is None
    ours = {*ARCHITECTURES, *EAGLE3_ARCHITECTURES}  # a head is refused by its name
    if names and not any(each in ours or _family_of(each) for each in names):
        return False
    return missing_option(config, path) is None


def missing_option(config: ModelConfig, path: Path) -> UnsupportedOptionError | None:
    """Why the model of a native family in directory `path` runs through transformers all the same;
    None: it does not, or nobody has to say why."""
    fields = read_model_fields(path)
    is_family = any(each in ARCHITECTURES for each in fields.texts("architectures"))
    is_family = is_family or bool(text_architecture(fields))
    if config.model_impl != "auto" or not is_family or not (path / "config.json").is_file():
        return None
    try:
        read_model_config(path)
    except UnsupportedOptionError as error:
        return error
    except ModelLoadError:  # the same for everybody
        return None
    return None


def _family_of(name: str) -> str:
    """The native architecture of which `name` makes vectors or scores; empty: of none."""
    families = (name.removesuffix(each) for each in _HEADLESS if name.endswith(each))
    found = f"{next(families, '')}ForCausalLM"
    return found if found in ARCHITECTURES else ""


def read_model_config(
    path: Path, *, max_model_len: int | None = None
) -> tuple[Architecture, DecoderConfig]:
    """The architecture and configuration of the model in directory `path`.

    Args:
        max_model_len: of all sequences; None: the whole context.

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
            return architecture, architecture.read_config(fields).within(max_model_len)
        if name in WITH_IMAGES and (family := text_architecture(fields)):
            architecture = replace(
                ARCHITECTURES[family], names=WITH_IMAGES[name], takes_images=True
            )
            config = architecture.read_config(text_fields(fields)).within(max_model_len)
            return architecture, config
        if family := _family_of(name):
            architecture = replace(ARCHITECTURES[family], is_headless=True)
            config = architecture.read_config(fields).within(max_model_len)
            return architecture, replace(config, is_tied=True)
    raise fields.error(
        "architectures",
        f"{', '.join(names) or 'none'} is not native; native are {', '.join(ARCHITECTURES)}; "
        "--model-impl transformers runs others",
    )


def own_dtype(fields: ConfigFields) -> str:
    """The checkpoint's dtype, as named in its config."""
    return fields.text("dtype" if "dtype" in fields else "torch_dtype", "float32")
