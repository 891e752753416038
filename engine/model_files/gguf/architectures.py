"""llama.cpp's architectures: how the keys of a file become the `config.json` of transformers, and
what the file calls the tensors.

Every key of the file's architecture is read here, or is known to change nothing, or the file is
refused by it: a key that is not read is mathematics that is left out. An architecture is one entry
of `ARCHITECTURES`, as data; a few have a function for what is not one field for one key. Sources:
llama.cpp's `src/models/*.cpp` for what it reads and takes for granted, `conversion/*.py` for what
the files' keys and tensors were made of.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.model_files.gguf.reader import GgufFile, GgufTensor

# Keys that change nothing here: of the vocabulary, whose size the embedding has, of the way to
# store queries and keys, of how a model was trained.
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# Tensors whose numbers are in `config.json`.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PATTERN = "attention.sliding_window_pattern"
_LLAMA3_CONTEXTS = (8192, 16384, 32768, 65536, 131_072, 4096, 2048)
_POOLING = {0: "", 1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
_GATING = {"softmax": 1, "softmax of those chosen": 3}

# What transformers calls the modules of a layer, and the file: most families have these names.
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_ATTENTION = {f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"}
_ATTENTION |= {
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MLP = {f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")}
_EXPERTS = {f"mlp.experts.{each}_proj": f"ffn_{each}_exps" for each in ("gate", "up", "down")}
_EXPERTS |= {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
_EXPERTS |= {
    f"mlp.shared_expert.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")
}
_LLAMA = _OUTER | _NORMS | _ATTENTION | _MLP | _EXPERTS
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SANDWICH = _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
_BY_HEAD_OUTER = {
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
}
_BY_HEAD = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}

# Fields of `config.json` by the names that Llama has for them, and the keys that they are.
_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_NORM_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
_GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}


class Keys(ConfigFields):
    """The keys of a file's architecture, without its name before them.

    Attributes:
        left: those that were not read.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        start = f"{architecture}."
        values = {
            name.removeprefix(start): value if name.endswith(_PATTERN) else _plain(value)
            for name, value in file.keys.items()
            if name.startswith(start)
        }
        super().__init__(values, path=file.parts[0], within=architecture)
        self.left = set(values) - _HARMLESS

    def _own(self, name: str) -> str:
        self.left.discard(name)
        return super()._own(name)

    def refuse_others(self, name: str, *values: object) -> None:
        """
        Raises:
            ModelLoadError: the key is there, with another value than these.
        """
        if name in self and (value := self.raw(name)) not in values:
            raise self.error(name, f"{value!r} is not supported")


def _plain(value: Any) -> Any:
    """One value for a list with the same for every layer; numbers as they were before they were
    rounded to float32."""
    if isinstance(value, list) and value and not any(each != value[0] for each in value):
        value = value[0]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    for digits in range(5, 9):
        shorter = float(f"{value:.{digits}g}")
        if abs(shorter) < 3e38 and struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


@dataclass(slots=True)
class _Model:
    """What is known of a model, while its `config.json` is made."""

    keys: Keys
    file: GgufFile
    config: dict[str, Any]
    names: dict[str, str]

    def has(self, tensor: str) -> bool:
        """Whether the first layer has it."""
        return f"blk.0.{tensor}" in self.file.tensors

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def set_windows(self, period: int, *, default: int | None = None) -> None:
        """Layers with a window, by a list of layers or the period in which one has none.

        Args:
            period: where the file says nothing.
            default: of the window.
        """
        keys = self.keys
        window = keys.integer("attention.sliding_window", default, minimum=0)
        pattern = keys.raw(_PATTERN)
        if not isinstance(pattern, list):
            period = keys.integer(_PATTERN, period)
            pattern = [(layer + 1) % period != 0 for layer in range(self.num_layers)]
        if len(pattern) < self.num_layers or set(map(type, pattern)) - {bool, int}:
            raise keys.error(_PATTERN, f"expected a boolean for each of {self.num_layers} layers")
        self.config["sliding_window"] = window or None
        self.config["layer_types"] = [
            "sliding_attention" if each and window else "full_attention"
            for each in pattern[: self.num_layers]
        ]

    def set_experts(
        self, num_experts: str, size: str, *, is_normalized: bool, gating: str = "softmax"
    ) -> None:
        """
        Args:
            num_experts, size: names of these fields.
            is_normalized: as llama.cpp computes the architecture, whatever its file says.
        """
        keys = self.keys
        self.config[num_experts] = keys.integer("expert_count")
        self.config["num_experts_per_tok"] = keys.integer("expert_used_count")
        self.config[size] = keys.integer("expert_feed_forward_length", self._rows("ffn_up_exps"))
        keys.refuse_others("expert_weights_norm", is_normalized)
        keys.refuse_others("expert_weights_scale", 0, 1)
        keys.refuse_others("expert_gating_func", 0, _GATING[gating])
        keys.refuse_others("expert_group_count", 0, 1)
        keys.refuse_others("expert_group_used_count", 0, 1)

    def _rows(self, tensor: str) -> int:
        """How many rows one expert's matrix in the first layer has."""
        found = self.file.tensors.get(f"blk.0.{tensor}.weight")
        if found is None or len(found.shape) != 3:
            raise ModelLoadError(f"{self.file.parts[0]}: tensor blk.0.{tensor}.weight is missing")
        return found.shape[1]


