"""GGUF files of tiny checkpoints, as llama.cpp's converter writes them: its names of keys and its
layouts of tensors, as facts (`conversion/*.py` of llama.cpp), apart from the tables that read them.
Names of tensors are those that the package `gguf` knows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig, PretrainedConfig

from penstock.engine.model_files.gguf.directory import link_parts, write_model
from penstock.engine.model_files.gguf.reader import read_gguf

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors, PretrainedConfig], Tensors]

# Keys, and fields of the configuration, by the names that transformers maps to the family's.
_SHAPE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KV = {"attention.head_count_kv": "num_key_value_heads"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEADS = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_LLAMA = _SHAPE | _KV | _RMS | _HEADS
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE_OPTIONS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    Attributes:
        model: what transformers calls it.
        keys: the fields of its configuration.
        values: other keys.
        changes: what the converter makes of its tensors.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


def _interleaved(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Pairs that are turned together are neighbours."""

    def turned(name: str, values: np.ndarray) -> np.ndarray:
        found = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
        if found is None:
            return values
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)

    return {name: turned(name, each) for name, each in tensors.items()}


def _plus_one(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    return {
        name: each + 1 if name.endswith("norm.weight") else each for name, each in tensors.items()
    }


def _all_queries_first(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Not head by head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        kv_heads = 1

    def split(name: str, values: np.ndarray) -> np.ndarray:
        if "query_key_value" not in name:
            return values
        by_head = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
        parts = (by_head[:, :-2], by_head[:, -2:-1], by_head[:, -1:])
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])

    return {name: split(name, each) for name, each in tensors.items()}


