"""Writes a trained network as a Hugging Face checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from penstock.engine.demo.corpus import BEGIN, END, token_id
from penstock.engine.demo.network import Network, NetworkConfig
from penstock.engine.demo.vocabulary import save_tokenizer

GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "max_new_tokens": 768}


def save_checkpoint(
    folder: Path, network: Network, config: NetworkConfig, tokenizer: Tokenizer
) -> None:
    """Write weights in bfloat16, configuration, generation defaults and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
    special: dict[str, Any] = {"bos_token_id": begin, "eos_token_id": end}
    write_json(folder / "config.json", hugging_face_config(config) | special)
    stops = {"bos_token_id": begin, "eos_token_id": [end], "pad_token_id": end}
    write_json(folder / "generation_config.json", GENERATION | stops)
    save_tokenizer(tokenizer, folder, max_tokens=config.max_position_embeddings)
    weights = {name: p.detach().bfloat16().contiguous() for name, p in network.named_parameters()}
    # Renamed over the old file, so that a reader never sees an incomplete one.
    unfinished = folder / "model.safetensors.part"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")


def hugging_face_config(config: NetworkConfig) -> dict[str, Any]:
    """Return the configuration under Hugging Face's names."""
    shape = asdict(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": config.head_dim,
        "max_position_embeddings": shape["max_position_embeddings"],
        "rope_theta": shape["rope_theta"],
        "rms_norm_eps": shape["rms_norm_eps"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")
