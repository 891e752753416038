"""Which part of a decoder each rank has (Shoeybi et al., "Megatron-LM", 2019).

Attention is split by heads, an MLP and each expert by their inner values, embedding and output head
by tokens. So the first product of a block has some rows of its matrix on each rank, the second the
columns of the same numbers; what the second gives is summed over the ranks. Norms, routers and
position tables are whole everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.engine.layers.experts import ExpertsConfig, MixtureOfExperts
from penstock.engine.layers.linear import Embedding
from penstock.engine.layers.norm import HeadNorm
from penstock.engine.models.decoder import Decoder, GatedMLP, PlainMLP, SelfAttention
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.parallel.ranks import Ranks
from penstock.engine.parallel.shard import Shard


def rank_config(config: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """The configuration of a rank's part of the layers.

    Raises:
        ConfigError: a number that the ranks cannot share, by its name in `config.json`.
    """
    if ranks.size == 1:
        return config
    if ranks.num_stages > 1:
        config = replace(config, own_layers=_stage_layers(config, ranks))
    return _layers_config(config, ranks.layers)


def stage_ends(count: int, num_stages: int, *, num_more: float = 0.0) -> list[int]:
    """After which of so many layers each stage ends, so that all have about as much to compute.

    Args:
        num_more: what the last stage computes besides, in layers.
    """
    if count < num_stages:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: num_hidden_layers is {count:,}, fewer than "
            "stages"
        )
    each = (count + num_more) / num_stages
    return [
        min(max(stage, int(stage * each + 0.5)), count - num_stages + stage)
        for stage in range(1, num_stages + 1)
    ]


def _stage_layers(config: DecoderConfig, ranks: Ranks) -> range:
    """The numbers of this stage's layers, by the weights that are read for a token."""
    heads = config.num_heads + config.num_kv_heads  # of queries and outputs, of keys and values
    attention = 2 * heads * config.head_dim * config.hidden_size
    layer = attention + config.num_mlp_weights(is_read=True) / config.num_layers
    head = config.vocab_size * config.hidden_size
    ends = [0, *stage_ends(config.num_layers, ranks.num_stages, num_more=head / layer)]
    return range(ends[ranks.stage], ends[ranks.stage + 1])


def _layers_config(config: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """
    Args:
        ranks: that have the same layers.
    """
    size = ranks.size
    if size == 1:
        return config
    heads = share(config.num_heads, ranks, "num_attention_heads")
    return replace(
        config,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads(config.num_kv_heads, ranks)),
        intermediate_size=_dense_size(config, ranks),
        alibi_slopes=config.alibi_slopes[heads.start : heads.stop],
        experts=config.experts and _experts_config(config.experts, ranks),
    )


def _dense_size(config: DecoderConfig, ranks: Ranks) -> int:
    """The inner size of MLPs without experts; nobody needs it where all have some."""
    experts = config.experts
    if experts is not None and all(experts.layers):
        return config.intermediate_size
    return len(share(config.intermediate_size, ranks, "intermediate_size"))


def _experts_config(experts: ExpertsConfig, ranks: Ranks) -> ExpertsConfig:
    size = len(share(experts.intermediate_size, ranks, "the intermediate size of the experts"))
    shared = experts.shared_size
    if shared:
        shared = len(share(shared, ranks, "shared_expert_intermediate_size"))
    return replace(experts, intermediate_size=size, shared_size=shared)


def split_over(model: Decoder, config: DecoderConfig, ranks: Ranks) -> None:
    """Say of each matrix in a decoder of `rank_config` what of the whole it is, and let it add up
    what the ranks compute.

    Args:
        config: of the whole model.
    """
    if ranks.size == 1:
        return
    model.ranks, model.whole_config = ranks, config
    if ranks.layers.size > 1:
        _split_layers(model, config, ranks.layers)


