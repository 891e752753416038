"""Chooses a decoder's codes of 4 bits by what its layers read: one pass over a short text.

Only one layer is in memory at a time, in float32, so a machine that cannot hold the model can
convert it. What is chosen is kept (`ConvertedMatrices`), and loading finds it there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.linear import Linear, MatrixLayer
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.names import WeightNames
from penstock.engine.models.parameters import Parameters, declare
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.parallel.ranks import Alone
from penstock.engine.program.torch_backend import TorchBackend, TorchMatrix, TorchMeeting
from penstock.engine.weights.converted import ConvertedMatrices
from penstock.engine.weights.matrix import QuantizedMatrix, rows_of
from penstock.engine.weights.quantization import Quantizer, quantize_rows

_log = logging.getLogger(__name__)
_TEXT = Path(__file__).parents[1] / "weights" / "calibration.txt"
_MAX_TOKENS, _SEQUENCE_TOKENS = 4000, 512
_NUM_RANDOM = 1024  # tokens for a model without a tokenizer
_MAX_FEATURES = 16_384  # of inputs: their products are a matrix of so many rows and columns
_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 512  # of such a matrix
_REPORT_S = 10.0


class _Between(Alone):
    """What one layer sends and the next one receives."""

    def __init__(self) -> None:
        self.states = torch.empty(0)

    def send(self, x: Tensor) -> None:
        self.states = x

    def receive(self, like: Tensor) -> Tensor:  # noqa: ARG002
        return self.states


def calibrate(
    path: Path,
    config: DecoderConfig,
    names: WeightNames,
    quantize: Quantizer,
    like: Tensor,
    load_layer: Callable[[int], Decoder],
) -> None:
    """Choose the codes of all matrices that become `int4` and are not kept yet.

    Args:
        path: of the model, whose tokenizer splits the text.
        names: of the decoder's modules in the checkpoint.
        like: has the dtype to which numbers are rounded first.
        load_layer: makes a stage of the decoder that has this layer only, in float32 on the CPU.
    """
    kept = quantize.kept
    with torch.device("meta"):
        whole = Decoder(config)
    chosen = {
        source
        for each in declare(whole, names)
        if each.name.startswith("layers.") and isinstance(each.module, Linear)
        and each.module.in_features <= _MAX_FEATURES
        for source in each.sources
        if quantize.kind(source) == "int4"
    }  # fmt: skip
    if kept is None or not chosen:
        return
    with kept.claimed("int4"):
        missing = {each for each in chosen if not kept.has(each, "int4")}
        if missing:
            _run(path, config, names, missing, kept, like, load_layer)
    quantize.calibrated |= chosen


@torch.inference_mode()
def _run(
    path: Path, config: DecoderConfig, names: WeightNames, missing: set[str],
    kept: ConvertedMatrices, like: Tensor, load_layer: Callable[[int], Decoder],
) -> None:  # fmt: skip
    sequences = _sequences(path, config)
    states = [torch.empty(0)] * len(sequences)
    _log.info("choosing codes of 4 bits for %d matrices, once for this model", len(missing))
    began_s = reported_s = time.monotonic()
    for number in range(config.num_layers):
        layer = load_layer(number)
        linears = {
            each.module: each
            for each in declare(layer, names)
            if isinstance(each.module, Linear) and missing.intersection(each.sources)
        }
        moments = _second_moments(layer, linears, sequences, states)
        for module, parameters in linears.items():
            _choose(module, parameters, moments[module], missing, kept, like)
        now_s = time.monotonic()
        if now_s - reported_s > _REPORT_S:
            left_s = (now_s - began_s) / (number + 1) * (config.num_layers - number - 1)
            _log.info(
                "layer %d of %d has its codes, about %.0f s left",
                number + 1, config.num_layers, left_s,
            )  # fmt: skip
            reported_s = now_s
    _log.info("codes of 4 bits chosen in %.0f s", time.monotonic() - began_s)


def _choose(
    module: Linear,
    parameters: Parameters,
    moments: Tensor,
    missing: set[str],
    kept: ConvertedMatrices,
    like: Tensor,
) -> None:
    """The codes of the parts that are missing, which read the same, at once."""
    rows = zip(parameters.sources, torch.split(module.weight.data, parameters.sizes), strict=True)
    parts = {name: part for name, part in rows if name in missing}
    whole = quantize_rows(
        torch.cat(list(parts.values())), "int4", like.cpu(), moments, may_scale_columns=True
    )
    end = 0
    for name, part in parts.items():
        start, end = end, end + len(part)
        matrix = rows_of(whole, slice(start, end))
        assert isinstance(matrix, QuantizedMatrix)
        kept.add_calibrated(name, "int4", matrix)


class _Watched:
    """A layer that sums up xᵀ · x over the rows x that it reads; only what is on and above the
    diagonal."""

    def __init__(self, layer: MatrixLayer) -> None:
        self._layer, self.sums = layer, torch.zeros(layer.in_features, layer.in_features)

    def multiply(self, x: Tensor) -> Tensor:
        for start in range(0, x.shape[1], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            self.sums[rows, start:].addmm_(x[:, rows].T, x[:, start:])
        return self._layer.multiply(x)


class _WatchingBackend(TorchBackend):
    """Lets some layers be watched."""

    def __init__(self, meeting: TorchMeeting, watched: dict[MatrixLayer, _Watched]) -> None:
        super().__init__(meeting)
        self._watched = watched

    def pack(self, layer: MatrixLayer) -> TorchMatrix:
        return TorchMatrix(layer, self._watched.get(layer))


def _second_moments(
    layer: Decoder, linears: Iterable[Linear], sequences: Sequence[Tensor],
    states: list[Tensor],
) -> dict[MatrixLayer, Tensor]:  # fmt: skip
    """xᵀ · x of each of these modules, over all rows of the sequences.

    Args:
        states: what the layer before gave for each sequence; becomes what this one gives.
    """
    layer.ranks = link = _Between()
    watched: dict[MatrixLayer, _Watched] = {each: _Watched(each) for each in linears}
    model = TorchModel(layer, partial(_WatchingBackend, watched=watched))
    for number, sequence in enumerate(sequences):
        link.states = states[number]
        model(sequence, _context(layer, len(sequence)))
        states[number] = link.states
    return {each: found.sums for each, found in watched.items()}


def _sequences(path: Path, config: DecoderConfig) -> list[Tensor]:
    """Token ids int64 of the text; random ones for a model without `tokenizer.json`."""
    size = min(_SEQUENCE_TOKENS, config.context_len)
    first: list[int] = []
    if (path / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        text = _TEXT.read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:_MAX_TOKENS]
        ids = [each for each in ids if each < config.vocab_size]
        first = tokenizer.encode("").ids[:1]  # of a sequence, if it has one
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (_NUM_RANDOM,), generator=generator).tolist()
    size = max(1, size - len(first))
    return [torch.tensor(first + ids[at : at + size]) for at in range(0, len(ids), size)]


def _context(model: Decoder, num_tokens: int) -> ForwardContext:
    """The context of one sequence that is computed at once."""
    layers = model.state_spec[0].layers
    spec, num_layers = layers[0], len(layers)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    shape = (num_layers, 2, num_blocks, _BLOCK_SIZE, spec.num_heads, spec.head_size)
    return ForwardContext.of_sequence(torch.zeros(shape, dtype=spec.dtype), num_tokens)
