"""Loads a checkpoint's files into a decoder, in its dtype and on its device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn

from penstock.engine.config import DType, EngineConfig, ModelConfig, Quantization
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.layers.experts import ExpertMatrices
from penstock.engine.layers.linear import Linear, MatrixLayer, constant, weight_bytes
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.model_files.config_fields import read_model_fields
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.model_files.resolve import resolve_model, weights_fingerprint
from penstock.engine.model_files.users_files import in_users_words, named_as_users_do
from penstock.engine.models.calibration import calibrate
from penstock.engine.models.decoder import (
    Decoder,
    SelfAttention,
    rotary_embeddings,
)
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.language_model import LoadedModel
from penstock.engine.models.names import (
    LLAMA_NAMES,
    WeightNames,
    is_ignorable,
)
from penstock.engine.models.parameters import Parameters, declare
from penstock.engine.models.registry import (
    Architecture,
    is_native,
    missing_option,
    own_dtype,
    read_model_config,
)
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.parallel.sharding import rank_config, split_over
from penstock.engine.speculative.device.eagle3_head import (
    Eagle3Head,
    eagle3_module_names,
    read_eagle3_config,
)
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.converted import ConvertedMatrices
from penstock.engine.weights.experts import (
    CheckpointExperts,
    DummyExperts,
    stack_experts,
)
from penstock.engine.weights.formats import (
    check_format,
    describe_format,
    format_of,
    open_checkpoint,
)
from penstock.engine.weights.matrix import DenseMatrix, Matrix, concatenate, stack
from penstock.engine.weights.quantization import LostCodesError, Quantizer, num_bytes

if TYPE_CHECKING:
    from penstock.engine.models.through_transformers.backend import TransformersModel

_log = logging.getLogger(__name__)
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MAX_VOCAB_DIFFERENCE = 128  # of a draft model, as in llama.cpp: padding, a few special tokens
_DUMMY_STD = 0.02
_NUM_DUMMY = 1_048_583  # a prime, so that the rows of a matrix that repeats the numbers differ

TargetModel: TypeAlias = "Decoder | TransformersModel"
DraftingModel: TypeAlias = Decoder | Eagle3Head


def load_model(
    config: ModelConfig,
    path: Path,
    device: torch.device,
    *,
    defers_experts: bool = False,
    ranks: Ranks = ALONE,
) -> TargetModel:
    """The model in directory `path`, with the checkpoint's weights or, for `dummy`, random ones.

    Args:
        defers_experts: on a CPU, leave reading the experts to `ExpertMatrices.load`, so that not
            all of them are in memory before they are packed.
        ranks: that share the model, of which this process has a part.

    Raises:
        ModelLoadError: names the invalid file, field or tensor.
        ConfigError: --quantization-override or -exclude names modules that there are not; the
            ranks cannot share the model.
    """
    if is_native(config, path):
        load = partial(
            load_decoder, config, path, device, defers_experts=defers_experts, ranks=ranks
        )
        try:
            model = load()
        except LostCodesError as error:
            _log.warning("kept codes of %s were lost or damaged: they are chosen again", error)
            model = load()
        if read_model_config(path)[0].takes_images:
            _take_images(model, path, device)
        return model
    return _load_through_transformers(config, path, device, ranks)


def _take_images(model: Decoder, path: Path, device: torch.device) -> None:
    """Read what encodes images.

    Raises:
        ModelLoadError: a tensor is missing or does not fit; the image processor cannot be read.
    """
    from penstock.engine.models.through_transformers.backend import read_towers

    model.images = images = read_towers(path, open_checkpoint(path), model.dtype, device)
    model.num_tower_bytes = images.weight_bytes


def load_decoder(
    config: ModelConfig,
    path: Path,
    device: torch.device,
    *,
    defers_experts: bool = False,
    ranks: Ranks = ALONE,
    only: range | None = None,
) -> Decoder:
    """A model of a native family, as `load_model` returns it.

    Args:
        only: a stage that has these layers.
    """
    architecture, whole = read_model_config(path, max_model_len=config.wanted_max_model_len)
    if config.load_format != "dummy":
        check_format(path, has_weights=True)
    own = rank_config(whole, ranks) if only is None else replace(whole, own_layers=only)
    dtype = _resolve_dtype(config, whole.dtype, path)
    weights = _Weights.of(config, path, torch.empty(0, dtype=dtype, device=device))
    names = _names_in(weights.checkpoint, architecture, whole)
    _name_tied_head(weights.quantize, names, whole)
    if weights.wants_inputs:
        _calibrate(config, path, whole, names, weights)
    if architecture.takes_images and ranks.size > 1:
        raise ConfigError(
            f"{ranks.size} ranks cannot share this model: a model with images has to be whole"
        )
    ranks.open(dtype, device)
    with torch.device("meta"):
        model = Decoder(own).to(dtype)
    split_over(model, whole, ranks)
    parameters = declare(model, names, whole)
    if weights.checkpoint is None:
        _check_room(model, path, device)
        weights.draw(parameters, config.seed or 0)
    else:
        weights.read(parameters)
    is_transposed = architecture.has_transposed_experts
    for experts in _expert_readers(
        parameters, weights, seed=config.seed or 0, is_transposed=is_transposed
    ):
        if not defers_experts or device.type != "cpu":
            experts.load()
    if weights.checkpoint is not None:
        _check_all_read(weights.checkpoint, model, names, architecture)
    for name in model.absent_matrices():
        for module_name in names(name):
            weights.quantize.kind(module_name)  # whoever has it checks the patterns
    model.quantization = weights.describe()
    weights.quantize.check_patterns()
    # Rotary frequencies and slopes follow from the config and stay float32.
    model.rotaries = rotary_embeddings(whole).to(device)
    for layer in model.own_layers:
        layer.self_attn.attention.place_alibi(device)
    return model.eval()


def _names_in(
    checkpoint: Checkpoint | None, architecture: Architecture, config: DecoderConfig
) -> WeightNames:
    """What a checkpoint calls the decoder's modules; None: one of random numbers.

    Raises:
        ModelLoadError: it has fewer layers than its config says.
    """
    if checkpoint is None:
        return architecture.names
    names = _with_fused_experts(architecture, checkpoint).found_in(checkpoint)
    _check_layers(checkpoint, names, config)
    return names


def _name_tied_head(quantize: Quantizer, names: WeightNames, config: DecoderConfig) -> None:
    if config.is_tied:
        (table,) = names("embed_tokens")
        quantize.aliases[table] = "lm_head"


def _calibrate(
    config: ModelConfig,
    path: Path,
    decoder_config: DecoderConfig,
    names: WeightNames,
    weights: _Weights,
) -> None:
    """Choose the codes of 4 bits by what the layers read, one layer after the other."""
    plain = replace(
        config, dtype="float32", quantization="none", quantization_override=(),
        quantization_exclude=(),
    )  # fmt: skip

    def load_layer(number: int) -> Decoder:
        only = range(number, number + 1)
        return load_decoder(plain, path, torch.device("cpu"), only=only)

    calibrate(path, decoder_config, names, weights.quantize, weights.like, load_layer)


def _check_all_read(
    checkpoint: Checkpoint, model: Decoder, names: WeightNames, architecture: Architecture
) -> None:
    """
    Raises:
        ModelLoadError: the checkpoint has tensors that are no rank's.
    """
    absent = _absent_modules(model, names)
    ignored = {f"{names('lm_head')[0]}.weight"} if model.config.is_tied else set()
    ignored |= {"score.weight"} if architecture.is_headless else set()
    own = (names.root, f"{names.head}.") if architecture.takes_images else ("",)
    checkpoint.check_all_read(
        lambda name: (
            name in ignored
            or is_ignorable(name)
            or name.startswith(absent)
            or not name.startswith(own)  # `read_towers` reads the others
        )
    )


def _absent_modules(model: Decoder, names: WeightNames) -> tuple[str, ...]:
    """With what the checkpoint's names of tensors begin that other stages have."""
    config = model.whole_config
    others = set(range(config.num_layers)) - set(model.config.layer_numbers)
    found = [f"{names.root}{names.layers}.{number}." for number in others]
    for name in ("embed_tokens", "embed_positions", "embed_norm", "lm_head"):
        if not hasattr(model, name):
            found += [f"{each}." for each in names(name)]
    return tuple(found) if others else ()


