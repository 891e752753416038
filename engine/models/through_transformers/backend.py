"""Any causal language model of `transformers`: for architectures without a native family.

The library's own code computes; only its attention and its linear layers are ours. Before any
weight is read, the model runs once on the meta device, where tensors have shapes but no numbers:
what it asks of the attention interface there says what each layer stores and sees, and whether the
paged cache can serve it (`inspect_model`). A step is then one flat row of tokens with their
positions, and the step's `ForwardContext` goes down to the attention as a keyword argument.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation

from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import constant, weight_bytes
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.models.language_model import (
    NUM_VERIFY_ROWS,
    LayerKV,
    PagedKV,
    StateSpec,
    StepOutput,
)
from penstock.engine.models.registry import ARCHITECTURES
from penstock.engine.models.through_transformers.cpu import CpuParts, OthersThanRowwise, use_kernels
from penstock.engine.models.through_transformers.modules import (
    CONTEXT,
    AttendingLayer,
    PagedAttention,
    replace_layers,
    trial_step,
)
from penstock.engine.models.through_transformers.ranks import check_heads, join, split_over
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.vision.towers import (
    VisionEncoder,
    has_bidirectional_images,
    is_with_images,
    towers,
)
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.token_masks import TokenMasks

_OLDEST = Version(
    "5.0"
)  # from here on the attention interface and the renaming of weights are stable
_PAGED, _INSPECTED = "penstock", "penstock-inspection"  # names of attention implementations
_NUM_TOKENS = 6  # of an inspection
# Arguments of the attention interface that do not change what a token attends to.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_UNDERSTOOD = {"dropout", "s_aux", "scaling", "sliding_window", "softcap"}
_RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm")  # in the names of kinds of layers

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A model without weights, and what its run on the meta device has shown.

    Attributes:
        model: its parameters are on the meta device, its buffers are not.
        base: the name of the module whose output is the hidden states.
        context_len: tokens of a sequence; None: the configuration does not say.
    """

    model: PreTrainedModel
    base: str
    layers: tuple[AttendingLayer, ...]
    context_len: int | None


class _UnsupportedError(Exception):
    """Why the paged cache cannot serve a model."""