def _add_nothing(_: _Model) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """
    Attributes:
        model, model_type: what transformers calls it.
        outer, inner: names of transformers' modules other than Llama's, outside of layers and in
            them, and the file's.
        layers: before a layer's number.
        fields: names of fields other than Llama's; no name: `config.json` has no such field, and
            the file must have what follows from the others.
        options: fields that all files of it have.
        norm: the kind of norms.
        rotary_part: the field of the part of a head that is turned; empty: all of it is.
        has_rope: it has rotary positions.
        is_interleaved: the file has the two halves of a head's queries and keys interleaved.
        is_fused_by_head: transformers fuses queries, keys and values head by head, the file not.
        norm_offset: the file's norms have it added.
        is_encoder: each token sees all others.
        add: what else there is.
    """

    model: str
    model_type: str
    outer: Mapping[str, str] = field(default_factory=dict)
    inner: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers."
    fields: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "rms"
    rotary_part: str = ""
    has_rope: bool = True
    is_interleaved: bool = False
    is_fused_by_head: bool = False
    norm_offset: float = 0.0
    is_encoder: bool = False
    add: Callable[[_Model], None] = _add_nothing


def read_architecture(
    file: GgufFile,
) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, GgufTensor]]:
    """The `config.json` of a file, what reading its tensors needs to know, and these.

    Raises:
        ModelLoadError: the architecture is not supported, a key is missing, or changes the
            mathematics in a way that is not.
    """
    path = file.parts[0]
    name = ConfigFields(file.keys, path=path).text("general.architecture")
    if (kind := file.keys.get("general.type", "model")) != "model":
        raise ModelLoadError(f"{path}: general.type: the file is no model but {kind!r}")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: general.architecture: {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys, own = Keys(file, name), ARCHITECTURES[name]
    config = _shape(keys, own, file)
    names = {**_LLAMA, **own.outer, **own.inner}
    file = replace(file, tensors=dict(_separated(file, config, names)))
    model = _Model(keys, file, config, names)
    keys.refuse_others("nextn_predict_layers", 0)
    keys.refuse_others("attention.causal", not own.is_encoder)
    pooling = keys.integer("pooling_type", 0, minimum=0)
    if pooling not in _POOLING:
        raise keys.error("pooling_type", f"{pooling} is not supported")
    if own.has_rope:
        _add_rope(model, own)
    config |= {**own.options, "architectures": [own.model], "model_type": own.model_type}
    own.add(model)
    if left := sorted(keys.left):
        raise keys.error(left[0], f"{keys.raw(left[0])!r}: this key of {name} is not supported")
    heads = [config["num_attention_heads"], config["num_key_value_heads"]]
    renamed = {own.fields.get(field, field): value for field, value in config.items()}
    reading = {
        "architecture": name,
        "keys": dict(_keys_of_fields(name, own)),
        "layers": own.layers,
        "names": model.names,
        "heads": heads,
        "order": "interleaved" if own.is_interleaved else "by head" if own.is_fused_by_head else "",
        "norm_offset": own.norm_offset,
        "pooling": _POOLING[pooling],
    }
    found = {field: value for field, value in renamed.items() if field}
    return found, reading, file.tensors


def _separated(
    file: GgufFile, config: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors, with three for one that has queries, keys and values, unless all files of the
    architecture have it: an option of llama.cpp's converter, and old files of Phi 2."""
    heads = (config["num_attention_heads"], *(config["num_key_value_heads"],) * 2)
    sizes = dict(zip("qkv", (config["head_dim"] * each for each in heads), strict=True))
    for name, tensor in file.tensors.items():
        start, is_fused, kind = name.partition(".attn_qkv.")
        if not is_fused or "attn_qkv" in names.values() or sum(sizes.values()) != tensor.shape[0]:
            yield name, tensor
            continue
        first = 0
        for part, size in sizes.items():
            yield f"{start}.attn_{part}.{kind}", tensor.rows(first, size)
            first += size


def _keys_of_fields(name: str, own: GgufArchitecture) -> Iterator[tuple[str, str]]:
    for each, key in {**_FIELDS, "rms_norm_eps": _NORM_KEYS[own.norm]}.items():
        yield own.fields.get(each, each), f"{name}.{key}"
    yield "architectures", "general.architecture"
    yield "model_type", "general.architecture"
    yield "eos_token_id", "tokenizer.ggml.eos_token_id"
    yield "vocab_size", "token_embd.weight"


def _shape(keys: Keys, own: GgufArchitecture, file: GgufFile) -> dict[str, Any]:
    """The fields that all architectures have, by Llama's names for them."""
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(f"{file.parts[0]}: tensor token_embd.weight is missing")
    num_tokens = len(file.keys.get("tokenizer.ggml.tokens", ()))
    if num_tokens > table.shape[0]:
        raise ModelLoadError(
            f"{file.parts[0]}: tokenizer.ggml.tokens: {num_tokens} tokens, but token_embd.weight "
            f"has {table.shape[0]} rows"
        )
    head_dim = keys.integer("attention.key_length", max(1, hidden_size // num_heads))
    keys.refuse_others("attention.value_length", head_dim)
    keys.refuse_others("attention.key_length_swa", head_dim)
    keys.refuse_others("attention.value_length_swa", head_dim)
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    if own.fields.get("head_dim") == "" and head_dim * num_heads != hidden_size:
        raise keys.error("attention.key_length", f"expected {hidden_size // num_heads}")
    if own.fields.get("num_key_value_heads") == "" and num_kv_heads != num_heads:
        raise keys.error("attention.head_count_kv", f"expected {num_heads}")
    return {
        "max_position_embeddings": keys.integer("context_length"),
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.integer("block_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": table.shape[0],
        "rms_norm_eps": keys.number(_NORM_KEYS[own.norm], minimum=0.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }


def _add_rope(model: _Model, own: GgufArchitecture) -> None:
    keys, config, head_dim = model.keys, model.config, model.config["head_dim"]
    theta = keys.number("rope.freq_base", 10_000.0, maximum=1e15)
    config["rope_theta"] = theta
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if own.rotary_part:
        config[own.rotary_part] = min(1.0, rotary_dim / head_dim)
    if rotary_dim > head_dim or (rotary_dim != head_dim and not own.rotary_part):
        raise keys.error(
            "rope.dimension_count", f"{rotary_dim} of {head_dim} dimensions is not supported"
        )
    keys.refuse_others("rope.dimension_count_swa", rotary_dim)
    if "rope.freq_base_swa" in keys and own.model_type != "gemma3_text":
        keys.refuse_others("rope.freq_base_swa", theta)
    scaling = _rope_scaling(model, theta, rotary_dim)
    if scaling is not None:
        config["rope_scaling"] = {**scaling, "rope_theta": theta}


def _rope_scaling(model: _Model, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Those of a file's tensors, or those of its keys."""
    keys, file = model.keys, model.file
    kind = keys.text("rope.scaling.type", "linear")
    name = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    keys.raw("rope.scale_linear")
    factor = keys.number(name, 0.0, minimum=0.0) or 1.0
    original = keys.integer(
        "rope.scaling.original_context_length", model.config["max_position_embeddings"]
    )
    yarn = {
        field: keys.number(f"rope.scaling.yarn_{key}", default, minimum=0.0)
        for field, key, default in (
            ("beta_fast", "beta_fast", 32.0),
            ("beta_slow", "beta_slow", 1.0),
            ("attention_factor", "attn_factor", 0.0),
        )
        if default or f"rope.scaling.yarn_{key}" in keys
    }
    keys.refuse_others("rope.scaling.yarn_ext_factor", -1, 1, *((0,) if kind != "yarn" else ()))
    keys.refuse_others("rope.scaling.yarn_log_multiplier", 0)
    keys.refuse_others("rope.scaling.alpha", 0)
    factors = [name for name in ROPE_TENSORS if name in file.tensors]
    if "rope_factors_long.weight" in factors or "rope_factors_short.weight" in factors:
        return _longrope(model, original)
    keys.refuse_others("rope.scaling.attn_factor", 1)
    if factors:
        if kind == "yarn" or factor != 1.0:
            raise keys.error("rope.scaling.type", f"{kind!r} beside rope_freqs is not supported")
        return _llama3_scaling(file, theta, rotary_dim)
    if kind == "yarn" and factor != 1.0:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **yarn,
        }
    if kind not in ("none", "linear", "yarn"):
        raise keys.error("rope.scaling.type", f"{kind!r} is not supported")
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": factor}


def _longrope(model: _Model, original: int) -> dict[str, Any]:
    keys, file = model.keys, model.file
    for name in ROPE_TENSORS[1:]:
        if name not in file.tensors:
            raise ModelLoadError(f"{file.parts[0]}: tensor {name} is missing")
    scaling = {
        "rope_type": "longrope",
        "long_factor": [_plain(each) for each in file.numbers(ROPE_TENSORS[1])],
        "short_factor": [_plain(each) for each in file.numbers(ROPE_TENSORS[2])],
        "original_max_position_embeddings": original,
    }
    if "rope.scaling.attn_factor" in keys:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    model.config["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """The parameters of Llama 3.1 that give the file's factors, by which each frequency is divided.

    Raises:
        ModelLoadError: there are none.
    """
    factors = file.numbers(ROPE_TENSORS[0])
    if set(factors) == {1.0}:
        return None
    for context in _LLAMA3_CONTEXTS:
        scaling = {
            "rope_type": "llama3",
            "factor": round(max(factors), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        expected = list(_llama3_factors(scaling, theta, rotary_dim))
        if len(expected) == len(factors) and all(
            abs(one - other) <= 1e-3 * other for one, other in zip(expected, factors, strict=True)
        ):
            return scaling
    raise ModelLoadError(
        f"{file.parts[0]}: tensor {ROPE_TENSORS[0]} is not a scaling that is supported"
    )


def _llama3_factors(scaling: Mapping[str, Any], theta: float, rotary_dim: int) -> Iterator[float]:
    """Source: Llama 3.1's reference code, `apply_scaling`."""
    factor, low, high = (scaling[f"{each}factor"] for each in ("", "low_freq_", "high_freq_"))
    for pair in range(0, rotary_dim, 2):
        wave_length = 2 * math.pi * theta ** (pair / rotary_dim)
        turns = scaling["original_max_position_embeddings"] / wave_length
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - smooth) / factor + smooth)


# -- what is not one field for one key --------------------------------------------------------


def _add_llama(model: _Model) -> None:
    config, keys = model.config, model.keys
    config["attention_bias"] = model.has("attn_q.bias")
    config["mlp_bias"] = model.has("ffn_up.bias")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    if keys.integer("expert_count", 0, minimum=0):
        model.set_experts("num_local_experts", "intermediate_size", is_normalized=True)
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config["sliding_window"] = window or None
    elif window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = window


def _add_qwen2_moe(model: _Model) -> None:
    model.set_experts("num_experts", "moe_intermediate_size", is_normalized=False)
    name = "expert_shared_feed_forward_length"
    shared = model.file.tensors.get("blk.0.ffn_up_shexp.weight")
    size = None if shared is None else shared.shape[0]
    model.config["shared_expert_intermediate_size"] = model.keys.integer(name, size)
    model.keys.refuse_others("expert_shared_count", 0, 1)
    model.config["qkv_bias"] = model.has("attn_q.bias")


def _add_qwen3(model: _Model) -> None:
    model.config["attention_bias"] = model.has("attn_q.bias")


def _add_qwen3_moe(model: _Model) -> None:
    _add_qwen3(model)
    model.set_experts("num_experts", "moe_intermediate_size", is_normalized=True)


def _add_olmoe(model: _Model) -> None:
    model.set_experts("num_experts", "intermediate_size", is_normalized=False)
    model.keys.refuse_others("attention.clamp_kqv")


def _add_gpt_oss(model: _Model) -> None:
    model.set_windows(2)
    model.set_experts(
        "num_local_experts", "intermediate_size", is_normalized=True,
        gating="softmax of those chosen",
    )  # fmt: skip
    if "rope_scaling" in model.config:
        model.config["rope_scaling"]["truncate"] = False  # in all of its files of transformers


def _add_gemma2(model: _Model) -> None:
    keys, config = model.keys, model.config
    model.set_windows(2, default=4096)
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0, minimum=0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0, minimum=0)
    _add_gemma_scale(model, of_heads=46)


def _add_gemma3(model: _Model) -> None:
    keys, config = model.keys, model.config
    model.set_windows(6, default=0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0, minimum=0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0, maximum=1e15)
    _add_gemma_scale(model, of_heads=62)


def _add_gemma_scale(model: _Model, *, of_heads: int) -> None:
    """Add the scale of attention scores, which no key has. of_heads: layers of the size whose scale
    follows from its heads, not from their size."""
    config = model.config
    size = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = size if model.num_layers == of_heads else config["head_dim"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[name] = config.get(name) or None


def _add_phi3(model: _Model) -> None:
    window = model.keys.integer("attention.sliding_window", 0, minimum=0)
    model.config["sliding_window"] = window or None


def _add_neox(model: _Model) -> None:
    name = "use_parallel_residual"
    model.config[name] = model.keys.boolean(name, True)


def _add_stablelm(model: _Model) -> None:
    """Decide by the tensors, as llama.cpp does: old files have the key wrong."""
    model.keys.raw("use_parallel_residual")
    model.config["use_parallel_residual"] = not model.has("ffn_norm.weight")
    model.config["qk_layernorm"] = model.has("attn_q_norm.weight")
    model.config["use_qkv_bias"] = model.has("attn_q.bias")


def _add_starcoder2(model: _Model) -> None:
    model.config["use_bias"] = model.has("attn_q.bias")
    _add_phi3(model)


def _add_falcon(model: _Model) -> None:
    config = model.config
    is_new = config["num_key_value_heads"] > 1
    config |= {"new_decoder_architecture": is_new, "multi_query": not is_new}
    num_norms = 2 if model.has("attn_norm_2.weight") else 1
    config["num_ln_in_parallel_attn"] = num_norms
    if num_norms == 2:
        del model.names["input_layernorm"]
        model.names |= {"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"}


def _add_starcoder(model: _Model) -> None:
    model.config["multi_query"] = model.config["num_key_value_heads"] == 1


def _add_width(model: _Model) -> None:
    """Bloom's MLP has four times the stream's width."""
    if model.config["intermediate_size"] != 4 * model.config["hidden_size"]:
        raise model.keys.error("feed_forward_length", "expected 4 times embedding_length")


def _add_mpt(model: _Model) -> None:
    config, keys = model.config, model.keys
    factor, rest = divmod(config["intermediate_size"], config["hidden_size"])
    if rest:
        raise keys.error("feed_forward_length", "expected a multiple of embedding_length")
    slope = keys.number("attention.max_alibi_bias", 0.0, minimum=0)
    config["expansion_ratio"] = factor
    config["attn_config"] = {
        "alibi": slope > 0,
        "alibi_bias_max": slope,
        "clip_qkv": keys.optional_number("attention.clamp_kqv", maximum=1e6),
    }


def _add_olmo(model: _Model) -> None:
    model.keys.refuse_others("attention.layer_norm_epsilon", 1e-5)
    if "attention.clamp_kqv" in model.keys:
        model.config["clip_qkv"] = model.keys.number("attention.clamp_kqv")


def _add_olmo2(model: _Model) -> None:
    model.keys.refuse_others("attention.sliding_window", 0)
    model.keys.refuse_others("attention.sliding_window_pattern", [False] * model.num_layers)


def _add_granite(model: _Model) -> None:
    config, keys = model.config, model.keys
    config["attention_bias"] = model.has("attn_q.bias")
    config["mlp_bias"] = model.has("ffn_up.bias")
    default = config["head_dim"] ** -0.5
    config["attention_multiplier"] = keys.number("attention.scale", 0.0, minimum=0) or default
    for name, key in (
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        config[name] = keys.number(key, 0.0, minimum=0) or 1.0
    keys.refuse_others("rope.scaling.finetuned", True)  # False: it has no positions
    keys.refuse_others("expert_shared_feed_forward_length", 0)


def _add_granite_moe(model: _Model) -> None:
    _add_granite(model)
    model.set_experts("num_local_experts", "intermediate_size", is_normalized=True)


def _add_cohere(model: _Model) -> None:
    model.config["logit_scale"] = model.keys.number("logit_scale", 0.0, minimum=0) or 1.0
    model.config["use_qk_norm"] = model.has("attn_q_norm.weight")
    model.config["attention_bias"] = model.has("attn_q.bias")


def _add_cohere2(model: _Model) -> None:
    _add_cohere(model)
    model.set_windows(4)


def _add_exaone4(model: _Model) -> None:
    """The large one of 64 layers has windows of 4,096, whether or not its file says so."""
    model.set_windows(4, default=4096 if model.num_layers == 64 else 0)


def _add_smollm3(model: _Model) -> None:
    layers = range(1, model.num_layers + 1)
    model.config["no_rope_layers"] = [int(layer % 4 != 0) for layer in layers]
    _add_llama(model)


def _add_seed_oss(model: _Model) -> None:
    model.config["attention_bias"] = model.has("attn_q.bias")
    model.config["attention_out_bias"] = model.has("attn_output.bias")


def _add_bert(model: _Model) -> None:
    """Its kin, which other tokenizers give away, begin to count positions at a later one."""
    kind = model.file.keys.get("tokenizer.ggml.model")
    config, padding = model.config, "tokenizer.ggml.padding_token_id"
    if kind in _BERT_KIN:
        name, config["model_type"] = _BERT_KIN[kind]
        config["architectures"] = [name]
        config["pad_token_id"] = ConfigFields(model.file.keys, path=model.file.parts[0]).integer(
            padding, 1, minimum=0
        )
        config["max_position_embeddings"] += config["pad_token_id"] + 1
    elif kind != "bert":
        raise ModelLoadError(
            f"{model.file.parts[0]}: tokenizer.ggml.model: {kind!r} is not supported with 'bert'"
        )
    _add_token_types(model)


def _add_token_types(model: _Model) -> None:
    types = model.file.tensors.get("token_types.weight")
    if types is None:
        raise ModelLoadError(f"{model.file.parts[0]}: tensor token_types.weight is missing")
    model.config["type_vocab_size"] = types.shape[0]


def _add_ernie(model: _Model) -> None:
    model.config["use_bias"] = model.has("attn_q.bias")


_BERT_KIN = {"t5": ("XLMRobertaModel", "xlm-roberta"), "gpt2": ("RobertaModel", "roberta")}
_GEMMA_OPTIONS = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_GPT_MLP = {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_GPT2 = GgufArchitecture(
    model="GPT2LMHeadModel", model_type="gpt2", norm="layer", has_rope=False,
    layers="transformer.h.", fields=_GPT2_FIELDS | {"head_dim": "", "num_key_value_heads": ""},
    outer={"transformer.wte": "token_embd", "transformer.wpe": "position_embd",
           "transformer.ln_f": "output_norm"},
    inner={"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
           "attn.c_proj": "attn_output", **_GPT_MLP},
)  # fmt: skip

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model="LlamaForCausalLM", model_type="llama", is_interleaved=True, add=_add_llama,
        inner={"block_sparse_moe.gate": "ffn_gate_inp"},
    ),
    "arcee": GgufArchitecture(
        model="ArceeForCausalLM", model_type="arcee", is_interleaved=True, add=_add_llama
    ),
    "qwen2": GgufArchitecture(model="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufArchitecture(model="Qwen3ForCausalLM", model_type="qwen3", add=_add_qwen3),
    "qwen2moe": GgufArchitecture(
        model="Qwen2MoeForCausalLM", model_type="qwen2_moe", add=_add_qwen2_moe,
        options={"norm_topk_prob": False},
    ),
    "qwen3moe": GgufArchitecture(
        model="Qwen3MoeForCausalLM", model_type="qwen3_moe", add=_add_qwen3_moe,
        options={"norm_topk_prob": True},
    ),
    "gemma": GgufArchitecture(
        model="GemmaForCausalLM", model_type="gemma", norm_offset=1.0, options=_GEMMA_OPTIONS
    ),
    "gemma2": GgufArchitecture(
        model="Gemma2ForCausalLM", model_type="gemma2", inner=_SANDWICH, norm_offset=1.0,
        options=_GEMMA_OPTIONS, add=_add_gemma2,
    ),
    "gemma3": GgufArchitecture(
        model="Gemma3ForCausalLM", model_type="gemma3_text", inner=_SANDWICH, norm_offset=1.0,
        options=_GEMMA_OPTIONS, add=_add_gemma3,
    ),
    "phi2": GgufArchitecture(
        model="PhiForCausalLM", model_type="phi", norm="layer", rotary_part="partial_rotary_factor",
        fields={"rms_norm_eps": "layer_norm_eps"},
        outer={"model.final_layernorm": "output_norm"},
        inner={"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    ),
    "phi3": GgufArchitecture(
        model="Phi3ForCausalLM", model_type="phi3", rotary_part="partial_rotary_factor",
        inner=_FUSED, options={"pad_token_id": None}, add=_add_phi3,
    ),
    "gpt-oss": GgufArchitecture(
        model="GptOssForCausalLM", model_type="gpt_oss", add=_add_gpt_oss,
        inner={"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
               "self_attn.sinks": "attn_sinks.weight"},
    ),
    "gpt2": _GPT2,
    "starcoder": replace(
        _GPT2, model="GPTBigCodeForCausalLM", model_type="gpt_bigcode", add=_add_starcoder,
        fields=_GPT2_FIELDS | {"head_dim": ""},
    ),
    "gptneox": GgufArchitecture(
        model="GPTNeoXForCausalLM", model_type="gpt_neox", norm="layer", rotary_part="rotary_pct",
        layers="gpt_neox.layers.", is_fused_by_head=True, add=_add_neox,
        fields={"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": "", "head_dim": ""},
        options={"hidden_act": "gelu"},
        outer={"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm",
               "embed_out": "output"},
        inner={"attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
               "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"},
    ),
    "starcoder2": GgufArchitecture(
        model="Starcoder2ForCausalLM", model_type="starcoder2", norm="layer", inner=_GPT_MLP,
        fields={"rms_norm_eps": "norm_epsilon"}, options={"hidden_act": "gelu_pytorch_tanh"},
        add=_add_starcoder2,
    ),
    "stablelm": GgufArchitecture(
        model="StableLmForCausalLM", model_type="stablelm", norm="layer",
        rotary_part="partial_rotary_factor", fields={"rms_norm_eps": "layer_norm_eps"},
        inner={f"self_attn.{each}_layernorm.norms.*": f"attn_{each}_norm" for each in "qk"},
        add=_add_stablelm,
    ),
    "falcon": GgufArchitecture(
        model="FalconForCausalLM", model_type="falcon", norm="layer", layers="transformer.h.",
        is_fused_by_head=True, add=_add_falcon,
        fields={"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size",
                "num_key_value_heads": "num_kv_heads", "head_dim": ""},
        options={"alibi": False, "bias": False, "parallel_attn": True, "activation": "gelu"},
        outer=_BY_HEAD_OUTER, inner=_BY_HEAD,
    ),
    "bloom": GgufArchitecture(
        model="BloomForCausalLM", model_type="bloom", norm="layer", layers="transformer.h.",
        has_rope=False, is_fused_by_head=True, add=_add_width,
        fields={"rms_norm_eps": "layer_norm_epsilon", "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head", "max_position_embeddings": "seq_length",
                "num_key_value_heads": "", "head_dim": "", "intermediate_size": ""},
        outer=_BY_HEAD_OUTER, inner=_BY_HEAD,
    ),
    "mpt": GgufArchitecture(
        model="MptForCausalLM", model_type="mpt", norm="layer", layers="transformer.blocks.",
        has_rope=False, add=_add_mpt, options={"no_bias": True},
        fields={"rms_norm_eps": "layer_norm_epsilon", "hidden_size": "d_model",
                "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len", "num_key_value_heads": "",
                "head_dim": "", "intermediate_size": ""},
        outer={"transformer.wte": "token_embd", "transformer.norm_f": "output_norm"},
        inner={"norm_1": "attn_norm", "norm_2": "ffn_norm", "attn.Wqkv": "attn_qkv",
               "attn.out_proj": "attn_output", "ffn.up_proj": "ffn_up",
               "ffn.down_proj": "ffn_down"},
    ),
    "olmo": GgufArchitecture(
        model="OlmoForCausalLM", model_type="olmo", norm="layer", is_interleaved=True,
        fields={"rms_norm_eps": ""}, add=_add_olmo,
    ),
    "olmo2": GgufArchitecture(
        model="Olmo2ForCausalLM", model_type="olmo2", inner=_POST_NORMS, add=_add_olmo2
    ),
    "olmoe": GgufArchitecture(
        model="OlmoeForCausalLM", model_type="olmoe", options={"norm_topk_prob": False},
        add=_add_olmoe,
    ),
    "granite": GgufArchitecture(
        model="GraniteForCausalLM", model_type="granite", is_interleaved=True, add=_add_granite
    ),
    "granitemoe": GgufArchitecture(
        model="GraniteMoeForCausalLM", model_type="granitemoe", is_interleaved=True,
        inner={"block_sparse_moe.router.layer": "ffn_gate_inp"}, add=_add_granite_moe,
    ),
    "command-r": GgufArchitecture(
        model="CohereForCausalLM", model_type="cohere", norm="layer",
        fields={"rms_norm_eps": "layer_norm_eps"}, add=_add_cohere,
    ),
    "cohere2": GgufArchitecture(
        model="Cohere2ForCausalLM", model_type="cohere2", norm="layer",
        fields={"rms_norm_eps": "layer_norm_eps"}, add=_add_cohere2,
    ),
    "chatglm": GgufArchitecture(
        model="GlmForCausalLM", model_type="glm", rotary_part="partial_rotary_factor",
        inner={"mlp.gate_up_proj": "ffn_up"}, options={"pad_token_id": None}, add=_add_qwen3,
    ),
    "glm4": GgufArchitecture(
        model="Glm4ForCausalLM", model_type="glm4", rotary_part="partial_rotary_factor",
        inner={"mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
               "post_mlp_layernorm": "post_ffw_norm"},
        options={"pad_token_id": None}, add=_add_qwen3,
    ),
    "exaone4": GgufArchitecture(
        model="Exaone4ForCausalLM", model_type="exaone4", inner=_POST_NORMS, add=_add_exaone4
    ),
    "ernie4_5": GgufArchitecture(
        model="Ernie4_5ForCausalLM", model_type="ernie4_5", add=_add_ernie
    ),
    "smollm3": GgufArchitecture(
        model="SmolLM3ForCausalLM", model_type="smollm3", is_interleaved=True, add=_add_smollm3
    ),
    "bert": GgufArchitecture(
        model="BertModel", model_type="bert", norm="layer", layers="encoder.layer.",
        has_rope=False, is_encoder=True, add=_add_bert,
        fields={"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": "", "head_dim": ""},
        options={"dtype": "float32", "hidden_act": "gelu"},
        outer={"embeddings.word_embeddings": "token_embd",
               "embeddings.position_embeddings": "position_embd",
               "embeddings.token_type_embeddings": "token_types",
               "embeddings.LayerNorm": "token_embd_norm"},
        inner={"attention.self.query": "attn_q", "attention.self.key": "attn_k",
               "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
               "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
               "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm"},
    ),
    "nomic-bert": GgufArchitecture(
        model="NomicBertModel", model_type="nomic_bert", norm="layer", layers="layers.",
        is_encoder=True, add=_add_token_types,
        fields={"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": ""},
        options={"dtype": "float32", "hidden_act": "silu"},
        outer={"embeddings.word_embeddings": "token_embd",
               "embeddings.token_type_embeddings": "token_types",
               "embeddings.LayerNorm": "token_embd_norm"},
        inner={"post_attention_layernorm": "attn_output_norm",
               "post_mlp_layernorm": "layer_output_norm"},
    ),
    "seed_oss": GgufArchitecture(
        model="SeedOssForCausalLM", model_type="seed_oss",
        inner={"post_attention_layernorm": "post_attention_norm"}, add=_add_seed_oss,
    ),
}  # fmt: skip