def _load_through_transformers(
    config: ModelConfig, path: Path, device: torch.device, ranks: Ranks
) -> TransformersModel:
    """A model that runs the code of `transformers`, with its weights."""
    from penstock.engine.models.through_transformers.weights import read_weights

    model = _build_through_transformers(config, path, ranks, has_weights=True)
    ranks.open(model.dtype, device)
    weights = _Weights.of(config, path, torch.empty(0, dtype=model.dtype, device=device))
    _check_room(model, path, device)
    if weights.checkpoint is None:
        weights.draw(declare(model.causal_lm, _own_name), config.seed or 0)
    else:
        _name_tied(weights.quantize, model)
        read_weights(
            weights.checkpoint,
            model.causal_lm,
            weights.set_matrix,
            weights.like,
            absent=model.absent,
        )
    model.quantization = weights.describe()
    weights.quantize.check_patterns()
    model.to(device).take_images(path)
    return model


def _name_tied(quantize: Quantizer, model: TransformersModel) -> None:
    for name, source in model.causal_lm.all_tied_weights_keys.items():
        quantize.aliases[source.removesuffix(".weight")] = name.removesuffix(".weight")


def build_without_weights(config: ModelConfig, path: Path, *, has_weights: bool) -> TargetModel:
    """The model in directory `path` on the meta device: what it stores and needs can be asked.

    Args:
        has_weights: the files of the weights must be there.

    Raises:
        ModelLoadError: names the file or field that is invalid, or why it is not supported.
    """
    if not is_native(config, path):
        return _build_through_transformers(config, path, has_weights=has_weights)
    most = config.wanted_max_model_len
    architecture, decoder_config = read_model_config(path, max_model_len=most)
    if config.load_format != "dummy":
        check_format(path, has_weights=has_weights)
    with torch.device("meta"):
        model = Decoder(decoder_config).to(_resolve_dtype(config, decoder_config.dtype, path))
    if has_weights:
        _read_first_matrix(model, decoder_config, architecture, path)
    if architecture.takes_images:
        from penstock.engine.models.through_transformers.backend import build_towers

        model.num_tower_bytes = weight_bytes(build_towers(path, model.dtype)[0])
    return model


