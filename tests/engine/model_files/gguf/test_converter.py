"""Files that llama.cpp's own converter and quantizer write, of every family and many types: greedy
tokens are those of transformers on the dequantized weights. Needs llama.cpp as `penstock bench`
builds it (`build/peers/llamacpp`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.engine.weights.formats.gguf import GgufCheckpoint, read_gguf

from ...greedy_parity import NEAR_TIE, excuse, run
from .written import FAMILIES as WRITTEN
from .written import directory_of

pytestmark = pytest.mark.exhaustive

PEERS = Path(__file__).parents[4] / "build" / "peers" / "llamacpp"
QUANTIZER = PEERS / "llama.cpp" / "bin" / "llama-quantize"
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_NL")
NUM_NEW = 24
# K-quants need rows of a multiple of 256.
SHAPE = {"vocab_size": 1029, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
         "max_position_embeddings": 512, "initializer_range": 0.1}  # fmt: skip
WIDE = {"intermediate_size": 1024}  # the converter takes this for granted
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "rope_theta": 10000.0, "beta_fast": 16.0, "beta_slow": 2.0}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1 + i / 50 for i in range(24)],
        "long_factor": [1 + i / 5 for i in range(24)], "rope_theta": 10000.0,
        "original_max_position_embeddings": 2, "partial_rotary_factor": 0.75}  # fmt: skip
# Of the families that `written.py` has, too: what differs in models of this shape.
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 128},
    "qwen2 moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    "qwen3 moe": {"moe_intermediate_size": 256},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {"query_pre_attn_scalar": 64, "num_hidden_layers": 7},
    "phi2": WIDE,
    "gpt2": WIDE,
    "falcon 7b": WIDE,
    "falcon 40b": WIDE,
    "mpt": {"attn_config": {}},
    "cohere2": {"num_hidden_layers": 5, "rotary_pct": 1.0},
    "seed_oss": {"attention_out_bias": False},
    "smollm3": {"num_hidden_layers": 5},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (family.model, {**family.options, **CHANGES.get(name, {})})
        for name, (_, family) in WRITTEN.items()
    },
    "llama 3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama heads of 32": ("LlamaForCausalLM", {"head_dim": 32}),
    "phi3 128k": (
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "partial_rotary_factor": 0.75, "rope_parameters": LONG,
         "original_max_position_embeddings": 2},
    ),
    "cohere without normed keys": ("CohereForCausalLM", {"logit_scale": 0.5}),
    "exaone4 without windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2,
         "rope_parameters": {**LLAMA3, "factor": 16.0, "rope_theta": 1000000.0}},
    ),
}  # fmt: skip
# Fields that transformers leaves out of what it saves, and the converter needs.
NEEDED = {
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
}


@pytest.fixture(scope="module")
def converted(tiny_checkpoint: Any, tmp_path_factory: Any) -> dict[str, tuple[Path, Path]]:
    """The checkpoint and the file in F32 of each family."""
    found = sorted(PEERS.glob("llama_cpp_python-*/vendor/llama.cpp/conversion"))
    if not found or not QUANTIZER.exists():
        pytest.skip(f"no converter and quantizer of llama.cpp in {PEERS}: `make peers` builds them")
    root, made = tmp_path_factory.mktemp("converted"), {}
    for name, (architecture, options) in FAMILIES.items():
        source = root / name
        shutil.copytree(tiny_checkpoint(architecture, **(SHAPE | options)), source)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_MODEL_PATH / file, source)
        config = json.loads((source / "config.json").read_text())
        more = {key: options.get(key, each) for key, each in NEEDED.get(architecture, {}).items()}
        (source / "config.json").write_text(json.dumps({**config, **more}))
        made[name] = (source, root / f"{name}.F32.gguf")
    converter = [sys.executable, "-m", "penstock.load.peers.workers.llamacpp_converter"]
    files = (path for each in made.values() for path in each)
    command = [*converter, found[-1].parent, "ALL_F32", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return made


CASES = [(name, kind) for name in FAMILIES for kind in TYPES]
CASES += [
    (name, "MXFP4_MOE")
    for name, (_, options) in FAMILIES.items()
    if "num_experts_per_tok" in options
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, kind: str, converted: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, file = converted[name]
    if kind != "F32":
        quantized = tmp_path / f"{kind}.gguf"
        command = [QUANTIZER, file, quantized, kind, "1"]
        subprocess.run(command, capture_output=True, check=True)
        file = quantized
    path = directory_of(file, tmp_path / "made")
    config = AutoConfig.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    checkpoint, architecture = GgufCheckpoint(path), FAMILIES[name][0]
    weights = {
        parameter: _weight(checkpoint, parameter, tuple(values.shape), architecture)
        for parameter, values in model.named_parameters()
    }
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    prompts = [[3 + (7 * i * i + length) % 1000 for i in range(length)] for length in (4, 20, 70)]
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(
                model=str(path), dtype="float32", max_model_len=128, quantize_activations=False
            ),
            cache=CacheConfig(num_blocks=36, block_size=16),
            device=DeviceConfig(device="cpu"),
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    tokens = run(
        core,
        [
            Request(
                request_id=str(index), prompt_token_ids=tuple(prompt), sampling_params=params,
                arrival_s=float(index),
            )
            for index, prompt in enumerate(prompts)
        ],
    )  # fmt: skip
    for index, prompt in enumerate(prompts):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()  # fmt: skip
        got = tokens[str(index)]
        assert got == expected or excuse(model, prompt, got, expected) < NEAR_TIE


def _weight(
    checkpoint: GgufCheckpoint, name: str, shape: tuple[int, ...], architecture: str
) -> Tensor:
    """A parameter of transformers, from one tensor or more of the file."""
    is_gpt_oss = architecture == "GptOssForCausalLM"
    stem, _, last = name.removesuffix(".weight").rpartition(".")
    experts = re.sub(r"block_sparse_moe(\.experts)?$|mlp\.experts$", "mlp.experts", stem)

    def whole(projection: str, rows: int, columns: int) -> Tensor:
        name = f"{experts}.{projection}"
        matrix = read_gguf(checkpoint, name, (shape[0], rows, columns)).dequantize().float()
        return matrix.view(shape[0], rows, columns)

    if last in ("gate_up_proj", "input_linear") and len(shape) == 3:
        rows, columns = (shape[2], shape[1]) if is_gpt_oss else (shape[1], shape[2])
        gate, up = (whole(each, rows // 2, columns) for each in ("gate_proj", "up_proj"))
        if is_gpt_oss:
            return torch.stack((gate, up), dim=2).flatten(1, 2).transpose(1, 2)
        return torch.cat((gate, up), dim=1)
    if last in ("down_proj", "output_linear") and len(shape) == 3:
        if is_gpt_oss:
            return whole("down_proj", shape[2], shape[1]).transpose(1, 2)
        return whole("down_proj", shape[1], shape[2])
    if last == "gate_up_proj_bias":
        half = (shape[0], shape[1] // 2)
        parts = [checkpoint.read(f"{stem}.{each}_proj.bias", half) for each in ("gate", "up")]
        return torch.stack(parts, dim=2).flatten(1)
    if last == "down_proj_bias":
        return checkpoint.read(f"{stem}.down_proj.bias", shape)
    if match := re.fullmatch(r"(.*\.norms)\.(\d+)\.weight", name):
        norms = f"{match[1]}.*.weight"
        return checkpoint.read(norms, checkpoint.shape(norms))[int(match[2])]
    if architecture == "MixtralForCausalLM":
        name = name.replace("mlp.gate.", "block_sparse_moe.gate.")
    name = name.replace("sparse_moe.router.weight", "sparse_moe.router.layer.weight")
    if len(shape) != 2 or "norm" in last:
        return checkpoint.read(name, shape).float()
    is_transposed = architecture == "GPT2LMHeadModel" and ".h." in name
    stored = shape[::-1] if is_transposed else shape
    matrix = read_gguf(checkpoint, name.removesuffix(".weight"), stored).dequantize().float()
    return matrix.T if is_transposed else matrix
