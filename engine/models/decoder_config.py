"""The configuration of the one decoder, to which all architectures are mapped.

Rotary positions are read as written by transformers 4 and 5. Version 4 wrote `rope_theta` next to a
`rope_scaling` object (its kind was first called `type`, later `rope_type`); version 5 writes one
`rope_parameters` object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from penstock.engine.layers.experts import ExpertsConfig
from penstock.engine.layers.rotary import NO_ROPE, ROPE_TYPES, RopeConfig, RopeType
from penstock.engine.model_files.config_fields import ConfigFields
from penstock.kernels.activation import Activation

# Far above every model's, so that products of sizes stay within 63 bits.
_MAX_SIZE, _MAX_HEADS, _MAX_LAYERS, _MAX_CONTEXT = 1 << 24, 1 << 16, 1 << 10, 1 << 27
# From here on the frequencies of float32 are still numbers that differ.
_MIN_THETA, _MAX_THETA = 1.001, 1e15
MAX_EXPERTS = 1 << 10  # as in kernels/cpu/experts.inc.c
_MAX_SCALE = 100.0  # of cosines and sines, which float16 must hold


NormKind: TypeAlias = Literal["rms", "layer"]
# Over each head, with one RMS weight for all (Qwen3); over all heads together (OLMo 2); over each
# head by mean and variance, with weights of its own (Cohere).
QKNormKind: TypeAlias = Literal["head", "row", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape and the options of a decoder-only transformer.

    Attributes:
        norm_eps: of all norms.
        context_len: maximum tokens of a sequence, rotary scaling included.
        rope: rotary positions, in every layer without one in `layer_ropes`.
        layer_ropes: those of each layer; empty: `rope`.
        windows: for each layer, how many positions a token sees (None: all before it).
        dtype: the checkpoint's own, as named in its config.
        is_tied: the output head is the embedding.
        norm, has_norm_bias: of the norms that are not of queries and keys. A layer norm
            subtracts the mean.
        norm_offset: added to the weights of RMS norms, those of queries and keys included.
        has_pre_norms: attention and MLP read the stream's norm, and not the stream itself.
        has_post_norms: their outputs are normalised before they are added to the stream.
        is_parallel: the MLP reads what attention reads, not attention's output.
        has_mlp_norm: it has a norm of its own, or, where `is_parallel`, reads attention's.
        activation: of the MLP.
        is_gated: the MLP has a gate beside its input.
        has_position_table: a learned vector for each position is added to the embedding.
        first_position: a checkpoint's row of that table for position 0.
        has_embedding_norm: the embedding is normalised.
        has_qk_norm: queries and keys are normalised before they are rotated, in the way `qk_norm`.
        has_qk_norm_bias: only a layer norm can have one.
        attention_scale: of scores; None: head_dim^-0.5.
        attention_soft_cap: bounds attention's scores; None leaves them unbounded.
        qkv_limit: of the magnitude of queries, keys (as normalised, not yet rotated) and values.
        has_sinks: each head has a logit without a value in its softmax.
        alibi_slopes: of each head: what is added to its scores for each position between query
            and key (Press et al., "Train Short, Test Long", 2022); empty: nothing is.
        embedding_scale, residual_scale, logit_scale: factors of the embedding, of what a layer's
            attention and MLP add to the stream, and of the logits.
        logit_soft_cap: bounds the logits.
        experts: of the MLPs that have some; None: of none.
        own_layers: those that this process has; None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_len: int
    rope: RopeConfig
    layer_ropes: tuple[RopeConfig, ...] = ()
    windows: tuple[int | None, ...]
    dtype: str
    is_tied: bool = False
    norm: NormKind = "rms"
    has_norm_bias: bool = False
    norm_offset: float = 0.0
    has_pre_norms: bool = True
    has_post_norms: bool = False
    is_parallel: bool = False
    has_mlp_norm: bool = True
    activation: Activation = "silu"
    is_gated: bool = True
    has_position_table: bool = False
    first_position: int = 0
    has_embedding_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False
    has_qk_norm: bool = False
    qk_norm: QKNormKind = "head"
    has_qk_norm_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    qkv_limit: float | None = None
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    own_layers: range | None = None

    @property
    def layer_numbers(self) -> range:
        """Those that this process has."""
        return range(self.num_layers) if self.own_layers is None else self.own_layers

    @property
    def has_embedding(self) -> bool:
        """Whether this process has what is before the layers."""
        return self.layer_numbers.start == 0

    @property
    def has_head(self) -> bool:
        """Whether this process has what is after the layers."""
        return self.layer_numbers.stop == self.num_layers

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ones."""
        return tuple(dict.fromkeys(self.layer_ropes)) or (self.rope,)

    def num_mlp_weights(self, *, is_read: bool) -> int:
        """The numbers in the matrices of all MLPs, or of those that one token reads."""
        experts, num_matrices = self.experts, 3 if self.is_gated else 2
        dense = num_matrices * self.intermediate_size
        if experts is None:
            return self.num_layers * self.hidden_size * dense
        count = experts.experts_per_token if is_read else experts.num_experts
        sizes = count * experts.intermediate_size + experts.shared_size
        sparse = num_matrices * sizes + experts.num_experts
        num_sparse = sum(experts.layers)
        return self.hidden_size * (num_sparse * sparse + (self.num_layers - num_sparse) * dense)

    @property
    def has_long_rope(self) -> bool:
        return any(each.is_long for each in self.ropes)

    def within(self, max_model_len: int | None) -> DecoderConfig:
        """That of sequences of at most so many tokens; None: of the whole context."""
        num_tokens = max_model_len or self.context_len
        ropes = tuple(each.within(num_tokens) for each in self.layer_ropes)
        return replace(self, rope=self.rope.within(num_tokens), layer_ropes=ropes)

    def rope_of(self, layer: int) -> RopeConfig:
        return self.layer_ropes[layer] if self.layer_ropes else self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDefaults:
    """How an architecture reads the fields that all of them have; its other switches are set in the
    result.

    Attributes:
        num_kv_heads, head_dim, intermediate_size, norm_eps, is_tied, activation, theta,
            context_len: defaults if `config.json` has no value; None means num_heads, hidden_size /
            num_heads, and for others that there must be one.
        has_rope: it has rotary positions.
        rotary_factor: the part of each head that is turned, unless `config.json` names another;
            None: all of it, always.
        is_interleaved: as in `RopeConfig`.
    """

    windows: tuple[int | None, ...] = ()
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    is_tied: bool = False
    activation: str = "silu"
    theta: float = 10_000.0
    context_len: int | None = None
    has_rope: bool = True
    rotary_factor: float | None = None
    is_interleaved: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False