def parts_by_kind(
    config: ModelConfig, path: Path, model: Decoder | TransformersModel
) -> Iterator[tuple[int, int, Quantization, bool]]:
    """What loading makes of each matrix of a dense checkpoint: its rows, columns and quantization,
    and whether the model has it already; of experts it has not.

    Args:
        model: of `build_without_weights`.
    """
    quantize = Quantizer(config.quantization, config.quantization_rules)
    if isinstance(model, Decoder):
        names = read_model_config(path)[0].names
        _name_tied_head(quantize, names, model.config)
        parameters = declare(model, names)
    else:
        _name_tied(quantize, model)
        parameters = declare(model.causal_lm, _own_name)
    for each in parameters:
        if isinstance(module := each.module, MatrixLayer) and module.is_quantizable:
            is_held = not isinstance(module, ExpertMatrices)
            for sources in each.by_expert:
                for source, size in zip(sources, each.sizes, strict=True):
                    yield size, module.in_features, quantize.kind(source), is_held


def _own_name(module: str) -> tuple[str, ...]:
    return (module,)


def _read_first_matrix(
    model: Decoder, config: DecoderConfig, architecture: Architecture, path: Path
) -> None:
    """Read one matrix, to find what loading would find: tensors of other names or sizes than the
    config has, and a quantization whose parameters are not supported.

    Raises:
        ModelLoadError: as `load_decoder`.
    """
    checkpoint = open_checkpoint(path)
    names = _names_in(checkpoint, architecture, config)
    parameters = declare(model, names, config)
    next(each for each in parameters if isinstance(each.module, Linear)).read_matrix(checkpoint)


