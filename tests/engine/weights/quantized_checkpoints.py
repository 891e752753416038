"""Quantized checkpoints for tests: a float one, rewritten, and the numbers that it stands for.

A writer gets a matrix and returns a module's tensors, by what follows its name, and the float32
numbers that its own format says they are. compressed-tensors' are its own; the other writers
follow AutoGPTQ, AutoAWQ, bitsandbytes and DeepSeek, in as few lines as they can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
Written = tuple[dict[str, Tensor], Tensor]
Write = Callable[[Tensor], Written]


def rewrite(
    source: Path, target: Path, write: Write, config: dict[str, Any], *, kept: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Rewrite the matrices of a checkpoint's layers, but for modules whose names end so.

    Returns: the numbers, by the modules' names.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, values in load_file(source / WEIGHTS).items():
        prefix = name.removesuffix(".weight")
        if values.dim() != 2 or ".layers." not in name or prefix.endswith(tuple(kept) or ("\0",)):
            tensors[name] = values
            continue
        made, numbers[prefix] = write(values.float())
        tensors |= {f"{prefix}.{kind}": each.clone().contiguous() for kind, each in made.items()}
    save_file(tensors, target / WEIGHTS)
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = config
    (target / "config.json").write_text(json.dumps(fields))
    return numbers


def packed(codes: Tensor, bits: int, *, order: Sequence[int] = ()) -> Tensor:
    """Codes as 32-bit integers along the last dimension; place i of one has code order[i]."""
    count = 32 // bits
    parts = codes.long().unflatten(-1, (-1, count))[..., list(order or range(count))]
    whole = (parts << (bits * torch.arange(count))).sum(-1)
    return (whole - (whole >> 31 << 32)).int()


def affine(values: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [out, groups], rounded to the nearest, by group."""
    grouped = values.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round()
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def gptq(bits: int = 4, group: int = 32, *, version: int = 1, sorts: bool = False) -> Write:
    def write(values: Tensor) -> Written:
        size = values.shape[1]
        order = torch.randperm(size) if sorts else torch.arange(size)
        codes, scales, zeros = affine(values[:, order], bits, group or size)
        zeros = zeros.clamp(min=1)  # version 1 stores one less
        groups = torch.empty(size, dtype=torch.int32)
        groups[order] = torch.arange(size, dtype=torch.int32) // (group or size)
        own = torch.empty_like(codes)
        own[:, order] = codes
        tensors = {
            "qweight": packed(own, bits).T,
            "qzeros": packed((zeros - int(version == 1)).T, bits),
            "scales": scales.T.half(),
            "g_idx": groups,
        }
        return tensors, (own - zeros[:, groups]) * scales[:, groups]

    return write


def awq(values: Tensor) -> Written:
    codes, scales, zeros = affine(values, 4, 32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(codes.T, 4, order=order),
        "qzeros": packed(zeros.T, 4, order=order),
        "scales": scales.T.half(),
    }
    spread = [each.repeat_interleave(32, 1) for each in (zeros, scales)]
    return tensors, (codes - spread[0]) * spread[1]


def fp8(kind: str) -> Write:
    """Scales for `all`, for each `row`, or for blocks of 48 × 32, which do not divide 64."""

    def write(values: Tensor) -> Written:
        rows, columns = {"all": values.shape, "row": (1, values.shape[1]), "block": (48, 32)}[kind]
        out, size = values.shape
        blocks = torch.zeros(-(-out // rows) * rows, -(-size // columns) * columns)
        blocks[:out, :size] = values
        parts = blocks.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = parts.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :size]
        codes = (values / spread).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        stored = scales.reshape(()) if kind == "all" else scales
        return {"weight": codes, name: stored.clone()}, codes.float() * spread

    return write


def nf4(*, is_nested: bool) -> Write:
    """Source of the codebook: Dettmers et al., "QLoRA", 2023, appendix E."""
    codebook = torch.tensor(
        [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0,
         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
    )  # fmt: skip

    def write(values: Tensor) -> Written:
        blocks = values.reshape(-1, 32)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "shape": [*values.shape]}
        tensors = {"weight.absmax": scales}
        if is_nested:
            offset, table = float(scales.mean()), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256))
            largest = rest.reshape(-1, 256).abs().amax(1)
            near = rest / largest.repeat_interleave(256)
            codes = (near[:, None] - table).abs().argmin(1)[: len(scales)]
            scales = table[codes] * largest.repeat_interleave(256)[: len(scales)] + offset
            tensors = {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": largest,
                "weight.nested_quant_map": table,
            }
            state |= {"nested_blocksize": 256, "nested_offset": offset}
        codes = (blocks / scales[:, None].clamp(min=1e-9))[..., None].sub(codebook).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.quant_map": codebook.clone(),
            "weight.quant_state.bitsandbytes__nf4": written,
        }
        return tensors, (codebook[codes] * scales[:, None]).reshape(values.shape)

    return write


def llm_int8(values: Tensor) -> Written:
    largest = values.abs().amax(1)
    codes = (values * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest}, codes * (largest / 127)[:, None]


def modelopt_nvfp4(values: Tensor) -> Written:
    tensors, numbers = compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16,
                                  strategy="tensor_group")(values)  # fmt: skip
    made = {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": 1 / tensors["weight_global_scale"].reshape(()),
        "input_scale": torch.ones(()),
    }
    return made, numbers


def compressed(format_name: str, **arguments: Any) -> Write:
    """By compressed-tensors itself."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_name)
    compressor = BaseCompressor.get_value_from_registry(format_name)

    def write(values: Tensor) -> Written:
        out, size = values.shape
        group = args.group_size if args.group_size and args.group_size > 0 else size
        rows = 1
        if args.strategy == "tensor":
            rows = out
        if args.block_structure:
            rows, group = args.block_structure
        parts = values.unflatten(0, (-1, rows)).unflatten(2, (-1, group))
        state: dict[str, Tensor] = {"weight": values}
        options: dict[str, Any] = {}
        if format_name.startswith("nvfp4"):
            whole = 448 * 6 / values.abs().max().reshape(1)
            options["global_scale"] = state["weight_global_scale"] = whole
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
        scales, zeros = calculate_qparams(low, high, args, **options)
        state["weight_scale"] = scales.reshape(1) if args.strategy == "tensor" else scales
        state["weight_zero_point"] = zeros
        made = compressor.compress(state, scheme)
        if args.symmetric:
            made.pop("weight_zero_point", None)
        return made, compressor.decompress(made, scheme)["weight"].float()

    return write
