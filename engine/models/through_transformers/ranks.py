"""Which part of a `transformers` model each rank has, by the plan that the library has for it.

A plan (`base_model_tp_plan`) names a way for modules and parameters. `colwise`: a rank has some of
the outputs; `rowwise`: some of the inputs, and the ranks' products are summed. What a model
computes on whole vectors is gathered: `colwise_gather_output` makes all outputs known to all ranks,
of which `rowwise_split_input` takes the rank's part again. Both tables are shared by their tokens,
and each stage has a run of the layers, of which the library says that they hand on hidden states
alone (`base_model_pp_plan`). A second inspection then shows what the rank's part stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.errors import ConfigError
from penstock.engine.layers.linear import constant
from penstock.engine.models.through_transformers.modules import (
    AttendingLayer,
    ModuleEmbedding,
    ModuleLinear,
    TensorShare,
)
from penstock.engine.parallel.ranks import Ranks
from penstock.engine.parallel.shard import Shard
from penstock.engine.parallel.sharding import kv_heads, share, stage_ends, table_ids, times

_GATHERED = ("colwise_gather_output", "colwise_rep")  # the second in older versions
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "local_params")
# Of the parameters of experts → the dimension from the last, and how many matrices it has.
_OF_EXPERTS = {
    "colwise": (2, 1),
    "rowwise": (1, 1),
    "packed_colwise": (2, 2),
    "packed_rowwise": (1, 2),
}

_MEET = "the stages of these models meet in each step"


class _ShapesOnly:
    """The ranks of an inspection, in which results have shapes and no numbers.

    Args:
        dtype: the model's, in which ranks exchange numbers.

    Attributes:
        is_stage: it stands for those with the same layers, not for all.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype, *, is_stage: bool) -> None:
        ranks = ranks.layers if is_stage else ranks
        self.rank, self.size, self.stage, self.num_stages = ranks.rank, ranks.size, ranks.stage, 1
        self.num_on_cores, self.is_stage, self._dtype = 1, is_stage, dtype

    @property
    def layers(self) -> Ranks:
        return self

    def open(self, dtype: torch.dtype, device: torch.device) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype:
            raise ConfigError(
                f"--tensor-parallel-size: ranks would add up {x.dtype} in a model of {self._dtype}"
            )
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.size * x.shape[1])

    def send(self, x: Tensor) -> None:  # noqa: ARG002
        raise AssertionError(_MEET)

    def receive(self, like: Tensor) -> Tensor:  # noqa: ARG002
        raise AssertionError(_MEET)

    def minimum(self, number: int) -> int:
        return number


def split_over(
    model: PreTrainedModel, layers: Sequence[AttendingLayer], ranks: Ranks
) -> dict[str, Tensor]:
    """Make a model without weights a rank's part, for an inspection; `join` follows.

    Args:
        layers: of the whole model.

    Returns:
        The tensors of layers that are other stages'.

    Raises:
        ConfigError: the library has no plan, or one that we cannot carry out, or the ranks cannot
            share a number.
    """
    absent: dict[str, Tensor] = {}
    if ranks.num_stages > 1:
        absent = _take_stage(model, ranks)
    if ranks.layers.size > 1:
        _split_layers(model, layers, ranks)
    _split_tables(model, ranks)
    return absent


def check_heads(
    found: Sequence[AttendingLayer], whole: Sequence[AttendingLayer], ranks: Ranks
) -> None:
    """
    Args:
        found: what the second inspection has shown.

    Raises:
        ConfigError: the attention of a layer has neither the rank's heads nor all, or of another
            one it has all.
    """
    by_name = {each.module: each for each in whole}
    is_mixed = len({each.num_kv_heads for each in found}) > 1
    for layer in found:
        all_of = by_name[layer.module]
        heads = all_of.num_heads, all_of.num_kv_heads
        own = heads[0] // ranks.size, max(1, heads[1] // ranks.size)
        if is_mixed or (layer.num_heads, layer.num_kv_heads) not in (heads, own):
            raise ConfigError(
                f"--tensor-parallel-size {ranks.size}: by the plan of transformers {layer.module} "
                f"has {layer.num_heads} of {heads[0]} heads and {layer.num_kv_heads} of {heads[1]} "
                "key heads"
            )


