"""Matrices as they are, in bf16, fp16 or fp32: one tensor `weight` each."""

from __future__ import annotations

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.matrix import DenseMatrix, Matrix


def read_dense(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    return DenseMatrix(checkpoint.read(f"{prefix}.weight", shape))


def read_transposed(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    """Read a dense matrix that is stored as [in_features, out_features]."""
    return DenseMatrix(checkpoint.read(f"{prefix}.weight", shape[::-1]).T)