def read_decoder_config(fields: ConfigFields, defaults: ConfigDefaults) -> DecoderConfig:
    """Map the fields that all architectures share, by the names that Llama has for them (see
    `ConfigFields.renamed`).

    Raises:
        ModelLoadError: a field is missing, malformed, or has an unsupported value.
    """
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", defaults.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{num_heads} attention heads cannot share {num_kv_heads}"
        )
    hidden_size = fields.integer("hidden_size", maximum=_MAX_SIZE)
    head_dim = fields.integer(
        "head_dim", defaults.head_dim or hidden_size // num_heads, maximum=_MAX_HEADS
    )
    if head_dim % 2:
        raise fields.error("head_dim", f"rotary positions need an even size, not {head_dim}")
    num_layers = read_num_layers(fields)
    rope = read_rope_config(fields, defaults, head_dim)
    if rope.rope_type == "dynamic" and rope.rotary_dim in (None, 2) and head_dim == 2:
        raise fields.error("head_dim", "dynamic rope scaling needs more than 2")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size", maximum=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(
            "intermediate_size", defaults.intermediate_size, maximum=_MAX_SIZE
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", defaults.norm_eps, minimum=1e-30, maximum=1.0),
        context_len=scaled_context(fields, rope, defaults.context_len),
        rope=rope,
        windows=defaults.windows or (None,) * num_layers,
        dtype=fields.text("dtype" if "dtype" in fields else "torch_dtype", "float32"),
        is_tied=fields.boolean("tie_word_embeddings", defaults.is_tied),
        activation=read_activation(fields, defaults.activation),
        has_qkv_bias=defaults.has_qkv_bias,
        has_output_bias=defaults.has_output_bias,
        has_mlp_bias=defaults.has_mlp_bias,
        has_qk_norm=defaults.has_qk_norm,
    )