def join(model: nn.Module, ranks: Ranks) -> None:
    """Let the modules exchange numbers."""
    module: Any
    for module in model.modules():
        found = getattr(module, "ranks", None)
        if isinstance(found, _ShapesOnly):
            module.ranks = ranks.layers if found.is_stage else ranks


def _split_tables(model: PreTrainedModel, ranks: Ranks) -> None:
    """Share the embedding and the head, which have a row for each token."""
    table, head = _tables(model)
    can_split = isinstance(table, ModuleEmbedding), isinstance(head, ModuleLinear)
    if model.config.get_text_config(decoder=True).tie_word_embeddings and not all(can_split):
        return  # it is one matrix
    shapes = _ShapesOnly(ranks, model.dtype, is_stage=False)
    if isinstance(table, ModuleEmbedding):
        ids = table_ids(table.out_features, ranks)
        _take_rows(table, ids)
        table.first_id, table.num_ids, table.ranks = ids.start, len(ids), shapes
    if isinstance(head, ModuleLinear):
        _gather(head, table_ids(head.out_features, ranks), shapes)


def _split_layers(model: PreTrainedModel, layers: Sequence[AttendingLayer], ranks: Ranks) -> None:
    plan, kind = _plan(model, "tp_plan"), type(model).__name__
    tables = _tables(model)
    attending = {each.module: each for each in layers}
    modules = {name: each for name, each in model.named_modules() if each not in tables}
    styles = {name: style for name in modules if (style := plan.get(_pattern(name)))}
    of_parameters = {
        name: style
        for name, _ in model.named_parameters()
        if name.rpartition(".")[0] in modules and (style := plan.get(_pattern(name)))
    }
    if not styles and not of_parameters:
        raise ConfigError(
            f"--tensor-parallel-size: transformers has no plan of how ranks share {kind}"
        )
    shapes = _ShapesOnly(ranks, model.dtype, is_stage=True)
    for name, style in styles.items():
        module = modules[name]
        if style == "moe_tp_experts":
            for parameter, _ in module.named_parameters():
                if f"{name}.{parameter}" not in of_parameters:
                    raise _unknown(kind, f"{name}.{parameter}", "")
            module.ranks = shapes
            module.register_forward_hook(_sum)
        elif style not in _WHOLE:
            if not isinstance(module, ModuleLinear):
                raise _unknown(kind, name, style)
            _split_linear(module, name, style, attending, shapes, ranks.layers, kind)
    for name, style in of_parameters.items():
        owner = name.rpartition(".")[0]
        is_expert = styles.get(owner) == "moe_tp_experts"
        if is_expert or style not in _WHOLE:
            _split_parameter(modules[owner], name, style, ranks.layers, kind, is_expert=is_expert)


def _split_linear(
    module: ModuleLinear,
    name: str,
    style: str,
    attending: dict[str, AttendingLayer],
    shapes: _ShapesOnly,
    ranks: Ranks,
    kind: str,
) -> None:
    """
    Args:
        shapes: stands for `ranks`, which have the same layers.
    """
    if style in ("rowwise", *_SPLIT):
        columns = share(module.in_features, ranks, f"the input size of {name}")
        module.shard = Shard(
            part_sizes=(module.out_features,), in_features=module.in_features, columns=columns,
            has_bias=ranks.rank == 0,
        )  # fmt: skip
        module.own_inputs = columns if style in _SPLIT else None
        _resize(module, module.out_features, len(columns))
        module.ranks = shapes
    elif style in _GATHERED:
        _gather(module, share(module.out_features, ranks, f"the output size of {name}"), shapes)
    elif style == "colwise":
        attention = next((attending[each] for each in _parents(name) if each in attending), None)
        if attention is not None:
            share(attention.num_heads, ranks, "num_attention_heads")
            heads = kv_heads(attention.num_kv_heads, ranks)
            if module.out_features == attention.num_kv_heads * attention.head_dim:
                _take_rows(module, times(heads, attention.head_dim))
                return
        _take_rows(module, share(module.out_features, ranks, f"the output size of {name}"))
    else:
        raise _unknown(kind, name, style)