def _build_through_transformers(
    config: ModelConfig, path: Path, ranks: Ranks = ALONE, *, has_weights: bool
) -> TransformersModel:
    """A model that runs the code of `transformers`, without weights. Its import takes seconds, so
    it is here."""
    from penstock.engine.models.through_transformers.backend import TransformersModel, inspect_model

    dtype = _resolve_dtype(config, own_dtype(read_model_fields(path)), path)
    missing = missing_option(config, path)
    if config.load_format != "dummy" and check_format(path, has_weights=False) == "gguf":
        raise missing or ConfigError("GGUF files do not run through transformers")
    try:
        inspected = inspect_model(path, dtype=dtype, trust_remote_code=config.trust_remote_code)
    except ModelLoadError as error:
        if missing is None:
            raise
        raise ModelLoadError(f"{missing}; {error}") from error
    model = TransformersModel(inspected, max_model_len=config.wanted_max_model_len, ranks=ranks)
    if config.load_format != "dummy":
        check_format(path, has_weights=has_weights)
    if missing is not None:
        reason = in_users_words(str(missing), config.model, path)
        _log.warning("runs through transformers, which is slower: %s", reason)
    return model


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where a model's matrices come from, and what becomes of them.

    Attributes:
        checkpoint: None: random numbers.
        rounded_to: the quantizations of dense matrices; `none`.
        rounds_inputs: of quantized matrices.
        like: has the dtype and device of the model.
    """

    checkpoint: Checkpoint | None
    quantize: Quantizer
    rounded_to: str
    rounds_inputs: bool
    like: Tensor

    @classmethod
    def of(cls, config: ModelConfig, path: Path, like: Tensor) -> _Weights:
        """
        Raises:
            ModelLoadError: files are missing or corrupt.
        """
        rules = config.quantization_rules
        kinds = [each for each in (config.quantization, *rules.values()) if each != "none"]
        checkpoint = None if config.load_format == "dummy" else open_checkpoint(path)
        kept = None
        if checkpoint is not None and kinds:
            kept = ConvertedMatrices(weights_fingerprint(path, with_times=True), like.dtype)
        quantize = Quantizer(config.quantization, rules, kept)
        rounded_to = " + ".join(dict.fromkeys(kinds)) or "none"
        return cls(checkpoint, quantize, rounded_to, config.quantize_activations, like)

    @property
    def wants_inputs(self) -> bool:
        """Whether some codes are to be chosen by what the modules read."""
        checkpoint = self.checkpoint
        is_dense = checkpoint is not None and format_of(checkpoint) == "dense"
        return is_dense and self.quantize.wants_inputs

    def read(self, parameters: Sequence[Parameters]) -> None:
        """Read all that is not read later.

        Raises:
            ModelLoadError: names a tensor that is missing, or has another shape or dtype.
        """
        checkpoint = self.checkpoint
        assert checkpoint is not None
        for each in parameters:
            if isinstance(each.module, ExpertMatrices):
                continue
            if isinstance(each.module, MatrixLayer):
                self.set_matrix(each, each.read_matrix(checkpoint))
            for kind, parts in each.read_others(checkpoint):
                each.module.register_parameter(kind, constant(concatenate(parts, self.like)))
            if isinstance(each.module, SelfAttention):
                _read_kv_scales(checkpoint, each.sources[0], each.module)

    def draw(self, parameters: Sequence[Parameters], seed: int) -> None:
        """Draw small normal numbers; norms are ones and biases zeros, as in a fresh model. Every
        device gets the same. Experts are drawn later."""
        for index, each in enumerate(parameters):
            for kind, parameter in list(each.module.named_parameters(recurse=False)):
                like, shape = self.like.to(parameter.dtype), tuple(parameter.shape)
                if not isinstance(each.module, MatrixLayer) or kind != "weight":
                    values = like.new_full(shape, 0.0 if kind == "bias" else 1.0)
                    values = values if len(shape) < 2 else _draw(like, shape, seed, index)
                    each.module.register_parameter(kind, constant(values))
                elif not isinstance(each.module, ExpertMatrices):
                    part_sizes, size = each.module.whole_shape
                    whole = _draw(like, (sum(part_sizes), size), seed, index)
                    self.set_matrix(each, list(map(DenseMatrix, torch.split(whole, each.sizes))))

    def set_matrix(self, parameters: Parameters, parts: Sequence[Matrix]) -> None:
        """Give a module the matrix that is made of these parts, of each source one."""
        module, names = parameters.module, parameters.sources
        assert isinstance(module, MatrixLayer)
        if module.is_quantizable:
            scales = module.may_scale_columns
            matrix = self.quantize(names, parts, self.like, may_scale_columns=scales)
        else:
            matrix = stack(parts, self.like)
        if module.shard is not None:
            matrix = module.shard.take(matrix, names[0])
        module.set_matrix(matrix, rounds_inputs=self.rounds_inputs, like=self.like)

    def describe(self) -> str:
        """How the weights are stored."""
        found = "dense" if self.checkpoint is None else describe_format(self.checkpoint)
        kinds = ((found, "dense"), (self.rounded_to, "none"))
        return " + ".join(each for each, empty in kinds if each != empty) or "none"


def load_drafting_model(config: EngineConfig, target: LoadedModel) -> DraftingModel | None:
    """The model or EAGLE-3 head that drafts for `target`, in its dtype and on its device; None if
    the config names none. For a head, the target hands out the features that it needs.

    Raises:
        ModelLoadError: names the invalid file, field or tensor.
        ConfigError: a model of another vocabulary; a head for a target on a GPU, or through
            transformers.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.model is None:
        return None
    try:
        if speculation.method == "eagle3":
            return _load_eagle3_head(speculation.model, target)
        return _load_draft_model(config.model, speculation.model, target)
    except ModelLoadError as error:
        raise ModelLoadError(f"--speculative-config: {error}") from error