def read_experts_config(
    fields: ConfigFields,
    *,
    num_experts: str,
    size: str,
    shared_size: str | None = None,
    experts_per_token: int = 2,
    is_normalized: bool = True,
) -> ExpertsConfig | None:
    """The experts of a model; None if no layer has some.

    `decoder_sparse_step` and `mlp_only_layers`, where they are given, say which layers have.

    Args:
        num_experts, size, shared_size: the names of these fields.
        experts_per_token: unless the config says it.

    Raises:
        ModelLoadError.
    """
    count = fields.integer(num_experts, minimum=0, maximum=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", minimum=0)
    layers = tuple(
        count > 0 and layer not in dense and (layer + 1) % step == 0
        for layer in range(read_num_layers(fields))
    )
    if not any(layers):
        return None
    if read_activation(fields, "silu") != "silu":
        raise fields.error(
            "hidden_act", "experts with another activation than silu are not supported"
        )
    return ExpertsConfig(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok", experts_per_token, maximum=count),
        intermediate_size=fields.integer(size, maximum=_MAX_SIZE),
        shared_size=0 if shared_size is None else fields.integer(shared_size, maximum=_MAX_SIZE),
        is_normalized=is_normalized,
        layers=layers,
    )


def read_layer_kinds(fields: ConfigFields, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a window, by `layer_types`.

    Args:
        default: of layers by their number, if `config.json` does not list them.

    Raises:
        ModelLoadError: the list has another length, or kinds that are not known.
    """
    num_layers = read_num_layers(fields)
    if "layer_types" not in fields:
        return tuple(default(layer) for layer in range(num_layers))
    kinds = fields.texts("layer_types")
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != num_layers:
        raise fields.error(
            "layer_types",
            f"expected {num_layers} of 'full_attention' and 'sliding_attention', not {kinds}",
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def read_num_layers(fields: ConfigFields) -> int:
    """Raises: ModelLoadError."""
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


# As `transformers` calls them.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_activation(fields: ConfigFields, default: str) -> Activation:
    """Raises: ModelLoadError."""
    name = fields.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise fields.unsupported("hidden_act", f"{name!r} is not supported; supported: {known}")
    return _ACTIVATIONS[name]


def read_rope_config(
    fields: ConfigFields,
    defaults: ConfigDefaults,
    head_dim: int,
    scaling: ConfigFields | None = None,
) -> RopeConfig:
    """The rotary positions of a model.

    Args:
        scaling: the section of `fields` that describes them; None: the usual one.

    Raises:
        ModelLoadError: an unsupported kind of scaling, or an invalid parameter of it.
    """
    if not defaults.has_rope:
        return NO_ROPE
    if scaling is None:
        scaling = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    rope = _read_scaling(fields, scaling, defaults)
    rotary_dim = _read_rotary_dim(fields, scaling, defaults, head_dim)
    if rope.rope_type == "longrope":
        num_pairs = (head_dim if rotary_dim is None else rotary_dim) // 2
        rope = replace(
            rope,
            short_factors=scaling.numbers("short_factor", count=num_pairs),
            long_factors=scaling.numbers("long_factor", count=num_pairs),
        )
    return replace(rope, rotary_dim=rotary_dim, is_interleaved=defaults.is_interleaved)


def _read_rotary_dim(
    fields: ConfigFields, scaling: ConfigFields, defaults: ConfigDefaults, head_dim: int
) -> int | None:
    factor, name = defaults.rotary_factor, "partial_rotary_factor"
    for section in (fields, scaling):
        if name in section:
            read = section.number(name, maximum=1.0)
            if read != 1.0 and defaults.rotary_factor is None:
                raise section.unsupported(name, "partly rotated heads are not supported")
            factor = read
    if factor is None or factor == 1.0:
        return None
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(name, f"{rotary_dim} of {head_dim} dimensions cannot be turned in pairs")
    return rotary_dim


def _read_scaling(
    fields: ConfigFields, scaling: ConfigFields, defaults: ConfigDefaults
) -> RopeConfig:
    section = scaling if "rope_theta" in scaling else fields
    theta = section.number("rope_theta", defaults.theta, minimum=_MIN_THETA, maximum=_MAX_THETA)
    rope_type = _rope_type(scaling)
    context = _context(fields, defaults.context_len)
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=context)
    if rope_type == "yarn":
        return _yarn(fields, scaling, theta)
    if rope_type == "longrope":
        return _longrope(fields, scaling, theta, context)
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


def scaled_context(fields: ConfigFields, rope: RopeConfig, default: int | None = None) -> int:
    """Context in tokens, rotary scaling included.

    Llama 3 checkpoints state the scaled context; for the others it is computed here.
    """
    context = _context(fields, default)
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
    if value == "su" or (value == "yarn" and "short_factor" in scaling):  # its former names
        return "longrope"
    if value not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise scaling.unsupported(name, f"{value!r} is not supported; supported: {supported}")
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
        # 0, as several configurations have it, means without, as in transformers.
        mscale=scaling.optional_number("mscale", minimum=0.0, maximum=_MAX_SCALE),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", minimum=0.0, maximum=_MAX_SCALE),
        truncate=scaling.boolean("truncate", True),
    )


def _longrope(
    fields: ConfigFields, scaling: ConfigFields, theta: float, context: int
) -> RopeConfig:
    original = _original_context(fields, scaling)
    factor = scaling.number("factor", max(1.0, context / original), minimum=1.0)
    attention_factor = scaling.optional_number("attention_factor", maximum=_MAX_SCALE)
    if original < 2 and attention_factor is None:
        raise scaling.error("attention_factor", "is needed where the original context is 1")
    return RopeConfig(
        rope_type="longrope",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
    ).within(context)


def _original_context(fields: ConfigFields, scaling: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    section = fields if name in fields else scaling
    return section.integer(name, _context(fields), maximum=_MAX_CONTEXT)


def _context(fields: ConfigFields, default: int | None = None) -> int:
    return fields.integer("max_position_embeddings", default, maximum=_MAX_CONTEXT)