def inspect_model(path: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Inspected:
    """Build the model in directory `path` without weights, and find out what it needs.

    Raises:
        ModelLoadError: names the architecture, and why it cannot be served.
    """
    fields = read_model_fields(path)
    names = fields.texts("architectures")
    try:
        if Version(transformers.__version__) < _OLDEST:
            raise _UnsupportedError(f"transformers {transformers.__version__} is too old")
        config = _read_config(path, fields, trust_remote_code=trust_remote_code)
        if not is_with_images(config):
            _check_config(config, names)
        return _inspect(_build(config, dtype, trust_remote_code=trust_remote_code))
    except _UnsupportedError as error:
        about = f"{', '.join(names) or 'none'} is not supported"
        if not set(names) & set(ARCHITECTURES):
            about += f": native are {', '.join(ARCHITECTURES)}, and"
        raise fields.error("architectures", f"{about} through transformers: {error}") from error


def _read_config(path: Path, fields: ConfigFields, *, trust_remote_code: bool) -> PreTrainedConfig:
    has_code = "auto_map" in fields
    try:
        # Code of the library itself comes first, as it needs no trust.
        config: PreTrainedConfig
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except ValueError:
            if not (has_code and trust_remote_code):
                raise
            config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        return config
    except Exception as error:  # whatever a field that makes no sense leads to
        if has_code and not trust_remote_code:
            raise _UnsupportedError(
                "it brings its own Python code, which is not run: read it, then allow it by "
                "--trust-remote-code"
            ) from error
        raise _UnsupportedError(_first_line(error)) from error


def _check_config(config: PreTrainedConfig, names: Sequence[str]) -> None:
    """Refuse what its configuration tells already."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is not None and known.__name__ not in names:
        raise _UnsupportedError(f"the language model of its model_type is {known.__name__}")
    if config.is_encoder_decoder:
        raise _UnsupportedError("it is an encoder with a decoder")
    if config.get_text_config() is not config or not hasattr(config, "num_hidden_layers"):
        raise _UnsupportedError("it is more than a language model")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))
    if recurrent:
        raise _UnsupportedError(f"it has recurrent layers ({', '.join(recurrent)})")


def _build(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with _parameters_on_meta():
            auto: Any = AutoModelForCausalLM
            if is_with_images(config):
                auto = AutoModelForImageTextToText
            model: PreTrainedModel = auto.from_config(
                config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
            )
    except Exception as error:  # whatever a field that makes no sense leads to
        raise _UnsupportedError(f"it cannot be built: {_first_line(error)}") from error
    if getattr(model, "_is_stateful", False):
        raise _UnsupportedError("it has recurrent layers")
    if not model._supports_attention_backend:
        raise _UnsupportedError("its attention does not go through the library's interface")
    # A loop over the experts that are hit; the other ways read all, or copy those that are hit.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    nn.Module.eval(model).requires_grad_(False)
    _keep_in_float32(model, dtype)
    return model


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widen what the library keeps in float32 in models of fewer bits."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    is_kept = build_glob_alternation(list(plan))[0].search
    for name, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for kind, tensor in tensors.items():
                if tensor is not None and is_kept(f"{name}.{kind}"):
                    wide = tensor.float()
                    is_weight = isinstance(tensor, nn.Parameter)
                    tensors[kind] = constant(wide) if is_weight else wide


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built here have no memory for parameters; buffers follow from the
    configuration and are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# --- the run on the meta device ---


@dataclass(slots=True)
class _Inspection:
    """Takes the place of a `ForwardContext` on the meta device."""

    names: dict[nn.Module, str]
    max_len: int
    layers: list[AttendingLayer] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)  # by the id of a mask
    kept: list[Tensor] = field(default_factory=list)  # so that ids stay unique

    def make_mask(self, mask_function: Callable[..., Tensor], num_queries: int) -> Tensor:
        """A mask that attention will recognise, for what a model lets its tokens see."""
        mask = torch.empty(1, 1, num_queries, num_queries, dtype=torch.bool, device="meta")
        self.windows[id(mask)] = _window(mask_function, self.max_len)
        self.kept.append(mask)
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | None, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        name = self.names[module]
        if id(mask) not in self.windows:
            raise _UnsupportedError(f"{name} attends with a mask of its own")
        if not getattr(module, "is_causal", True):
            raise _UnsupportedError(f"{name} is not causal")
        if any(layer.module == name for layer in self.layers):
            raise _UnsupportedError(f"{name} attends twice for a token")
        sizes = {each.shape[0] * each.shape[2] for each in (query, key, value)}
        if sizes != {_NUM_TOKENS}:
            raise _UnsupportedError(f"{name} attends to other tokens than the step's")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise _UnsupportedError(
                f"the keys of {name} have {key.shape[1]} heads of {key.shape[3]} numbers, its "
                f"values {value.shape[1]} of {value.shape[3]}, its queries {query.shape[3]} numbers"
            )
        for option, given in options.items():
            is_odd = option not in _HARMLESS | _UNDERSTOOD and given is not None
            if is_odd or (option == "dropout" and given):
                raise _UnsupportedError(f"{name} gives attention {option}, which we have not")
        sinks = options.get("s_aux")
        if sinks is not None and sinks.numel() != query.shape[1]:
            raise _UnsupportedError(f"{name} has {sinks.numel()} sinks of {query.shape[1]} heads")
        scale = options.get("scaling")
        if scale is not None and not isinstance(scale, int | float):
            raise _UnsupportedError(f"{name} computes the scale of its scores")
        self.layers.append(
            AttendingLayer(
                module=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=self.windows[id(mask)],
                soft_cap=options.get("softcap"),
                has_sinks=sinks is not None,
            )
        )
        return torch.empty_like(query).transpose(1, 2)


def _window(mask_function: Callable[..., Tensor], max_len: int) -> int | None:
    """How many positions a token sees, of a mask that is causal or a sliding window."""

    def seen(position: int) -> Tensor:
        keys = torch.arange(min(max_len, position + 2))
        return mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(position), keys)

    last = max_len - 1
    window = int(seen(last).sum())
    places = {0, 1, last // 2, last, *(window + offset for offset in (-2, -1, 0, 1))}
    for position in (each for each in places if 0 <= each <= last):
        keys = torch.arange(min(max_len, position + 2))
        expected = (keys <= position) & (keys > position - window)
        if not torch.equal(seen(position).expand(len(keys)), expected):
            raise _UnsupportedError("its attention is neither causal nor a sliding window")
    return None if window == max_len else window


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that the library calls.

    query [1, num_heads, num_tokens, head_dim], key and value [1, num_kv_heads, num_tokens,
    head_dim] → [1, num_tokens, num_heads, head_dim]
    """
    context = options.pop(CONTEXT, None)
    if isinstance(context, _Inspection):
        return context.attend(module, query, key, value, attention_mask, options), None
    if context is None:
        raise _UnsupportedError("it does not hand on the arguments of a step to its attention")
    paged: PagedAttention = module.paged_attention  # type: ignore[assignment]
    by_token = (each[0].transpose(0, 1) for each in (query, key, value))
    return paged(*by_token, context, sinks=options.get("s_aux"))[None], None


def _make_mask(
    *, mask_function: Callable[..., Tensor], q_length: int, config: PreTrainedConfig, **_: Any
) -> Tensor:
    mask: Tensor = config.penstock_inspection.make_mask(mask_function, q_length)
    return mask


transformers.AttentionInterface.register(_PAGED, _attend)
transformers.AttentionInterface.register(_INSPECTED, _attend)
# Without a function for masks, none are made in a step: the cache knows what a token sees.
transformers.AttentionMaskInterface.register(_INSPECTED, _make_mask)


@torch.inference_mode()
def _inspect(model: PreTrainedModel) -> Inspected:
    context_len = _context_len(model.config.get_text_config(decoder=True))
    layers, outputs = _run_on_meta(model, context_len)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(layers) < num_layers or len(layers) % num_layers:
        raise _UnsupportedError(
            f"{len(layers)} of its {num_layers} layers attend through the library's interface"
        )
    sizes = {(each.num_kv_heads, each.head_dim) for each in layers}
    if len(sizes) > 1:
        found = ", ".join(f"{heads} heads of {size} numbers" for heads, size in sorted(sizes))
        raise _UnsupportedError(f"its layers store keys of different sizes: {found}")
    for kept, layer in zip(
        DynamicCache(config=model.config.get_text_config(decoder=True)).layers, layers, strict=False
    ):
        if getattr(kept, "is_sliding", False) and layer.window is None:
            raise _UnsupportedError(f"{layer.module} attends to all that its cache has dropped")
    base = outputs[-1][0] if outputs else ""  # the outermost ends last
    if not base or getattr(outputs[-1][1], "last_hidden_state", None) is None:
        raise _UnsupportedError("it has no module that computes hidden states")
    return Inspected(
        model=model,
        base=base,
        layers=layers,
        context_len=context_len,
    )


def _run_on_meta(
    model: PreTrainedModel, context_len: int | None
) -> tuple[tuple[AttendingLayer, ...], list[tuple[str, Any]]]:
    """What attends; the outputs of models within it, by name."""
    shadow: Any = copy.deepcopy(model)
    shadow.to("meta")
    if hasattr(shadow, "set_experts_implementation"):
        shadow.set_experts_implementation("batched_mm")  # needs no numbers
    shadow.set_attn_implementation(_INSPECTED)
    names = {module: name for name, module in shadow.named_modules()}
    inspection = _Inspection(names, context_len or 1 << 16)
    for module in names:
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config.penstock_inspection = inspection
    outputs: list[tuple[str, Any]] = []

    def note_output(module: nn.Module, _: object, output: Any) -> None:
        outputs.append((names[module], output))

    for module, name in names.items():
        if name and isinstance(module, PreTrainedModel):
            module.register_forward_hook(note_output)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        shadow(
            input_ids=tokens,
            position_ids=torch.arange(_NUM_TOKENS, device="meta")[None],
            attention_mask=torch.ones_like(tokens),  # else it looks for packed sequences
            use_cache=False,
            **{CONTEXT: inspection},
        )
    except (_UnsupportedError, ConfigError):
        raise
    except Exception as error:
        raise _UnsupportedError(f"it cannot be inspected: {_first_line(error)}") from error
    return tuple(inspection.layers), outputs


def _context_len(config: PreTrainedConfig) -> int | None:
    """Tokens of a sequence, rotary scaling included.

    Where a model changes its rotary frequencies as a sequence grows, it does so for all sequences
    of a step at once: such sequences are kept shorter than that.
    """
    length = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [each for each in rope.values() if isinstance(each, dict)]
    for section in sections or [rope]:
        kind, factor = section.get("rope_type"), section.get("factor")
        original = section.get("original_max_position_embeddings")
        if kind == "longrope" and original:
            length = min(length or original, original)
        elif kind == "yarn" and not sections and factor and original:
            length = int(original * factor)
        elif kind == "linear" and not sections and factor and length:
            length = int(length * factor)
    return length


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- what encodes images, beside a native language model ---

_WITHIN = "model"  # the module that has the towers


def build_towers(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model in directory `path` on the meta device without its language model, and the tensors
    of that by name.

    Raises:
        ModelLoadError: it cannot be built.
    """
    fields = read_model_fields(path)
    try:
        config = _read_config(path, fields, trust_remote_code=False)
        model = _build(config, dtype, trust_remote_code=False)
    except _UnsupportedError as error:
        raise fields.error("architectures", str(error)) from error
    kept = towers(model, _WITHIN)
    within = model.get_submodule(_WITHIN)
    own = {f"{_WITHIN}.{name}." for name, each in within.named_children() if each in kept}
    own |= {f"{_WITHIN}.{name}" for name, _ in within.named_parameters(recurse=False)}
    absent = {
        name: each for name, each in model.state_dict().items() if not name.startswith(tuple(own))
    }
    for parent in (model, within):
        for name, each in list(parent.named_children()):
            if each not in (within, *kept):
                setattr(parent, name, nn.Identity())
    model.all_tied_weights_keys = {}
    return model, absent


def read_towers(
    path: Path, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> VisionEncoder:
    """
    Raises:
        ModelLoadError: names the tensor that is missing or does not fit; the image processor
            cannot be read.
    """
    from penstock.engine.models.through_transformers.weights import read_weights

    model, absent = build_towers(path, dtype)

    def set_matrix(*_: object) -> None:
        raise AssertionError("its layers are the library's")

    like = torch.empty(0, dtype=dtype, device=device)
    read_weights(checkpoint, model, set_matrix, like, absent=absent)
    return VisionEncoder(model.to(device), _WITHIN, path)  # type: ignore[arg-type]


# --- the model as it runs ---


class TransformersModel(nn.Module):
    """A `LoadedModel`, and a `LanguageModel`, whose forward pass is that of `transformers`.

    Args:
        inspected: its model has no weights yet.
        max_model_len: tokens of a sequence where the model's configuration does not say.
        ranks: that share the model, of which this becomes a part.

    Attributes:
        absent: tensors of layers that are other stages', by name, on the meta device.

    Raises:
        ConfigError: the context's length is unknown; the ranks cannot share the model.
    """

    needs_prompt_lens = False
    sends_on = False
    spares_core = False
    expected_bytes = 0

    def __init__(
        self, inspected: Inspected, *, max_model_len: int | None, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.causal_lm = inspected.model
        self.images: VisionEncoder | None = None
        self.vocab_size: int = inspected.model.config.get_text_config(decoder=True).vocab_size
        context_len = inspected.context_len or max_model_len
        if context_len is None:
            raise ConfigError("the model does not say how long its context is: set --max-model-len")
        self.context_len = context_len
        self.quantization = "none"
        replace_layers(self.causal_lm, self.dtype, besides=towers(self.causal_lm, inspected.base))
        layers = inspected.layers
        self.absent: dict[str, Tensor] = {}
        if ranks.size > 1:
            layers, self.absent = _shared(inspected, ranks)
        self._cpu: CpuParts | None = None
        self._attentions = [PagedAttention(found, index) for index, found in enumerate(layers)]
        is_bidirectional = has_bidirectional_images(self.causal_lm.config)
        for found, attention in zip(layers, self._attentions, strict=True):
            attention.has_bidirectional_images = is_bidirectional
            self.causal_lm.get_submodule(found.module).paged_attention = attention
        self.causal_lm.set_attn_implementation(_PAGED)
        self._base_name = inspected.base
        self._base = [self.causal_lm.get_submodule(inspected.base)]  # a list: is no submodule here
        self._given = _GivenHidden()
        self._head = [_replaced(self.causal_lm, inspected.base, self._given)]

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size]"""
        if self._cpu is not None:
            self._cpu.begin(input_ids, context)
        given, position_ids = {"input_ids": input_ids[None]}, context.positions[None]
        if (images := context.images) is not None:
            if images.rows is not None:
                embeddings = self.causal_lm.get_input_embeddings()(input_ids[None])
                embeddings[0, images.rows] = images.features
                given = {"inputs_embeds": embeddings}
            if images.offsets is not None:
                position_ids = (context.positions + images.offsets)[:, None]
        output = self._base[0](
            **given, position_ids=position_ids, use_cache=False, **{CONTEXT: context}
        )
        self._given.kind = type(output)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,  # noqa: ARG002  (a sampler draws)
        draws: Tensor | None = None,  # noqa: ARG002
        masks: TokenMasks | None = None,  # noqa: ARG002
    ) -> StepOutput:
        hidden = self(input_ids, context)
        sampled = hidden if sampled_tokens is None else hidden[sampled_tokens]
        return StepOutput(hidden=hidden, logits=self.logits(sampled))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]

        What follows the hidden states differs by model (factors, soft caps), so the library
        computes it, given hidden states in the place of its model's.
        """
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head[0](input_ids=ids, use_cache=False).logits
        return logits[0]

    def take_images(self, path: Path) -> None:
        """Move the vision towers, if it has any, out of the model.

        Args:
            path: the directory of the model's files.

        Raises:
            ModelLoadError: the image processor cannot be read.
        """
        if is_with_images(self.causal_lm.config):
            self.images = VisionEncoder(self.causal_lm, self._base_name, path)

    @property
    def state_spec(self) -> StateSpec:
        layers = tuple(
            LayerKV(
                num_heads=each.num_kv_heads,
                head_size=each.stored_size,
                dtype=each.cache_dtype or self.dtype,
                window=each.window,
            )
            for each in self._attentions
        )
        return (PagedKV(layers),)

    def use_fp8_cache(self) -> None:
        """Store keys and values in FP8.

        Raises:
            ConfigError: images are attended to without our kernels.
        """
        self._refuse_with_whole_images()
        for each in self._attentions:
            each.cache_dtype = torch.float8_e4m3fn
            each.use_fp8_cache(each.num_kv_heads, self.device)

    def use_int8_cache(self) -> None:
        """Store keys and values in bytes, with a scale for each token and head; on a CPU.

        Raises:
            ConfigError: as for FP8.
        """
        self._refuse_with_whole_images()
        for each in self._attentions:
            each.cache_dtype = torch.int8

    def _refuse_with_whole_images(self) -> None:
        if has_bidirectional_images(self.causal_lm.config):
            raise ConfigError(
                "--kv-cache-dtype must be auto: in this model an image's tokens attend to all of it"
            )

    @torch.inference_mode()
    def check_rows(self, block_size: int) -> None:
        """Refuse a model in which a token's result depends on other sequences of a step, such as by
        a convolution over neighbouring rows.

        Raises:
            ModelLoadError: names the architecture.
        """
        context = trial_step(self._attentions, self.dtype, block_size, (1, 1), self.device)
        last = self.vocab_size - 1
        alone, beside = (
            self(torch.tensor(ids, device=self.device), context)[1].float().clone()
            for ids in ((0, 0), (last, 0))
        )
        if (alone - beside).abs().max() > 0.05 * alone.abs().max():
            raise ModelLoadError(
                f"{type(self.causal_lm).__name__} is not supported through transformers: a token's "
                "result depends on other sequences"
            )

    def use_cpu_kernels(
        self, library: CpuLibrary, block_size: int, *, deterministic: bool = False
    ) -> None:
        """Compute by the kernels what they can, and drop what they have packed.

        Raises:
            ConfigError: in deterministic mode, names an operation of torch's that depends on the
                batch.
        """
        # Layers that run together round as those that do not, which is more than may be promised.
        self._cpu = use_kernels(self.causal_lm, library, block_size, has_chain=not deterministic)
        if not deterministic:
            return
        context = trial_step(self._attentions, self.dtype, block_size, (2, 1), self.device)
        with torch.inference_mode(), OthersThanRowwise() as others:
            self.logits(self(torch.zeros(3, dtype=torch.int64), context))
        if others.names:
            raise ConfigError(
                f"--deterministic: {type(self.causal_lm).__name__} through transformers leaves "
                f"{', '.join(sorted(others.names))} to torch, whose results may depend on the batch"
            )

    def use_invariant_kernels(self) -> None:
        """
        Raises:
            ConfigError: most operations are the library's.
        """
        raise ConfigError(
            "--deterministic: on a GPU the operations of transformers depend on the batch"
        )

    @property
    def has_fused_experts(self) -> bool:
        """Whether there are matrices of which torch computes the products, on a CPU too."""
        return any(each.dim() > 2 for each in self.parameters())

    @property
    def weight_bytes(self) -> int:
        """Size of all weights, as they are held."""
        others = (each.weight_bytes for each in (self._cpu, self.images) if each is not None)
        return weight_bytes(self) + sum(others)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.causal_lm.config.dtype
        assert isinstance(dtype, torch.dtype), "given when it was built"
        return dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def num_threads(self) -> int:
        if self._cpu is not None:
            return self._cpu.library.num_threads
        return torch.get_num_threads()

    @property
    def num_verify_rows(self) -> int:
        if self._cpu is not None:
            return self._cpu.library.num_verify_rows(self._cpu.products)
        return NUM_VERIFY_ROWS[self.device.type]


def _shared(
    inspected: Inspected, ranks: Ranks
) -> tuple[tuple[AttendingLayer, ...], dict[str, Tensor]]:
    """Make the model a rank's part; its layers, and the tensors of layers that it has not."""
    model, about = inspected.model, "--tensor-parallel-size and --pipeline-parallel-size"
    if is_with_images(model.config):
        raise ConfigError(f"{about}: a model with images has to be whole")
    try:
        absent = split_over(model, inspected.layers, ranks)
        layers, _ = _run_on_meta(model, inspected.context_len)
    except _UnsupportedError as error:
        raise ConfigError(
            f"{about}: {type(model).__name__} cannot be shared by the plan of transformers: {error}"
        ) from error
    check_heads(layers, inspected.layers, ranks.layers)
    join(model, ranks)
    return layers, absent


class _GivenHidden(nn.Module):
    """Stands for the module that computes hidden states, where they are computed already.

    Attributes:
        kind: the type of its output.
    """

    kind: type[Any]
    hidden: Tensor

    def forward(self, *_: object, **__: object) -> Any:
        return self.kind(last_hidden_state=self.hidden)


def _replaced(root: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """A copy of `root` in which the module of this name is another one."""
    root = copy.copy(root)
    root._modules = dict(root._modules)
    first, _, rest = name.partition(".")
    old = root._modules[first]
    assert old is not None
    root._modules[first] = _replaced(old, rest, module) if rest else module
    return root
