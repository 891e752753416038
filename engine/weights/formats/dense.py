"""Matrices as they are, in bf16, fp16 or fp32: one tensor `weight` each."""

from __future__ import annotations

from penstock.engine.weights.checkpoint import Checkpoint
from penstock.engine.weights.matrix import DenseMatrix, Matrix


def read_dense(checkpoint: Checkpoint, prefix: str, shape: tuple[int, int]) -> Matrix:
    return DenseMatrix(checkpoint.read(f"{prefix}.weight", shape))