def _load_draft_model(config: ModelConfig, name: str, target: LoadedModel) -> Decoder:
    settings = replace(
        config,
        model=name,
        tokenizer=None,
        tokenizer_revision=None,
        revision=None,
        hf_overrides=None,
        model_impl="native",
        dtype=cast("DType", str(target.dtype).removeprefix("torch.")),
        quantization_override=(),  # they name the target's modules
        quantization_exclude=(),
    )
    path = resolve_model(settings, weights=True)
    with named_as_users_do(name, path):
        draft = load_decoder(settings, path, target.device)
    if abs(draft.vocab_size - target.vocab_size) > _MAX_VOCAB_DIFFERENCE:
        raise ConfigError(
            f"--speculative-config: {name} has a vocabulary of {draft.vocab_size} "
            f"tokens, the model one of {target.vocab_size}: a draft model needs the same tokens"
        )
    return draft


def _load_eagle3_head(name: str, target: LoadedModel) -> Eagle3Head:
    if not isinstance(target, Decoder):
        raise ConfigError(
            "--speculative-config: the method eagle3 needs a native model, and this one runs "
            "through transformers"
        )
    if target.device.type != "cpu":  # the head's positions and ids are there
        raise ConfigError("--speculative-config: the method eagle3 needs a CPU")
    if target.ranks.size > 1:
        raise ConfigError(
            "--speculative-config: the method eagle3 needs a model that is whole, so it cannot be "
            "used with --tensor-parallel-size or --pipeline-parallel-size"
        )
    path = resolve_model(ModelConfig(model=name), weights=True)
    with named_as_users_do(name, path):
        head = _read_eagle3_head(open_checkpoint(path), target)
    target.feature_layers = head.config.feature_layers
    return head