def _split_layers(model: Decoder, config: DecoderConfig, ranks: Ranks) -> None:
    ids = table_ids(config.vocab_size, ranks)
    for name in ("embed_tokens", "lm_head"):
        table = getattr(model, name, None)
        if table is not None:
            _split_table(table, config, ids)
            table.ranks = ranks
    for layer in model.own_layers:
        _split_attention(layer.self_attn, config, ranks)
        mlp, experts = layer.mlp, config.experts
        if not isinstance(mlp, MixtureOfExperts):
            _split_mlp(mlp, config.intermediate_size, ranks)
            mlp.down_proj.ranks = ranks
            continue
        assert experts is not None
        size, has_bias = experts.intermediate_size, ranks.rank == 0
        inner = share(size, ranks, "experts")
        both, down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        both.shard = Shard(
            part_sizes=(size, size), in_features=both.in_features, rows=(inner, inner)
        )
        down.shard = Shard(
            part_sizes=down.part_sizes, in_features=size, columns=inner, has_bias=has_bias
        )
        if isinstance(mlp.shared_expert, GatedMLP):
            _split_mlp(mlp.shared_expert, experts.shared_size, ranks)
        mlp.ranks = ranks


def _split_table(table: Embedding, config: DecoderConfig, ids: range) -> None:
    table.first_id, table.num_ids = ids.start, len(ids)
    shard = Shard(part_sizes=(config.vocab_size,), in_features=config.hidden_size, rows=(ids,))
    table.shard, table.out_features, table.part_sizes = shard, len(ids), (len(ids),)


def _split_attention(attention: SelfAttention, config: DecoderConfig, ranks: Ranks) -> None:
    size = config.head_dim
    heads = share(config.num_heads, ranks, "num_attention_heads")
    queries, keys = (times(each, size) for each in (heads, kv_heads(config.num_kv_heads, ranks)))
    query_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    qkv, out = attention.qkv_proj, attention.o_proj
    qkv.shard = Shard(
        part_sizes=(query_size, kv_size, kv_size),
        in_features=qkv.in_features,
        rows=(queries, keys, keys),
    )
    out.shard = Shard(
        part_sizes=out.part_sizes,
        in_features=query_size,
        columns=queries,
        has_bias=ranks.rank == 0,
    )
    out.ranks = ranks
    attention.shard = Shard(part_sizes=(config.num_heads,), rows=(heads,))  # of sinks
    for norm, whole, rows in (("q_norm", query_size, queries), ("k_norm", kv_size, keys)):
        module: Any = getattr(attention, norm, None)
        if isinstance(module, HeadNorm) or (module is not None and config.qk_norm == "row"):
            module.shard = Shard(part_sizes=(whole,), rows=(rows,))
    own = kv_heads(config.num_kv_heads, ranks)
    attention.kv_shard = Shard(part_sizes=(config.num_kv_heads,), rows=(own,))


def _split_mlp(mlp: GatedMLP | PlainMLP, size: int, ranks: Ranks) -> None:
    inner, down = share(size, ranks, "intermediate_size"), mlp.down_proj
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    num_parts = len(up.part_sizes)
    up.shard = Shard(
        part_sizes=(size,) * num_parts, in_features=up.in_features, rows=(inner,) * num_parts
    )
    down.shard = Shard(
        part_sizes=down.part_sizes, in_features=size, columns=inner, has_bias=ranks.rank == 0
    )


def kv_heads(count: int, ranks: Ranks) -> range:
    """Where there are fewer than ranks, some ranks have the same one."""
    if count < ranks.size:
        check(ranks.size % count == 0, "num_key_value_heads", count, ranks.size)
        head = ranks.rank * count // ranks.size
        return range(head, head + 1)
    return share(count, ranks, "num_key_value_heads")


def table_ids(vocab_size: int, ranks: Ranks) -> range:
    """The last rank has what is left: vocabularies need not divide."""
    check(vocab_size >= ranks.size**2, "vocab_size", vocab_size, ranks.size)
    size = -(-vocab_size // ranks.size)
    return range(ranks.rank * size, min(vocab_size, (ranks.rank + 1) * size))


def share(count: int, ranks: Ranks, name: str) -> range:
    check(count % ranks.size == 0, name, count, ranks.size)
    size = count // ranks.size
    return range(ranks.rank * size, (ranks.rank + 1) * size)


def times(numbers: range, size: int) -> range:
    return range(numbers.start * size, numbers.stop * size)


def check(is_possible: bool, name: str, count: int, size: int) -> None:
    if not is_possible:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {name} is {count:,}, which {size} ranks cannot share"
        )
