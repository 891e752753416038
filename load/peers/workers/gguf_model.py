"""Writes a model directory as one GGUF file, for llama.cpp; needs an environment with `gguf`.

    python gguf_model.py MODEL_DIRECTORY FILE.gguf

It knows only the architectures of `models.py` and their byte-level tokenizer. Weights stay bf16;
norms, biases, positions and routers become float32, as llama.cpp expects.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
}
_GPT2_LAYER_NAMES = {
    f"{name}.{kind}": f"{theirs}.{kind}"
    for kind in ("weight", "bias")
    for name, theirs in {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }.items()
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe"}  # there, where it is not the model type
_IN_FLOAT32 = ("position_embd.weight", "ffn_gate_inp.weight")


def convert(source: Path, target: Path, types: Callable[[str], str] = lambda _: "BF16") -> None:
    """types: a matrix's name there → its type, which `gguf` must be able to write."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(target, _ARCHITECTURES.get(architecture, architecture))
    _write_shape(writer, config)
    _write_tokenizer(writer, source)
    for name, weights in _with_whole_experts(_tensors(source / "model.safetensors")):
        turned, there = _turned(name, weights, config), _name(name)
        numbers = (turned.astype(np.uint32) << 16).view(np.float32)
        if turned.ndim == 1 or there.endswith(_IN_FLOAT32):
            writer.add_tensor(there, numbers)
        else:
            kind = gguf.GGMLQuantizationType[types(there)]
            writer.add_tensor(there, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _write_tokenizer(writer: Any, source: Path) -> None:
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
    writer.add_chat_template(settings["chat_template"])


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and bf16 bits of each tensor; `safetensors` is no help, since numpy has no bf16."""
    data = np.memmap(file, np.uint8, "r")
    size = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", (name, entry)
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        yield name, data[first:last].view(np.uint16).reshape(entry["shape"])


def _with_whole_experts(
    tensors: Iterator[tuple[str, np.ndarray]],
) -> Iterator[tuple[str, np.ndarray]]:
    """The same with all experts of a layer in one tensor per projection."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, weights in tensors:
        before, is_expert, after = name.partition(".experts.")
        if not is_expert:
            yield name, weights
            continue
        number, _, rest = after.partition(".")
        experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = weights
    for name, parts in experts.items():
        yield name, np.stack([parts[number] for number in sorted(parts)])


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    names = _GPT2_LAYER_NAMES if name.startswith("transformer.") else _LAYER_NAMES
    return f"blk.{layer}.{names[rest]}"


def _turned(name: str, weights: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of Llama's q and k in llama.cpp's order: pairs that rotate together are neighbours.
    GPT-2's matrices as [out, in]."""
    if name.startswith("transformer.h.") and weights.ndim == 2:
        return weights.T.copy()
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((heads[part] for part in heads if part in name), None)
    if key is None or config["model_type"] != "llama":
        return weights
    num_heads, rest = config[key], weights.shape[1:]
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weights.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
