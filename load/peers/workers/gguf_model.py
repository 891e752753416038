"""Writes a model directory as one GGUF file, for llama.cpp; needs an environment with `gguf`.

    python gguf_model.py MODEL_DIRECTORY FILE.gguf

It knows only the two architectures of `models.py` and their byte-level tokenizer. Weights stay
bf16; norms and biases become float32, as llama.cpp expects.
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
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def convert(source: Path, target: Path, types: Callable[[str], str] = lambda _: "BF16") -> None:
    """types: a matrix's name there → its type, which `gguf` must be able to write."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(target, architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, source)
    for name, weights in _tensors(source / "model.safetensors"):
        turned = _turned(name, weights, config)
        if turned.ndim == 1:
            writer.add_tensor(_name(name), (turned.astype(np.uint32) << 16).view(np.float32))
        else:
            kind = gguf.GGMLQuantizationType[types(_name(name))]
            numbers = (turned.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(_name(name), gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
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
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


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


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


def _turned(name: str, weights: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of Llama's q and k in llama.cpp's order: pairs that rotate together are neighbours."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((heads[part] for part in heads if part in name), None)
    if key is None or config["model_type"] != "llama":
        return weights
    num_heads, rest = config[key], weights.shape[1:]
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weights.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
