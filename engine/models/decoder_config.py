"""The configuration of the one decoder, to which all architectures are mapped.

Rotary positions are read as written by transformers 4 and 5. Version 4 wrote `rope_theta` next to a
`rope_scaling` object (its kind was first called `type`, later `rope_type`); version 5 writes one
`rope_parameters` object.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.config_fields import ConfigFields
from penstock.engine.layers.rotary import ROPE_TYPES, RopeConfig, RopeType

# Far above every model's, so that products of sizes stay within 63 bits.
_MAX_SIZE, _MAX_HEADS, _MAX_LAYERS, _MAX_CONTEXT = 1 << 24, 1 << 16, 1 << 10, 1 << 27
# From here on the frequencies of float32 are still numbers that differ.
_MIN_THETA, _MAX_THETA = 1.001, 1e15
_MAX_SCALE = 100.0  # of cosines and sines, which float16 must hold


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape and the options of a decoder-only transformer.

    Attributes:
        context_len: maximum tokens of a sequence, rotary scaling included.
        windows: for each layer, how many positions a token sees (None: all before it).
        dtype: the checkpoint's own, as named in its config.
        is_tied: the output head is the embedding.
        attention_soft_cap: bounds attention's scores; None leaves them unbounded.
        has_sinks: each head has a logit without a value in its softmax.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_len: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    attention_soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoices:
    """The options in which architectures differ; all other fields have the same names.

    Attributes:
        num_kv_heads, head_dim: defaults if `config.json` has no value; None means num_heads, and
            hidden_size / num_heads.
    """

    windows: tuple[int | None, ...] = ()
    num_kv_heads: int | None = None
    head_dim: int | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False


def read_decoder_config(fields: ConfigFields, choices: DecoderChoices) -> DecoderConfig:
    """Map the fields that Llama and its descendants share.

    Raises:
        ModelLoadError: a field is missing, malformed, or has an unsupported value.
    """
    _check_supported(fields)
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", choices.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_heads} attention heads cannot share {num_kv_heads}"
        )
    hidden_size = fields.integer("hidden_size", maximum=_MAX_SIZE)
    head_dim = fields.integer(
        "head_dim", choices.head_dim or hidden_size // num_heads, maximum=_MAX_HEADS
    )
    if head_dim % 2:
        raise fields.error("head_dim", f"rotary positions need an even size, not {head_dim}")
    num_layers = read_num_layers(fields)
    rope = read_rope_config(fields)
    if rope.rope_type == "dynamic" and head_dim == 2:
        raise fields.error("head_dim", "dynamic rope scaling needs more than 2")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size", maximum=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=_MAX_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=1e-30, maximum=1.0),
        context_len=scaled_context(fields, rope),
        rope=rope,
        windows=choices.windows or (None,) * num_layers,
        dtype=fields.text("dtype" if "dtype" in fields else "torch_dtype", "float32"),
        is_tied=fields.boolean("tie_word_embeddings", False),
        has_qkv_bias=choices.has_qkv_bias,
        has_output_bias=choices.has_output_bias,
        has_mlp_bias=choices.has_mlp_bias,
        has_qk_norm=choices.has_qk_norm,
    )


def read_num_layers(fields: ConfigFields) -> int:
    """Raises: ModelLoadError."""
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def _check_supported(fields: ConfigFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported; only 'silu' is")


DEFAULT_THETA = 10_000.0


def read_rope_config(fields: ConfigFields) -> RopeConfig:
    """The rotary positions of a model.

    Raises:
        ModelLoadError: an unsupported kind of scaling, or an invalid parameter of it.
    """
    scaling = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    section = scaling if "rope_theta" in scaling else fields
    theta = section.number("rope_theta", DEFAULT_THETA, minimum=_MIN_THETA, maximum=_MAX_THETA)
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise section.error("partial_rotary_factor", "partly rotated heads are not supported")
    rope_type = _rope_type(scaling)
    context = _context(fields)
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=context)
    if rope_type == "yarn":
        return _yarn(fields, scaling, theta)
    if rope_type == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.error("high_freq_factor", f"must exceed low_freq_factor ({low:g})")
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=scaling.number("factor", minimum=1.0),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=_original_context(fields, scaling),
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=scaling.number("factor", minimum=1.0),
        # Dynamic scaling starts at the configured context, whatever else the file says.
        original_max_position_embeddings=context,
    )


def scaled_context(fields: ConfigFields, rope: RopeConfig) -> int:
    """Context in tokens, rotary scaling included.

    Llama 3 checkpoints state the scaled context; for the others it is computed here.
    """
    context = _context(fields)
    if rope.rope_type in ("linear", "dynamic"):
        context = int(context * rope.factor)
    elif rope.rope_type == "yarn":
        context = int(rope.original_max_position_embeddings * rope.factor)
    if context > _MAX_CONTEXT:
        raise fields.error(
            "max_position_embeddings",
            f"with rope scaling by {rope.factor:g}, the context of {context} tokens is too long",
        )
    return context


def _rope_type(scaling: ConfigFields) -> RopeType:
    name = "rope_type" if "rope_type" in scaling else "type"
    value = scaling.text(name, "default")
    if value not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise scaling.error(name, f"{value!r} is not supported; supported: {supported}")
    return value


def _yarn(fields: ConfigFields, scaling: ConfigFields, theta: float) -> RopeConfig:
    original = _original_context(fields, scaling)
    stretch = _context(fields) / original
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if fast < slow:
        raise scaling.error("beta_fast", f"must be at least beta_slow ({slow:g})")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=scaling.number("factor", stretch, minimum=1.0),
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=scaling.optional_number("attention_factor", maximum=_MAX_SCALE),
        mscale=scaling.optional_number("mscale", maximum=_MAX_SCALE),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", maximum=_MAX_SCALE),
        truncate=scaling.boolean("truncate", True),
    )


def _original_context(fields: ConfigFields, scaling: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    section = fields if name in fields else scaling
    return section.integer(name, _context(fields), maximum=_MAX_CONTEXT)


def _context(fields: ConfigFields) -> int:
    return fields.integer("max_position_embeddings", maximum=_MAX_CONTEXT)