def _read_eagle3_head(checkpoint: Checkpoint, target: Decoder) -> Eagle3Head:
    head_config = read_eagle3_config(checkpoint.config, target.config)
    with torch.device("meta"):
        head = Eagle3Head(head_config, target.config).to(target.dtype)

    table, has_table = head.embed_tokens, "embed_tokens.weight" in checkpoint
    if not has_table:
        if table.in_features != target.config.hidden_size:
            raise checkpoint.config.error(
                "hidden_size", "a head without embed_tokens.weight needs the model's hidden size"
            )
        del head.embed_tokens
    is_numbered = "layers.0.input_layernorm.weight" in checkpoint
    names = partial(eagle3_module_names, layer="layers.0" if is_numbered else "midlayer")
    like = torch.empty(0, dtype=target.dtype, device=target.device)
    weights = _Weights(checkpoint, Quantizer(), "none", rounds_inputs=True, like=like)
    weights.read(declare(head, names))
    if not has_table:  # in a module of its own: the target's loses it when it is packed
        table.weight, table.quantized = target.embed_tokens.weight, target.embed_tokens.quantized
        head.embed_tokens = table
        head.has_own_table = target.config.is_tied  # the packed head is another copy
    head.target_ids = _read_target_ids(checkpoint, head)
    checkpoint.ignore("t2d")  # the same the other way round
    checkpoint.check_all_read(is_ignorable)
    head.rotary = RotaryEmbedding(head_config.decoder.rope, head_config.decoder.head_dim)
    return head.eval()


def _read_target_ids(checkpoint: Checkpoint, head: Eagle3Head) -> Tensor:
    """The target's id of each token of the head, from the differences that `d2t` has."""
    config = head.config
    num_ids, vocab_size = config.draft_vocab_size, config.decoder.vocab_size
    if num_ids == vocab_size and "d2t" not in checkpoint:
        return torch.arange(num_ids)
    ids = torch.arange(num_ids) + checkpoint.read("d2t", (num_ids,), dtypes=("I64",))
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < num_ids:
        raise checkpoint.fault(
            "d2t", f"must name {num_ids} different tokens from 0 to {vocab_size - 1}"
        )
    return ids


def _read_kv_scales(checkpoint: Checkpoint, prefix: str, attention: SelfAttention) -> None:
    """The scales of an FP8 cache, if the checkpoint has them, whether or not they are used."""
    shard, found = attention.kv_shard, []
    heads = attention.num_kv_heads if shard is None else shard.part_sizes[0]
    for kind in ("k", "v"):
        names = (f"{prefix}.{kind}_scale", f"{prefix}.{kind}_proj.{kind}_scale")
        for name in (each for each in names if each in checkpoint):
            shape = checkpoint.shape(name)
            if shape not in ((), (1,), (heads,)):
                raise checkpoint.fault(name, f"has shape {list(shape)}, expected [] or [{heads}]")
            scales = checkpoint.read(name, shape).float().reshape(-1)
            if shard is not None and len(scales) == heads:
                scales = shard.take_bias(scales)
            found.append(scales)
    if len(found) == 2:
        attention.attention.given_scales = (found[0], found[1])


