"""Reads a checkpoint into a model of `transformers`, by the names that the library gives tensors.

The library renames, fuses and splits tensors as it loads them (its `conversion_mapping`): experts
of a layer become one tensor, for example. Its rules are applied here to our own `Checkpoint`, so
that formats of quantized matrices apply to every linear layer that is a module of the checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.linear import MatrixLayer, constant
from penstock.engine.models.names import is_ignorable
from penstock.engine.models.parameters import Parameters, declare
from penstock.engine.models.through_transformers.modules import TensorShare
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.matrix import DenseMatrix, Matrix, concatenate

SetMatrix = Callable[[Parameters, Sequence[Matrix]], None]


@dataclass(slots=True)
class _Names:
    """Where a model's tensors are in a checkpoint.

    Attributes:
        tensors: a tensor of the model → the tensor of the checkpoint that it is.
        modules: a module of the model → the module of the checkpoint.
        converted: tensors that the library makes of others: the first one of each rule's result →
            the rule, and the checkpoint's tensors by the pattern that they match.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = field(
        default_factory=dict
    )


def read_weights(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    set_matrix: SetMatrix,
    like: Tensor,
    *,
    absent: Mapping[str, Tensor],
) -> None:
    """Read all weights of a model whose parameters are on the meta device.

    Args:
        set_matrix: gives a module its matrix, which is made of one part.
        like: has the dtype and device of matrices.
        absent: tensors that other ranks have.

    Raises:
        ModelLoadError: names a tensor that is missing, surplus, or has another shape or dtype.
    """
    names = _find_names(checkpoint, model, absent)
    tied = _tied(model, names)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    wanted: dict[str, Tensor] = dict(model.state_dict())
    shares = _shares(modules)
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    shapes |= {name: shape for name, (shape, _) in shares.items()}
    done: set[str] = set()

    def assign(name: str, values: Tensor) -> None:
        module, _, kind = name.rpartition(".")
        target = modules[module]
        if name in shares:
            values = shares[name][1](values)
        if isinstance(target, MatrixLayer) and kind == "weight":
            own = Parameters(name=module, module=target, sources=(module,), orders=(None,))
            set_matrix(own, [DenseMatrix(values)])
        elif kind in target._buffers:
            target._buffers[kind] = values.to(wanted[name], copy=True)
        else:
            whole = concatenate([values[None]], like.to(wanted[name].dtype))[0]
            target.register_parameter(kind, constant(whole))
        done.add(name)

    for name, values in _converted(checkpoint, model, names, shapes):
        assign(name, values)
    for each in declare(model, lambda module: (names.modules.get(module, module),)):
        weight = f"{each.name}.weight"
        if isinstance(each.module, MatrixLayer) and weight not in done and weight not in tied:
            set_matrix(each, each.read_matrix(checkpoint))
            done.add(weight)
    for name in wanted:
        if name not in done and name not in tied:
            assign(name, checkpoint.read(names.tensors.get(name, name), shapes[name]))
    for name, source in tied.items():
        _tie(modules, name, source)
        checkpoint.ignore(names.tensors.get(name, name))
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    checkpoint.check_all_read(
        lambda name: is_ignorable(name) or any(re.search(each, name) for each in patterns)
    )


def _shares(
    modules: Mapping[str, nn.Module],
) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]:
    """For each parameter of which a rank has a share: the shape of the whole, and what takes the
    share. Of matrices `set_matrix` takes it."""
    found: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {}
    for name, module in modules.items():
        shares: dict[str, TensorShare] = getattr(module, "tensor_shares", {})
        for kind, share in shares.items():
            found[f"{name}.{kind}"] = share.whole, share.of
        if isinstance(module, MatrixLayer) and module.shard is not None:
            part_sizes, in_features = module.whole_shape
            shape = sum(part_sizes), in_features
            found[f"{name}.weight"] = shape, lambda values: values
            found[f"{name}.bias"] = shape[:1], module.shard.take_bias
    return found


def _find_names(checkpoint: Checkpoint, model: Any, absent: Mapping[str, Tensor]) -> _Names:
    rules = get_model_conversion_mapping(model)
    renamings = [each for each in rules if isinstance(each, WeightRenaming)]
    converters = [each for each in rules if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = model.state_dict() | dict(absent)
    names = _Names()
    prefix = model.base_model_prefix
    for key in sorted(checkpoint.unread, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name in absent:
            checkpoint.ignore(key)
            continue
        if pattern is not None:
            rule = copy.deepcopy(by_pattern[pattern])
            names.converted.setdefault(name, (rule, []))[1].append((key, pattern))
            continue
        names.tensors[name] = key
        module, _, kind = name.rpartition(".")
        old_module, _, old_kind = key.rpartition(".")
        if kind == old_kind:
            names.modules[module] = old_module
    return names


def _converted(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    names: _Names,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Tensor]]:
    """What the library makes of the checkpoint's tensors, and what each is.

    Raises:
        ModelLoadError: it is no tensor of the model, or has another shape.
    """
    for first, (rule, sources) in names.converted.items():
        for name, values in _convert(checkpoint, model, first, rule, sources).items():
            if values.shape != shapes.get(name):
                expected = list(shapes.get(name, ())) or "no such tensor"
                raise checkpoint.fault(
                    sources[0][0], f"becomes {name} {list(values.shape)}, expected {expected}"
                )
            yield name, values


def _convert(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    first: str,
    rule: WeightConverter,
    sources: Sequence[tuple[str, str]],
) -> dict[str, Tensor]:
    """The tensors that the library makes of these."""
    for key, pattern in sources:
        rule.add_tensor(first, key, pattern, _reader(checkpoint, key))  # type: ignore[arg-type]
    try:
        made: dict[str, Any] = rule.convert(first, model=model, config=model.config)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever tensors that do not fit lead to
        raise checkpoint.fault(sources[0][0], f"does not become {first}: {error}") from error
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _reader(checkpoint: Checkpoint, key: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(key, checkpoint.shape(key))


def _tied(model: PreTrainedModel, names: _Names) -> dict[str, str]:
    """Tensors that are another one, and which."""
    found: dict[str, str] = {}
    if model.config.tie_word_embeddings:
        for name, source in model.all_tied_weights_keys.items():
            is_swapped = source not in names.tensors and name in names.tensors
            found[source if is_swapped else name] = name if is_swapped else source
    return found


def _tie(modules: dict[str, nn.Module], name: str, source: str) -> None:
    (module_name, _, kind), (source_name, _, source_kind) = (
        each.rpartition(".") for each in (name, source)
    )
    module, other = modules[module_name], modules[source_name]
    setattr(module, kind, getattr(other, source_kind))
    if isinstance(module, MatrixLayer) and isinstance(other, MatrixLayer):
        module.quantized, module.rounds_inputs = other.quantized, other.rounds_inputs
