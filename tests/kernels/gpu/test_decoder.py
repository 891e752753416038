"""The decoder as a GPU runs it: with these kernels it gives the logits it gives in torch.

In the interpreter its tensors lie on a CPU and say that they do not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.engine.model_families import FAMILIES, tiny_config
from tests.support.tiers import tiered
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.experts import ExpertsConfig
from penstock.engine.layers.linear import constant
from penstock.engine.layers.rotary import RopeConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.decoder_config import DecoderConfig
from penstock.engine.models.registry import read_model_config
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.weights.matrix import DenseMatrix
from penstock.engine.weights.quantization import quantize_rows
from penstock.kernels.gpu.quantized import GpuCodes
from penstock.kernels.paged_layout import PagedLayout

from .conftest import HAS_GPU

BLOCK_SIZE = 8
STEPS = [0, 13, 14, 15, 20]  # the sequence's lengths before and after each
NUM_PADDED = 3


def decoder(
    dtype: torch.dtype, *, has_qk_norm: bool, head_dim: int, num_layers: int = 2
) -> Decoder:
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=80,
        num_layers=num_layers,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-6,
        context_len=64,
        rope=RopeConfig(),
        windows=(None, 7)[:num_layers],
        dtype="float32",
        has_qkv_bias=True,
        has_qk_norm=has_qk_norm,
    )
    return filled(Decoder(config).to(dtype))


def filled(model: Decoder) -> Decoder:
    """With random weights."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        numbers = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(numbers * 0.3 if parameter.dim() > 1 else 1 + 0.1 * numbers)
    return model


@torch.inference_mode()
def logits(
    model: Decoder, device: str, steps: list[int] | None = None, num_padded: int = NUM_PADDED
) -> Tensor:
    """Of every token, computed in steps that are padded as a CUDA graph pads them."""
    model = model.to(device)
    runs = TorchModel(model)
    steps = STEPS if steps is None else steps
    shape = KVShape.of(model.state_spec, BLOCK_SIZE)
    pool = shape.allocate(7, torch.device(device))
    pool.copy_(torch.full_like(pool, torch.nan, dtype=torch.float32))
    table = torch.tensor([5, 2, 6], dtype=torch.int32)
    token_ids = torch.randint(50, (STEPS[-1],), generator=torch.Generator().manual_seed(1))
    found = []
    for start, end in pairwise(steps):
        positions = torch.arange(start, end)
        slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        layout = PagedLayout(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_tables=table[None].to(device),
            slot_mapping=torch.cat((slots, torch.full((num_padded,), -1))).to(device),
            max_query_len=end - start,
            max_seq_len=end,
        )
        padding = torch.zeros(num_padded, dtype=torch.int64)
        context = ForwardContext(
            kv_pool=pool, layout=layout, positions=torch.cat((positions, padding)).to(device)
        )
        hidden = runs(torch.cat((token_ids[start:end], padding)).to(device), context)
        found.append(runs.logits(hidden[: end - start]))
    return torch.cat(found).cpu()


@pytest.mark.parametrize(
    ("head_dim", "has_qk_norm", "dtype"),
    tiered([(16, False, torch.float32), (32, True, torch.float16)], [(32, True, torch.float16)]),
)
def test_equals_torch(device, head_dim, has_qk_norm, dtype, monkeypatch):
    model = decoder(dtype, has_qk_norm=has_qk_norm, head_dim=head_dim)
    exact = logits(model.double(), "cpu")
    in_torch = logits(model.to(dtype), "cpu")
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):  # of padding: nothing attends for it, so it may be anything
        by_kernels = logits(model, device)
    assert exact.std() > 0.5
    our_error, torch_error = (
        (found - exact).pow(2).mean().sqrt() for found in (by_kernels, in_torch)
    )
    assert our_error < 1.5 * torch_error


@pytest.mark.parametrize(
    ("dtype", "is_fp8"),
    tiered([(torch.float16, True), (torch.float32, False)], [(torch.float16, True)]),
)
@pytest.mark.exhaustive
def test_invariant_kernels_give_the_same_bits_in_any_chunks(device, dtype, is_fp8, monkeypatch):
    """Token by token, as a prompt, and with rows beside them: what determinism needs of a model."""
    model = decoder(dtype, has_qk_norm=True, head_dim=32).to(device)
    model.use_invariant_kernels()
    if is_fp8:
        model.use_fp8_cache()
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        whole = logits(model, device, [0, STEPS[-1]], num_padded=0)
        for steps, num_padded in ((STEPS, 3), ([0, 1, 8, 20], 1)):
            assert torch.equal(logits(model, device, steps, num_padded), whole)


@pytest.mark.exhaustive
def test_an_fp8_cache_moves_logits_a_little(device, monkeypatch):
    """And its scales reach the kernels: they refuse one without the other."""
    model = decoder(torch.float32, has_qk_norm=True, head_dim=32)
    exact = logits(model, "cpu")
    model.use_fp8_cache()
    in_torch = logits(model, "cpu")
    model = model.to(device)
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        by_kernels = logits(model, device)
    for found in (in_torch, by_kernels):
        error = (found - exact).pow(2).mean().sqrt() / exact.std()
        assert 1e-4 < error < 0.2


