"""Tiny configurations of every architecture, and the options that a family's checkpoints have."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that logits differ by more than rounding
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODEL_TYPES = {
    "HeliumForCausalLM": "helium",  # of no native family
    "ArceeForCausalLM": "arcee",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteMoeForCausalLM": "granitemoe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "BloomForCausalLM": "bloom",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GraniteForCausalLM": "granite",
    "MptForCausalLM": "mpt",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "OPTForCausalLM": "opt",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
_GPT2 = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "num_key_value_heads": "",
    "head_dim": "",
}
# What a kind of `transformers` calls the fields of a shape; no name: it has none.
_FIELD_NAMES: dict[str, dict[str, str]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _GPT2,
    "gpt_neox": {"num_key_value_heads": "", "head_dim": ""},
    "bloom": _GPT2
    | {"hidden_size": "hidden_size", "intermediate_size": "", "max_position_embeddings": ""},
    "mpt": _GPT2
    | {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": "",
    },
    "falcon": {
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "",
    },
    "opt": {"intermediate_size": "ffn_dim", "num_key_value_heads": "", "head_dim": "",
            "initializer_range": "init_std"},
}  # fmt: skip


def tiny_config(architecture: str, **options: Any) -> PretrainedConfig:
    """options: fields, by Llama's names or by those of the family."""
    kind = _MODEL_TYPES[architecture]
    names = _FIELD_NAMES.get(kind, {})
    fields = {names.get(name, name): value for name, value in (_SHAPE | options).items()}
    fields.pop("", None)
    return AutoConfig.for_model(kind, **fields)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "starcoder": ("GPTBigCodeForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 8}),
    "pythia": ("GPTNeoXForCausalLM", {}),
    "gpt_neox sequential": (
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "stablelm 2 12b": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True},
    ),
    "phi2": ("PhiForCausalLM", {"num_key_value_heads": 4}),
    "phi with normed keys": ("PhiForCausalLM", {"qk_layernorm": True}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9, "pad_token_id": 0}),
    "phi3 128k": (
        "Phi3ForCausalLM",
        {
            "pad_token_id": 0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 1,  # what `generate` computes first is long, too
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.3, 1.1, 2.0, 3.0, 9.0],
                "attention_factor": 1.2,
                "rope_theta": 10000.0,
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", {"hidden_act": "gelu"}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "falcon 7b": ("FalconForCausalLM", {}),
    "falcon 40b": ("FalconForCausalLM", {"new_decoder_architecture": True}),
    "falcon rw": (
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
         "num_key_value_heads": 4},
    ),
    "bloom": ("BloomForCausalLM", {}),
    "mpt": ("MptForCausalLM", {}),
    "mpt of six heads": (
        "MptForCausalLM",
        {"num_attention_heads": 6, "hidden_size": 96, "attn_config": {"clip_qkv": 0.5}},
    ),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.5}),
    "cohere with normed keys": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "sliding_window": 9,
            "logit_scale": 0.5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "arcee": ("ArceeForCausalLM", {"mlp_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 9}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 0,
        },
    ),
    "glm": ("GlmForCausalLM", {"pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", {"pad_token_id": 0}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "ernie": ("Ernie4_5ForCausalLM", {"use_bias": True}),
    "seed_oss": ("SeedOssForCausalLM", {"attention_out_bias": True}),
}  # fmt: skip

# Each switch of the decoder that has code of its own is on in one of them at least.
OF_EVERY_SWITCH = (
    "gpt2",  # a table of positions, MLPs without gates, biases, a tied head
    "opt",  # positions that begin later, relu
    "arcee",  # relu squared
    "gptj",  # pairs that lie side by side, a part of a head turned, MLPs that read the same norm
    "pythia",  # MLPs beside attention with a norm of their own
    "phi with normed keys",  # layer norms of heads, with biases; one of the output head
    "phi3 128k",  # long factors
    "gemma2",  # soft caps, norms after blocks, offsets of norms, windows of some layers
    "gemma3",  # two kinds of positions, norms of heads
    "bloom",  # ALiBi, a normalised embedding
    "mpt of six heads",  # other slopes, a limit for queries and keys
    "olmo2",  # no norms before blocks, norms over all heads
    "granite",  # factors of the embedding, the stream, scores and logits
    "smollm3",  # layers without positions
)
SIX = ("gpt2", "gptj", "gemma2", "bloom", "olmo2", "smollm3")