def _split_parameter(
    module: nn.Module, name: str, style: str, ranks: Ranks, kind: str, *, is_expert: bool
) -> None:
    """Split a parameter of experts, or with a number for each head, such as attention sinks."""
    own_name = name.rpartition(".")[2]
    parameter = module.get_parameter(own_name)
    place, num_parts = _OF_EXPERTS.get(style, (0, 0))
    if not is_expert and (style, parameter.dim()) == ("colwise", 1):
        place = 1
    elif not is_expert or not place or parameter.dim() != 3:
        raise _unknown(kind, name, style)
    dim = parameter.dim() - place
    size = parameter.shape[dim] // num_parts
    own = share(size, ranks, f"the {'inner ' if is_expert else ''}size of {name}")
    numbers = [torch.arange(own.start, own.stop) + part * size for part in range(num_parts)]
    taken = TensorShare(dim=dim, numbers=torch.cat(numbers), whole=tuple(parameter.shape))
    shares: dict[str, TensorShare] = getattr(module, "tensor_shares", {})
    module.tensor_shares = shares | {own_name: taken}  # type: ignore[assignment]
    module.register_parameter(own_name, constant(taken.of(parameter)))


def _take_stage(model: PreTrainedModel, ranks: Ranks) -> dict[str, Tensor]:
    """Empty the layers of other stages, and let each stage hand on what it has computed."""
    plan = _plan(model, "pp_plan")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
        and list(plan.get(name, ((), ()))[1]) == ["hidden_states"]
    ]  # fmt: skip
    if len(lists) != 1:
        raise ConfigError(
            "--pipeline-parallel-size: transformers has no plan of how stages share "
            f"{type(model).__name__}"
        )
    ((name, layers),) = lists
    ends = stage_ends(count, ranks.num_stages)
    own = range([0, *ends][ranks.stage], ends[ranks.stage])
    shapes = _ShapesOnly(ranks, model.dtype, is_stage=False)
    absent: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        if number not in own:
            absent |= layer.state_dict(prefix=f"{name}.{number}.")
            layer._modules.clear()
            layer._parameters.clear()
            layer.forward = _hand_on
    for stage, end in enumerate(ends):
        last: Any = layers[end - 1]
        last.ranks = shapes
        last.is_source = stage == ranks.stage and ranks.layers.rank == 0
        last.register_forward_hook(_hand_over)
    return absent


def _hand_on(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """The forward pass of another stage's layer."""
    return hidden_states


def _hand_over(layer: Any, _: object, output: Tensor) -> Tensor:
    """What the first rank of the layer's stage has; all others add nothing to that."""
    x = output if layer.is_source else torch.zeros_like(output)
    total: Tensor = layer.ranks.sum(x.reshape(-1, x.shape[-1]).contiguous())
    return total.view(output.shape)


def _sum(module: Any, _: object, output: Tensor) -> Tensor:
    """The sum of all ranks' experts; a hook of the module."""
    total: Tensor = module.ranks.sum(output.reshape(-1, output.shape[-1]).contiguous())
    return total.view(output.shape)


def _gather(module: ModuleLinear, rows: range, ranks: Ranks) -> None:
    module.gathered_size = module.out_features
    _take_rows(module, rows)
    module.ranks = ranks


def _take_rows(module: ModuleLinear | ModuleEmbedding, rows: range) -> None:
    module.shard = Shard(
        part_sizes=(module.out_features,), in_features=module.in_features, rows=(rows,)
    )
    _resize(module, len(rows), module.in_features)


def _resize(module: ModuleLinear | ModuleEmbedding, out_features: int, in_features: int) -> None:
    module.out_features, module.in_features = out_features, in_features
    module.part_sizes = (out_features,)
    module.weight = constant(module.weight.new_empty(out_features, in_features))
    if module.bias is not None:
        module.bias = constant(module.bias.new_empty(out_features))


def _tables(model: Any) -> tuple[nn.Module, nn.Module | None]:
    """The embedding and the head."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _plan(model: PreTrainedModel, name: str) -> dict[str, Any]:
    plan: dict[str, Any] | None = getattr(model, name, None)
    return plan or {}


def _pattern(name: str) -> str:
    """The name of a module or parameter as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _unknown(kind: str, name: str, style: str) -> ConfigError:
    found = f"has {name} {style}" if style else f"does not say what of {name} a rank has"
    return ConfigError(
        f"--tensor-parallel-size: the plan of transformers for {kind} {found}, which we cannot "
        "carry out"
    )