@pytest.mark.exhaustive
def test_sinks_and_soft_cap_reach_attention(device, monkeypatch):
    model = decoder(torch.float32, has_qk_norm=False, head_dim=16)
    plain = logits(model, "cpu")
    options = replace(model.config, has_sinks=True, attention_soft_cap=2.0)
    weights = model.state_dict()
    model = Decoder(options)
    sinks = {name: torch.ones(options.num_heads) for name in model.state_dict() if "sinks" in name}
    assert len(sinks) == options.num_layers
    model.load_state_dict({**weights, **sinks})
    in_torch = logits(model, "cpu")
    assert (in_torch - plain).abs().max() > 0.05
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        torch.testing.assert_close(logits(model, device), in_torch, atol=1e-3, rtol=1e-3)


# Their kernels are those of another family here; what differs is how their checkpoints are read.
SAME_KERNELS = {
    "gpt_neox sequential",
    "falcon 40b",
    "mpt of six heads",
    "phi with normed keys",
    "phi3 128k",
}


# Soft caps and windows; ALiBi; heads that are turned in part; norms of heads.
FIRST = ("gemma2", "bloom", "gptj", "cohere with normed keys")


@pytest.mark.parametrize(
    "name", tiered([name for name in FAMILIES if name not in SAME_KERNELS], FIRST)
)
def test_every_family(name, device, tmp_path, monkeypatch):
    architecture, options = FAMILIES[name]
    config = tiny_config(architecture, **options)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    model = filled(Decoder(read_model_config(tmp_path)[1]))
    in_torch = logits(model, "cpu", [0, 4, 5], num_padded=1)
    for layer in model.layers:
        layer.self_attn.attention.place_alibi(torch.device(device))
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        by_kernels = logits(model, device, [0, 4, 5], num_padded=1)
    assert in_torch.std() > 0.1
    torch.testing.assert_close(by_kernels, in_torch, atol=2e-4, rtol=1e-3)


EXPERTS = ExpertsConfig(
    num_experts=5, experts_per_token=2, intermediate_size=40, shared_size=32, layers=(True,)
)


def test_experts(device, monkeypatch):
    """The logits of torch, beside whatever padding holds."""
    plain = decoder(torch.float32, has_qk_norm=True, head_dim=16)
    model = Decoder(replace(plain.config, experts=EXPERTS, num_layers=1, windows=(None,)))
    for matrices in model.expert_matrices:
        matrices.weight = constant(torch.empty(matrices.out_features, matrices.in_features))
    filled(model)
    in_torch = logits(model, "cpu")
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        by_kernels = logits(model, device, [0, 14, STEPS[-1]])
    torch.testing.assert_close(by_kernels, in_torch, atol=1e-3, rtol=1e-3)


def quantized(
    model: Decoder, device: str, kind: Quantization, *, rounds_inputs: bool = False
) -> Tensor:
    """Give a copy of the quantized numbers to torch, and the codes to the kernels; the logits that
    torch computes of the former, in float64."""
    held = {
        layer: quantize_rows(layer.weight.data, kind, layer.weight.data)
        for layer in model.matrix_layers
    }
    for layer, matrix in held.items():
        layer.set_matrix(DenseMatrix(matrix.dequantize()))
    exact = logits(model.double(), "cpu")
    for layer, matrix in held.items():
        like = torch.empty(0, dtype=torch.float32, device=device)
        with pytest.MonkeyPatch.context() as patch:
            if not HAS_GPU:
                patch.setattr(torch.Tensor, "is_cuda", True)
            layer.set_matrix(matrix, rounds_inputs=rounds_inputs, like=like)
        assert all(isinstance(each, GpuCodes) for each in layer.quantized)
    model.float().to(device)
    return exact


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", tiered(["int4", "int8", "fp8"], ["int8"]))
def test_quantized_matrices(device, kind, monkeypatch):
    """Table, head and layers: the logits of the quantized numbers; with rows in bytes, nearly."""
    model = decoder(torch.float32, has_qk_norm=True, head_dim=16)
    exact = quantized(model, device, kind)
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        as_they_are = logits(model, device)
        for layer in model.matrix_layers:
            layer.rounds_inputs = True
        rounded = logits(model, device)
    assert (as_they_are - exact).norm() / exact.norm() < 1e-5
    error = (rounded - exact).norm() / exact.norm()
    if kind == "int8":
        assert 1e-3 < error < 0.05
    else:  # 4 bits are never rounded, E4M3 where a card multiplies it
        assert error < (0.2 if kind == "fp8" else 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", tiered(["int4", "int8", "fp8"], ["int4"]))
def test_quantized_matrices_give_the_same_bits_in_any_chunks(device, kind, monkeypatch):
    model = decoder(torch.float32, has_qk_norm=True, head_dim=32, num_layers=1)
    quantized(model, device, kind, rounds_inputs=True)
    model.use_invariant_kernels()
    if not HAS_GPU:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with np.errstate(all="ignore"):
        whole = logits(model, device, [0, STEPS[-1]], num_padded=0)
        assert torch.equal(logits(model, device), whole)
