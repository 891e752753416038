"""Language models within models that take images: their `text_config`, and their names.

Only those in which the features of images take the place of embeddings, and nothing else: other
ones have positions in a grid (Qwen2-VL), or let an image's tokens attend to all of it (Gemma 3).
"""

from __future__ import annotations

from typing import Any

from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.names import WeightNames

_TYPE, _TIED = "model_type", "tie_word_embeddings"
_LLAVA = WeightNames(
    root="model.language_model.", others=(("language_model.model.", "language_model.lm_head"),)
)
_IDEFICS = WeightNames(root="model.text_model.")
WITH_IMAGES = {
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "SmolVLMForConditionalGeneration": _IDEFICS,
}
_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
}  # fmt: skip
# By model_type: the architecture, and what checkpoints leave out, as `transformers` completes it.
_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": (
        "MistralForCausalLM",
        _LLAMA | {"intermediate_size": 14_336, "max_position_embeddings": 131_072},
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN2),
    "qwen3": ("Qwen3ForCausalLM", _QWEN2),
}


def text_architecture(fields: ConfigFields) -> str:
    """Of the language model within a model that takes images; empty: it is none that we know."""
    if not set(fields.texts("architectures")) & WITH_IMAGES.keys():
        return ""
    text = fields.section("text_config")
    return _TEXT_MODELS.get(text.text(_TYPE, "llama"), ("", {}))[0]


def text_fields(fields: ConfigFields) -> ConfigFields:
    """The configuration of the language model.

    Raises:
        ModelLoadError: a field has another type.
    """
    text = fields.section("text_config")
    _, defaults = _TEXT_MODELS[text.text(_TYPE, "llama")]
    dtype = "dtype" if "dtype" in fields else "torch_dtype"
    is_tied = fields.boolean(_TIED, False)
    if fields.text(_TYPE, "") == "llava":
        is_tied = is_tied or text.boolean(_TIED, False)
    whole: dict[str, Any] = {_TIED: is_tied}
    if dtype in fields:
        whole[dtype] = fields.text(dtype)
    return text.completed(defaults, whole)
