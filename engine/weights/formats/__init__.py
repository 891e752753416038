"""The formats of checkpoints. Each is one function, in a file of its own, that reads a module's
matrix; `quantization_config` in `config.json` names the format. What is special to GGUF and MXFP4,
whose tensors may have all experts of a layer, is asked here too: import contracts keep the files of
the formats from others."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.model_files.json_file import GGUF_FILE, is_present
from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.formats.awq import read_awq
from penstock.engine.weights.formats.bitsandbytes import read_bitsandbytes
from penstock.engine.weights.formats.compressed_tensors import read_compressed_tensors
from penstock.engine.weights.formats.dense import read_dense, read_transposed
from penstock.engine.weights.formats.fp4 import read_modelopt, read_mxfp4_experts
from penstock.engine.weights.formats.fp8 import read_fp8
from penstock.engine.weights.formats.gguf import GgufCheckpoint, read_gguf
from penstock.engine.weights.formats.gptq import read_gptq
from penstock.engine.weights.matrix import DenseMatrix, Matrix


class ReadMatrix(Protocol):
    def __call__(self, checkpoint: Checkpoint, prefix: str, shape: tuple[int, int], /) -> Matrix:
        """The matrix of the module `prefix`, whose tensors are `prefix.…`.

        The parameters of a scheme, and which modules it spares, are in `checkpoint.config`.

        Args:
            shape: (out_features, in_features), which the matrix must have.

        Raises:
            ModelLoadError: names the tensor that is missing, or that no `Matrix` can hold.
        """
        ...


FORMATS: dict[str, ReadMatrix] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "dense": read_dense,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gguf": read_gguf,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_dense,  # gpt-oss: all but the experts, see `read_stacked`
}


def open_checkpoint(path: Path) -> Checkpoint:
    """The tensors in a model's directory.

    Raises:
        ModelLoadError: files are missing or corrupt.
    """
    return GgufCheckpoint(path) if is_present(path / GGUF_FILE) else Checkpoint(path)


def check_format(path: Path, *, has_weights: bool) -> str:
    """How the weights of a model in directory `path` are stored; the name among the `FORMATS`.

    Args:
        has_weights: their files must be there.

    Raises:
        ModelLoadError: as far as can be known before they are read, they cannot be.
    """
    if is_present(path / GGUF_FILE):
        GgufCheckpoint(path).check_types()
        return "gguf"
    if has_weights:
        open_checkpoint(path)
    return _format_by(read_model_fields(path))


def format_of(checkpoint: Checkpoint) -> str:
    """The name of a checkpoint's format among the `FORMATS`, by the `quant_method` in its config.

    Raises:
        ModelLoadError: it is not among the `FORMATS`.
    """
    return "gguf" if isinstance(checkpoint, GgufCheckpoint) else _format_by(checkpoint.config)


def describe_format(checkpoint: Checkpoint) -> str:
    """The name of a checkpoint's format, with what it consists of."""
    name = format_of(checkpoint)
    types = checkpoint.types if isinstance(checkpoint, GgufCheckpoint) else ()
    return f"{name} {' + '.join(types)}".rstrip()


def read_module(
    checkpoint: Checkpoint, prefix: str, shape: tuple[int, int], *, is_transposed: bool
) -> Matrix:
    """The matrix of a module, whose tensors are `prefix.…`.

    Args:
        is_transposed: the family's checkpoints have it as [in_features, out_features]; GGUF files
            have no such matrices.
    """
    name = format_of(checkpoint)
    read = read_transposed if is_transposed and name != "gguf" else FORMATS[name]
    return read(checkpoint, prefix, shape)


def read_numbers(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor, whatever it is stored in."""
    if isinstance(checkpoint, GgufCheckpoint) and len(shape) == 2:
        return read_gguf(checkpoint, name.removesuffix(".weight"), shape).dequantize()
    return checkpoint.read(name, shape)


def read_stacked(
    checkpoint: Checkpoint, stem: str, shape: tuple[int, int, int], *, is_transposed: bool
) -> Matrix:
    """The matrices of a layer's experts, one below the other, which one tensor holds; in MXFP4 two.

    Args:
        stem: the tensor's name, in MXFP4 without `_blocks` and `_scales`.
        shape: (num_experts, out_features, in_features)
        is_transposed: a dense tensor is [num_experts, in_features, out_features].
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return read_gguf(checkpoint, stem.removesuffix(".weight"), shape)
    if f"{stem}_blocks" in checkpoint:
        return read_mxfp4_experts(checkpoint, stem, shape)
    num_experts, out_features, in_features = shape
    if is_transposed:
        values = checkpoint.read(stem, (num_experts, in_features, out_features)).transpose(1, 2)
    else:
        values = checkpoint.read(stem, shape)
    return DenseMatrix(values.flatten(0, 1))


def _format_by(config: ConfigFields) -> str:
    method = "dense"
    if "quantization_config" in config:
        method = config.section("quantization_config").text("quant_method")
    if method not in FORMATS:
        raise config.error("quantization_config", f"{method!r} checkpoints are not supported")
    return method