def _resolve_dtype(config: ModelConfig, own: str, path: Path) -> torch.dtype:
    """own: the checkpoint's dtype, as named in its config."""
    name = own.removeprefix("torch.") if config.dtype == "auto" else config.dtype
    if name not in _DTYPES:
        raise ModelLoadError(
            f"{path / 'config.json'}: dtype {name!r} is not supported; "
            f"choose --dtype from {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _check_layers(checkpoint: Checkpoint, names: WeightNames, config: DecoderConfig) -> None:
    """Refuse more layers than the checkpoint has, before they are built. Reading each tensor checks
    the other sizes."""
    for prefix in names(f"layers.{config.num_layers - 1}.input_layernorm"):
        if config.has_pre_norms and f"{prefix}.weight" not in checkpoint:
            raise checkpoint.config.error(
                "num_hidden_layers",
                f"the checkpoint has no tensor {prefix}.weight of the last layer",
            )


def _check_room(model: nn.Module, path: Path, device: torch.device) -> None:
    """
    Raises:
        ModelLoadError: the weights have no room; Linux would grant the memory, and kill the process
            later.
    """
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    free = free_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if num_bytes > free:
        raise ModelLoadError(
            f"{path / 'config.json'}: weights of these sizes take {num_bytes:,} bytes, but "
            f"{device} has {free:,} bytes free (hidden_size, intermediate_size, num_hidden_layers, "
            "vocab_size)"
        )


def _expert_readers(
    parameters: Sequence[Parameters], weights: _Weights, *, seed: int, is_transposed: bool
) -> Iterator[ExpertMatrices]:
    """The experts' matrices, each with a way to be read."""
    checkpoint, quantize, like = weights.checkpoint, weights.quantize, weights.like

    def set_matrix(module: ExpertMatrices, source: CheckpointExperts | DummyExperts) -> None:
        shard = module.shard
        parts = [
            matrix if shard is None else shard.take(matrix, names[0])
            for names, matrices in source.read()
            for matrix in [quantize(names, matrices, like)]
        ]
        matrix, orders = stack_experts(parts, like)
        module.set_matrix(matrix, rounds_inputs=weights.rounds_inputs, like=like)
        module.orders = None if orders is None else orders.to(like.device)

    is_dense = checkpoint is None or format_of(checkpoint) == "dense"
    for index, each in enumerate(parameters):
        name, module, names = each.name, each.module, each.sources
        if not isinstance(module, ExpertMatrices):
            continue
        part_sizes, size = module.whole_shape
        source: CheckpointExperts | DummyExperts
        if checkpoint is None:
            shape = (sum(part_sizes), size)
            source = DummyExperts(
                names, num_experts=module.num_experts, part_sizes=part_sizes,
                draw=partial(_draw, like, shape, seed, index),
                quantize=partial(quantize, like=like),
            )  # fmt: skip
        else:
            source = CheckpointExperts(
                checkpoint, name, names, num_experts=module.num_experts,
                part_sizes=part_sizes, in_features=size,
                is_transposed=is_transposed,
            )  # fmt: skip
            if module.bias is not None:
                bias = source.read_bias()
                bias = bias if module.shard is None else module.shard.take_bias(bias)
                module.bias = constant(concatenate([bias], like))
        kinds = {quantize.kind(one) for own in source.names for one in own}
        if is_dense:
            module.expected_bytes = max(
                num_bytes(kind, module.out_features, module.in_features, like.dtype)
                for kind in kinds
            )
        else:
            module.expected_bytes = source.num_bytes
        module.read = partial(set_matrix, module, source)
        yield module


def _with_fused_experts(architecture: Architecture, checkpoint: Checkpoint) -> WeightNames:
    """Where one tensor has all experts of a layer, Mixtral's modules too have Llama's names; in a
    GGUF file, each projection of the experts has."""
    if checkpoint.stacks_experts:
        own = architecture.names.modules.items()
        usual = {name: each for name, each in own if not name.startswith("mlp.experts.")}
        return replace(architecture.names, modules=usual)
    fused = "mlp.experts.gate_up_proj"
    is_fused = any(name.endswith(fused) for name in checkpoint.unread)
    if is_fused and not architecture.has_transposed_experts:
        return LLAMA_NAMES
    return architecture.names


def _draw(like: Tensor, shape: tuple[int, ...], seed: int, index: int) -> Tensor:
    """Small normal numbers. A large matrix repeats them: drawing billions takes minutes."""
    values = like.new_empty(shape)
    generator = torch.Generator().manual_seed((seed << 16) + index)
    period = min(values.numel(), _NUM_DUMMY)
    numbers = torch.randn(period, generator=generator).mul(_DUMMY_STD).to(values)
    for part in torch.split(values.flatten(), period):
        part.copy_(numbers[: len(part)])
    return values
