"""An EAGLE-3 head: one layer that guesses a model's next tokens from its hidden states.

Its input at position p is a feature of the token there (the inputs of three of the model's layers,
fused) and the embedding of token p + 1; its output predicts token p + 2. For the next guess its own
residual stream takes the feature's place.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, arXiv:2503.01840, §3; names and order as in vLLM's `llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Embedding, Linear, weight_bytes
from penstock.engine.layers.norm import RMSNorm
from penstock.engine.layers.rotary import RotaryEmbedding
from penstock.engine.model_files.config_fields import ConfigFields
from penstock.engine.models.decoder import GatedMLP, SelfAttention
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.families.llama import read_llama_config
from penstock.engine.models.language_model import LayerKV, PagedKV, StateSpec
from penstock.engine.models.names import LLAMA_NAMES
from penstock.engine.models.writer import AttentionWriter, MLPWriter, write_norm
from penstock.engine.parallel.ranks import ALONE
from penstock.engine.program.torch_backend import TorchBackend, TorchMeeting
from penstock.kernels.program import Buffer
from penstock.kernels.torch_operations import TorchStep
from penstock.kernels.torch_program import PoolProgram, Rows, TorchProgram, read

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """
    Attributes:
        decoder: the head's own layer.
        feature_layers: the model's layers whose inputs are fused, ascending.
        draft_vocab_size: how many tokens the head can guess.
        has_normed_stream: the residual stream begins with the normed feature.
    """

    decoder: DecoderConfig
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    has_normed_stream: bool


def read_eagle3_config(fields: ConfigFields, target: DecoderConfig) -> Eagle3Config:
    """
    Raises:
        ModelLoadError: names the field that is no head's, or does not fit `target`.
    """
    names = fields.texts("architectures")
    if not set(names) & set(EAGLE3_ARCHITECTURES):
        raise fields.error(
            "architectures",
            f"{', '.join(names) or 'none'} is no EAGLE-3 head: the method eagle3 needs one of "
            f"{', '.join(EAGLE3_ARCHITECTURES)}",
        )
    decoder = read_llama_config(fields)
    target_size = "target_hidden_size"
    size_name = target_size if target_size in fields else "hidden_size"
    for name, own, theirs in (
        (size_name, fields.integer(size_name), target.hidden_size),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("num_hidden_layers", decoder.num_layers, 1),
    ):
        if own != theirs:
            raise fields.error(name, f"must be {theirs} in a head for this model, not {own}")
    if decoder.hidden_size % 2:
        raise fields.error("hidden_size", f"must be even, not {decoder.hidden_size}")
    if not fields.section("eagle_config").boolean("use_aux_hidden_state", True):
        raise fields.error("eagle_config", "use_aux_hidden_state must be true")
    return Eagle3Config(
        decoder=decoder,
        feature_layers=_feature_layers(fields, target.num_layers),
        draft_vocab_size=fields.integer(
            "draft_vocab_size", decoder.vocab_size, maximum=decoder.vocab_size
        ),
        has_normed_stream=fields.boolean("norm_before_residual", False),
    )


def _feature_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are the features. One field has two meanings: at the top, as vLLM
    reads it, these layers; in `eagle_config`, as SGLang reads it, those whose outputs are meant."""
    section = fields.section("eagle_config")
    if _LAYER_IDS in fields:
        layers = fields.integers(_LAYER_IDS)
    elif _LAYER_IDS in section:
        layers = tuple(layer + 1 for layer in section.integers(_LAYER_IDS))
    else:
        layers = (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < num_layers:
        raise fields.error(
            _LAYER_IDS,
            f"the inputs of layers {', '.join(map(str, layers))} are no features of a model with "
            f"{num_layers} layers: expected ascending layers from 1 to {num_layers - 1}",
        )
    return layers


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        decoder, size = config.decoder, config.decoder.hidden_size
        self.has_normed_stream = config.has_normed_stream
        self.input_layernorm = RMSNorm(size, decoder.norm_eps)
        self.hidden_norm = RMSNorm(size, decoder.norm_eps)
        self.self_attn = SelfAttention(decoder, 0, num_inputs=2 * size)
        self.post_attention_layernorm = RMSNorm(size, decoder.norm_eps)
        self.mlp = GatedMLP(decoder)


class Eagle3Head(nn.Module):
    """
    Attributes:
        embed_tokens: the model's table, or the head's own.
        target_ids: int64 [draft_vocab_size], the model's id of each token that the head can guess.
        has_own_table: it takes memory besides the model's.
    """

    target_ids: Tensor

    def __init__(self, config: Eagle3Config, target: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        decoder, size = config.decoder, config.decoder.hidden_size
        self.embed_tokens = Embedding(decoder.vocab_size, size)
        self.fc = Linear(len(config.feature_layers) * target.hidden_size, (size,))
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, decoder.norm_eps)
        self.lm_head = Embedding(config.draft_vocab_size, size)
        self.rotary = RotaryEmbedding(decoder.rope, decoder.head_dim)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size))
        self.has_own_table = True

    @cached_property
    def _programs(self) -> PoolProgram:
        return PoolProgram(self.dtype, self._write)

    def fuse(self, inputs: Sequence[Tensor]) -> Tensor:
        """The inputs of the model's `feature_layers`, [num_tokens, its hidden_size] each → features
        [num_tokens, hidden_size]"""
        return self.fc.multiply(torch.cat(tuple(inputs), dim=-1))

    def forward(
        self, input_ids: Tensor, features: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            input_ids: int64 [num_tokens], the token after each position.
            features: [num_tokens, hidden_size], of the token at each position.

        Returns:
            hidden states, and the features for the positions after, of guessed tokens; of the
            shape of `features`.
        """
        program = self._programs.of(context.kv_pool)
        rotary = self.rotary(context.positions, context.prompt_lens, self.dtype)
        step = TorchStep(
            token_ids=input_ids, layout=context.layout, positions=context.positions,
            rotary=(rotary,),
        )  # fmt: skip
        rows: Rows = {"features": features}
        program.run(step, rows)
        return read(rows, program.buffer("hidden", 0)), read(rows, program.buffer("stream", 0))

    def _write(self, program: TorchProgram, kv_pool: Tensor) -> tuple[Buffer, Buffer]:
        """Add all records; the buffers of the hidden states and of the stream."""
        layer, size = self.midlayer, self.config.decoder.hidden_size
        names = ("features", "embedded", "both", "fused", "stream", "attended", "normed", "hidden")
        features, embedded, both, fused, stream, attended, normed, hidden = (
            program.buffer(name, size) for name in names
        )
        both.size = 2 * size
        backend = TorchBackend(
            TorchMeeting(ALONE, self.norm.weight, 0, has_before=False, has_after=False)
        )
        backend.pack_table(self.embed_tokens).write_lookup(program, embedded)
        write_norm(program, fused, features, layer.hidden_norm)
        write_norm(program, both.columns(0), embedded, layer.input_layernorm)
        program.add("scale_add", y=both.columns(size), x=fused, factor=1.0, size=size)
        residual = fused if layer.has_normed_stream else features
        attention = AttentionWriter(layer.self_attn, backend, rope=0)
        attention.write(program, y=attended, x=both, cache=kv_pool[0], residual=residual)
        write_norm(program, normed, attended, layer.post_attention_layernorm)
        MLPWriter(layer.mlp, backend).write(program, stream, normed, residual=attended)
        write_norm(program, hidden, stream, self.norm)
        return hidden, stream

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size], −inf for tokens that the head
        cannot guess"""
        known = self.lm_head.multiply(hidden)
        logits = known.new_full((len(known), self.config.decoder.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.target_ids, known)

    @property
    def state_spec(self) -> StateSpec:
        """Two groups: keys and values, which stay in the model's dtype, since they are
        those of one layer; and a feature for each token in their place, half of it in each."""
        decoder = self.config.decoder
        keys_values, features = (
            LayerKV(num_heads=num_heads, head_size=size, dtype=self.dtype, window=None)
            for num_heads, size in (
                (decoder.num_kv_heads, decoder.head_dim),
                (1, decoder.hidden_size // 2),
            )
        )
        return PagedKV((keys_values,)), PagedKV((features,))

    @property
    def weight_bytes(self) -> int:
        """Size of the weights besides the model's."""
        return weight_bytes(self) - (0 if self.has_own_table else weight_bytes(self.embed_tokens))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def needs_prompt_lens(self) -> bool:
        return self.rotary.needs_prompt_lens


def eagle3_module_names(module: str, layer: str) -> tuple[str, ...]:
    """The checkpoint's modules that make up one module of the head.

    Args:
        layer: the checkpoint's name of `midlayer`.
    """
    names = LLAMA_NAMES(module.replace("midlayer", "layers.0", 1))
    return tuple(name.removeprefix("model.").replace("layers.0", layer, 1) for name in names)
