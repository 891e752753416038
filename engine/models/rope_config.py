"""From a `config.json` to a `RopeConfig`, in the spellings of transformers 4 and 5.

Version 4 wrote `rope_theta` beside a `rope_scaling` object (whose kind was once called `type`,
later `rope_type`); version 5 writes one `rope_parameters` object.
"""

from __future__ import annotations

from penstock.engine.layers.rope_frequencies import ROPE_TYPES, RopeConfig, RopeType
from penstock.engine.models.config_fields import ConfigFields

DEFAULT_THETA = 10_000.0


def read_rope_config(fields: ConfigFields) -> RopeConfig:
    """The rotary positions of a model.

    Raises:
        ModelLoadError: a kind of scaling we do not have, or one of its parameters is wrong.
    """
    scaling = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    theta = scaling.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    for place in (fields, scaling):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "partly rotated heads are not supported")
    rope_type = _rope_type(scaling)
    context = fields.integer("max_position_embeddings")
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=context)
    if rope_type == "yarn":
        return _yarn(fields, scaling, theta)
    if rope_type == "llama3":
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position_embeddings=_original_context(fields, scaling),
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=scaling.number("factor"),
        # Dynamic scaling starts at the configured context, whatever else the file says.
        original_max_position_embeddings=context,
    )


def scaled_context(fields: ConfigFields, rope: RopeConfig) -> int:
    """Tokens the model can see once its scaling is applied.

    Llama 3 checkpoints state the stretched context themselves; the others are stretched here.
    """
    context = fields.integer("max_position_embeddings")
    if rope.rope_type in ("linear", "dynamic"):
        return int(context * rope.factor)
    if rope.rope_type == "yarn":
        return int(rope.original_max_position_embeddings * rope.factor)
    return context


def _rope_type(scaling: ConfigFields) -> RopeType:
    name = "rope_type" if "rope_type" in scaling else "type"
    value = scaling.text(name, "default")
    if value not in ROPE_TYPES:
        raise scaling.error(name, f"{value!r} is not supported; we have {', '.join(ROPE_TYPES)}")
    return value


def _yarn(fields: ConfigFields, scaling: ConfigFields, theta: float) -> RopeConfig:
    original = _original_context(fields, scaling)
    stretch = fields.integer("max_position_embeddings") / original
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=scaling.number("factor", stretch),
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.boolean("truncate", True),
    )


def _original_context(fields: ConfigFields, scaling: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    place = fields if name in fields else scaling
    return place.integer(name, fields.integer("max_position_embeddings"))