def _turned(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    """GPT-2's matrices as [out, in]."""
    return {
        name: each.T.copy() if re.search(r"\.c_\w+\.weight$", name) else each
        for name, each in tensors.items()
    }


def _whole_experts(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    """One tensor has a projection of all experts; gate and up are two."""
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        elif name.endswith("input_linear.weight"):
            gate, up = np.split(values, 2, axis=1)
            stem = name.replace("input_linear.weight", "").replace(
                "block_sparse_moe", "mlp.experts"
            )
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            found[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = values
    stacked = {name: np.stack([each[n] for n in sorted(each)]) for name, each in experts.items()}
    mixtral = re.compile(r"model\.(layers\.\d+\.)block_sparse_moe")
    return found | {mixtral.sub(r"\1feed_forward", name): each for name, each in stacked.items()}


def _gpt_oss(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    found: Tensors = {}
    for name, values in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            kind = "bias" if last.endswith("bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            found |= {
                f"{stem}.gate_proj.{kind}": rows[:, ::2],
                f"{stem}.up_proj.{kind}": rows[:, 1::2],
            }
        elif last == "down_proj":
            found[f"{stem}.down_proj.weight"] = values.swapaxes(1, 2)
        elif last == "down_proj_bias":
            found[f"{stem}.down_proj.bias"] = values
        else:
            found[f"{name}.weight" if last == "sinks" else name] = values
    return found


def _fused_attention(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    """`--fuse-qkv`"""
    rest = dict(tensors)
    for name in tensors:
        if match := re.fullmatch(r"(model\.layers\.(\d+)\.self_attn\.)q_proj\.(\w+)", name):
            parts = [rest.pop(f"{match[1]}{each}_proj.{match[3]}") for each in "qkv"]
            rest[f"blk.{match[2]}.attn_qkv.{match[3]}"] = np.concatenate(parts)
    return rest


def _one_head_norm(tensors: Tensors, _: PretrainedConfig) -> Tensors:
    norms: dict[str, list[np.ndarray]] = {}
    rest = {}
    for name in sorted(tensors):
        stem, is_norm, _ = name.partition(".norms.")
        if is_norm:
            norms.setdefault(f"{stem}.weight", []).append(tensors[name])
        else:
            rest[name] = tensors[name]
    return rest | {name: np.stack(each) for name, each in norms.items()}


_ROPE = {"rope.dimension_count": 16}
_HALF_ROPE = {"rope.dimension_count": 8}
_WINDOW = {"attention.sliding_window": 9}

FAMILIES: dict[str, tuple[str, Family]] = {
    "llama": ("llama", Family(
        model="LlamaForCausalLM", keys=_LLAMA, values=_ROPE, changes=(_interleaved,))),
    "llama fused": ("llama", Family(
        model="LlamaForCausalLM", keys=_LLAMA, values=_ROPE, options={"attention_bias": True},
        changes=(_interleaved, _fused_attention))),
    "llama with biases": ("llama", Family(
        model="LlamaForCausalLM", keys=_LLAMA, values=_ROPE, changes=(_interleaved,),
        options={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})),
    "mistral": ("llama", Family(
        model="MistralForCausalLM", keys=_LLAMA, values=_ROPE | _WINDOW, changes=(_interleaved,),
        options={"sliding_window": 9})),
    "mixtral": ("llama", Family(
        model="MixtralForCausalLM", keys=_LLAMA | _EXPERTS | {"expert_count": "num_local_experts"},
        options={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        changes=(_interleaved, _whole_experts))),
    "arcee": ("arcee", Family(
        model="ArceeForCausalLM", keys=_LLAMA, values=_ROPE, changes=(_interleaved,))),
    "qwen2": ("qwen2", Family(model="Qwen2ForCausalLM", keys=_LLAMA)),
    "qwen3": ("qwen3", Family(
        model="Qwen3ForCausalLM", keys=_LLAMA, options={"head_dim": 32})),
    "qwen2 moe": ("qwen2moe", Family(
        model="Qwen2MoeForCausalLM",
        keys=_LLAMA | _EXPERTS | {
            "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        options={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 64},
        changes=(_whole_experts,))),
    "qwen3 moe": ("qwen3moe", Family(
        model="Qwen3MoeForCausalLM",
        keys=_LLAMA | _EXPERTS | {
            "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        options={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "norm_topk_prob": True},
        changes=(_whole_experts,))),
    "olmoe": ("olmoe", Family(
        model="OlmoeForCausalLM", keys=_LLAMA | _EXPERTS | {"expert_count": "num_experts"},
        options={"num_experts": 4, "num_experts_per_tok": 2}, changes=(_whole_experts,))),
    "gpt-oss": ("gpt-oss", Family(
        model="GptOssForCausalLM",
        keys=_LLAMA | _EXPERTS | {"expert_count": "num_local_experts",
                                  "expert_feed_forward_length": "intermediate_size"},
        values=_WINDOW | {
            "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0},
        options={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
        changes=(_gpt_oss,))),
    "gemma": ("gemma", Family(model="GemmaForCausalLM", keys=_LLAMA, changes=(_plus_one,))),
    "gemma2": ("gemma2", Family(
        model="Gemma2ForCausalLM", changes=(_plus_one,), values=_WINDOW,
        keys=_LLAMA | {"attn_logit_softcapping": "attn_logit_softcapping",
                       "final_logit_softcapping": "final_logit_softcapping"},
        options={"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0,
                 "final_logit_softcapping": 4.0})),
    "gemma3": ("gemma3", Family(
        model="Gemma3ForCausalLM", changes=(_plus_one,), keys=_LLAMA,
        values=_WINDOW | {"rope.freq_base": 1000000.0, "rope.freq_base_swa": 10000.0},
        options={"sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 6})),
    "phi2": ("phi2", Family(
        model="PhiForCausalLM", keys=_SHAPE | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        values=_HALF_ROPE, options={"num_key_value_heads": 4})),
    "phi3": ("phi3", Family(
        model="Phi3ForCausalLM", keys=_SHAPE | _KV | _RMS, values=_ROPE | _WINDOW,
        options={"sliding_window": 9, "pad_token_id": 0})),
    "gpt2": ("gpt2", Family(
        model="GPT2LMHeadModel", changes=(_turned,),
        keys=_SHAPE | {"feed_forward_length": "n_inner",
                       "attention.layer_norm_epsilon": "layer_norm_epsilon"})),
    "starcoder": ("starcoder", Family(
        model="GPTBigCodeForCausalLM", values={"attention.head_count_kv": 1},
        keys=_SHAPE | {"feed_forward_length": "n_inner",
                       "attention.layer_norm_epsilon": "layer_norm_epsilon"})),
    "gpt_neox": ("gptneox", Family(
        model="GPTNeoXForCausalLM", changes=(_all_queries_first,),
        keys=_SHAPE | {"attention.layer_norm_epsilon": "layer_norm_eps",
                       "use_parallel_residual": "use_parallel_residual"},
        values={"rope.dimension_count": 4})),
    "gpt_neox sequential": ("gptneox", Family(
        model="GPTNeoXForCausalLM", changes=(_all_queries_first,),
        options={"use_parallel_residual": False, "rotary_pct": 1.0},
        keys=_SHAPE | {"attention.layer_norm_epsilon": "layer_norm_eps",
                       "use_parallel_residual": "use_parallel_residual"}, values=_ROPE)),
    "starcoder2": ("starcoder2", Family(
        model="Starcoder2ForCausalLM", options={"sliding_window": None},
        keys=_SHAPE | _KV | {"attention.layer_norm_epsilon": "norm_epsilon"})),
    "stablelm": ("stablelm", Family(
        model="StableLmForCausalLM", options={"use_qkv_bias": True},
        keys=_SHAPE | _KV | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        values={"rope.dimension_count": 4, "use_parallel_residual": True})),
    "stablelm 2 12b": ("stablelm", Family(
        model="StableLmForCausalLM", changes=(_one_head_norm,),
        options={"use_parallel_residual": True, "qk_layernorm": True},
        keys=_SHAPE | _KV | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        values={"rope.dimension_count": 4, "use_parallel_residual": True})),
    "falcon 7b": ("falcon", Family(
        model="FalconForCausalLM", changes=(_all_queries_first,), options={"num_kv_heads": 1},
        keys=_SHAPE | {"feed_forward_length": "ffn_hidden_size",
                       "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        values={"attention.head_count_kv": 1, "tensor_data_layout": "jploski"})),
    "falcon 40b": ("falcon", Family(
        model="FalconForCausalLM", changes=(_all_queries_first,),
        options={"new_decoder_architecture": True},
        keys=_SHAPE | {"feed_forward_length": "ffn_hidden_size",
                       "attention.head_count_kv": "num_kv_heads",
                       "attention.layer_norm_epsilon": "layer_norm_epsilon"})),
    "bloom": ("bloom", Family(
        model="BloomForCausalLM", changes=(_all_queries_first,),
        keys=_SHAPE | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        values={"context_length": 256, "feed_forward_length": 256})),
    "mpt": ("mpt", Family(
        model="MptForCausalLM", options={"attn_config": {"clip_qkv": 0.5}},
        keys=_SHAPE | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        values={"context_length": 256, "feed_forward_length": 256, "attention.clamp_kqv": 0.5,
                "attention.max_alibi_bias": 8.0})),
    "olmo": ("olmo", Family(
        model="OlmoForCausalLM", changes=(_interleaved,), options={"clip_qkv": 1.5},
        keys=_SHAPE | _KV | {"attention.clamp_kqv": "clip_qkv"},
        values={"attention.layer_norm_epsilon": 1e-5})),
    "olmo2": ("olmo2", Family(model="Olmo2ForCausalLM", keys=_LLAMA)),
    "granite": ("granite", Family(
        model="GraniteForCausalLM", changes=(_interleaved,), options=_GRANITE_OPTIONS,
        keys=_SHAPE | _KV | _RMS | _GRANITE)),
    "granite moe": ("granitemoe", Family(
        model="GraniteMoeForCausalLM", changes=(_interleaved, _whole_experts),
        options=_GRANITE_OPTIONS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        keys=_SHAPE | _KV | _RMS | _GRANITE | _EXPERTS | {"expert_count": "num_local_experts"})),
    "cohere": ("command-r", Family(
        model="CohereForCausalLM", options={"logit_scale": 0.5, "use_qk_norm": True},
        keys=_SHAPE | _KV | {"attention.layer_norm_epsilon": "layer_norm_eps",
                             "logit_scale": "logit_scale"},
        values={"rope.scaling.type": "none"})),
    "cohere2": ("cohere2", Family(
        model="Cohere2ForCausalLM",
        options={"logit_scale": 0.5, "sliding_window": 9, "num_hidden_layers": 4},
        keys=_SHAPE | _KV | {"attention.layer_norm_epsilon": "layer_norm_eps",
                             "logit_scale": "logit_scale"},
        values=_WINDOW | _ROPE | {"rope.scaling.type": "none"})),
    "glm": ("chatglm", Family(
        model="GlmForCausalLM", keys=_SHAPE | _KV | _RMS, values=_HALF_ROPE,
        options={"pad_token_id": 0}, changes=(_fused_attention,))),
    "glm4": ("glm4", Family(
        model="Glm4ForCausalLM", keys=_LLAMA, values=_HALF_ROPE, options={"pad_token_id": 0})),
    "exaone4": ("exaone4", Family(
        model="Exaone4ForCausalLM", keys=_LLAMA,
        options={"sliding_window": 9, "sliding_window_pattern": 2},
        values=_WINDOW | {"attention.sliding_window_pattern": [True, False]})),
    "ernie": ("ernie4_5", Family(model="Ernie4_5ForCausalLM", keys=_LLAMA)),
    "seed_oss": ("seed_oss", Family(
        model="SeedOssForCausalLM", keys=_LLAMA, options={"attention_out_bias": True})),
    "smollm3": ("smollm3", Family(
        model="SmolLM3ForCausalLM", keys=_LLAMA, changes=(_interleaved,),
        options={"num_hidden_layers": 4, "pad_token_id": 0})),
}  # fmt: skip


def convert(
    source: Path,
    file: Path,
    types: Callable[[str], str] = lambda _: "BF16",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """A checkpoint with a byte-level tokenizer like the demo model's as one file; its `model_type`
    is the family."""
    name = json.loads((source / "config.json").read_text("utf-8"))["model_type"]
    keys = {"rope.dimension_count": None, **(extra or {})}  # all of a head
    write(source, file, name.replace("_", " "), types, extra=keys, has_tokenizer=True)


def write(
    source: Path,
    file: Path,
    name: str,
    types: Callable[[str], str] = lambda _: "F32",
    *,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    has_tokenizer: bool = False,
) -> None:
    """The checkpoint of a family as one file.

    Args:
        types: a matrix's name in the file → its type.
        extra: more keys of the architecture, or other values; None leaves one out.
        tensors: more of them.
    """
    architecture, family = FAMILIES[name]
    config = AutoConfig.from_pretrained(source)
    writer = gguf.GGUFWriter(file, architecture)
    keys = {key: getattr(config, field, None) for key, field in family.keys.items()
            if key not in family.values}  # fmt: skip
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None:
        keys["rope.freq_base"] = float(theta)
    for key, value in {**keys, **family.values, **(extra or {})}.items():
        if value is not None:
            _add(writer, key if key.startswith("general.") else f"{architecture}.{key}", value)
    for there, values in _stored(source, architecture, family, config):
        kind = gguf.GGMLQuantizationType[
            types(there) if values.ndim > 1 and _is_matrix(there) else "F32"
        ]
        writer.add_tensor(there, gguf.quantize(values, kind), raw_dtype=kind)
    for there, values in (tensors or {}).items():
        writer.add_tensor(there, values)
    if has_tokenizer:
        _add_tokenizer(writer, source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    ids = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([int(kinds[number in special]) for number in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(ids[settings["eos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(False)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def _is_matrix(there: str) -> bool:
    """Whether the converter lets it have fewer bits."""
    return not there.endswith((".bias", "_norm.weight", "ffn_gate_inp.weight"))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored(
    source: Path, architecture: str, family: Family, config: PretrainedConfig
) -> Iterator[tuple[str, np.ndarray]]:
    kinds = {each: kind for kind, each in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    stored = load_file(source / "model.safetensors")  # torch's, since numpy has no bfloat16
    tensors = {name: each.float().numpy() for name, each in stored.items()}
    for change in family.changes:
        tensors = change(tensors, config)
    for name, values in tensors.items():
        own = name.removeprefix("transformer.") if architecture == "bloom" else name
        there: str | None = name
        if not name.startswith("blk."):
            there = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        yield there, np.ascontiguousarray(values, np.float32)


def directory_of(file: Path, folder: Path) -> Path:
    """A model directory without a tokenizer."""
    folder.mkdir()
    content = read_gguf(file)
    write_model(content, folder)
    link_parts(content, folder)
    return folder


def config_of(file: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory_of(file, folder) / "config.json").read_text())
    return found
