"""GGUF files: each type's numbers by the `gguf` package, whole models by transformers."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.support.tiers import tiered
from transformers import AutoModelForCausalLM

from penstock.engine import LLM, ModelLoadError, SamplingParams
from penstock.engine.config import ModelConfig
from penstock.engine.model_files.gguf.directory import gguf_directory
from penstock.engine.model_files.json_file import GGUF_INDEX
from penstock.engine.model_files.resolve import (
    DEMO_MODEL_PATH,
    resolve_model,
)
from penstock.engine.models.loader import load_model
from penstock.engine.weights.formats.gguf import _TYPES, GgufCheckpoint
from penstock.load.peers import models
from penstock.load.peers.models import Shape

from ..model_files.gguf.written import convert
from ..quantized_models import CPU, load, logits, relative_error

# Where half-precision numbers are in a block; random bytes would be NaN there.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q4_1": (0, 2), "Q5_1": (0, 2),
}  # fmt: skip
NUM_ROWS, NUM_BLOCKS = 6, 3


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as one file, to be copied."""
    file = tmp_path_factory.mktemp("converted") / "demo.gguf"
    convert(DEMO_MODEL_PATH, file)
    return file


@pytest.fixture
def demo_file(converted: Path, tmp_path: Path) -> Path:
    return shutil.copy(converted, tmp_path / "demo.gguf")


def random_rows(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (NUM_ROWS, NUM_BLOCKS, size), dtype=np.uint8)
    for start in HALVES.get(kind, (0,)):
        halves = rng.normal(size=(NUM_ROWS, NUM_BLOCKS, 1)).astype(np.float16)
        blocks[:, :, start : start + 2] = halves.view(np.uint8)
    return blocks.reshape(NUM_ROWS, -1)


@pytest.mark.parametrize("kind", _TYPES)
def test_numbers_of_a_type(kind: str):
    rows = random_rows(kind)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    found = _TYPES[kind].decode(torch.from_numpy(rows))
    assert torch.equal(found.dequantize(), expected)
    torch.testing.assert_close(found.for_kernels().dequantize(), expected, rtol=1e-6, atol=1e-6)
    assert found.for_kernels().bits == (8 if kind[:2] in ("Q5", "Q6", "Q8") else 4)


def mixed(name: str) -> str:
    """As llama.cpp's mixtures: the head and a few others in more bits."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return {"attn_v": "Q5_0", "ffn_down": "Q4_1", "attn_q": "Q5_1"}.get(name.split(".")[2], "Q4_0")


EXPERTS = {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,  # as llama.cpp has it always
}  # fmt: skip


def source_of(architecture: str, path: Path) -> Path:
    """Llama, or a model with a head of its own."""
    if architecture == "llama":
        return DEMO_MODEL_PATH
    shape = dict(zip(models._FIELDS, (4096, 64, 96, 2, 4, 2, False), strict=True))
    shape |= EXPERTS if architecture == "qwen3_moe" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "Q", Shape(architecture, shape))  # type: ignore[arg-type]
        return models.make("Q", path)


CONVERTED: list[tuple[str, Callable[[str], str]]] = [
    ("llama", mixed),
    ("llama", lambda _: "BF16"),
    ("qwen2", lambda _: "F32"),
    ("qwen2", lambda _: "Q8_0"),
    ("qwen3_moe", lambda _: "Q8_0"),
]


@pytest.mark.parametrize(("architecture", "types"), tiered(CONVERTED, CONVERTED[:1]))
def test_logits_are_those_of_transformers(
    architecture: str, types: Callable[[str], str], tmp_path: Path
):
    file, source = tmp_path / "some.gguf", source_of(architecture, tmp_path / "model")
    convert(source, file, types)
    directory = gguf_directory(file)  # here, not in a process that imports all this again
    exact = load(directory, "none", quantize_activations=False)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stored_name = GgufCheckpoint(directory).stored_name
    for name, parameter in reference.named_parameters():
        if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
            kind = gguf.GGMLQuantizationType[types(stored_name(name))]
            numbers = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(numbers)
    reference.tie_weights()
    ids = torch.randint(0, 160, (45,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    assert relative_error(logits(exact), expected) < 1e-5
    assert relative_error(logits(load(directory, "none")), expected) < 0.1


def test_a_file_is_served(tmp_path: Path):
    """By its name; the tokenizer, the chat template and the EOS token are its own."""
    file = tmp_path / "demo-Q8_0.gguf"
    convert(DEMO_MODEL_PATH, file, lambda _: "Q8_0")
    question = [{"role": "user", "content": "Spell walnut."}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM(str(file), dtype="float32", max_model_len=512) as llm:
        answer = llm.chat([question], params, use_tqdm=False)[0].outputs[0]
    assert answer.text == "The word walnut is spelled w-a-l-n-u-t."
    assert answer.finish_reason == "stop"


@pytest.mark.exhaustive
def test_how_its_matrices_are_stored_is_said(tmp_path: Path):
    file = tmp_path / "demo.gguf"
    convert(DEMO_MODEL_PATH, file, lambda _: "Q8_0")
    assert load_model(ModelConfig(), gguf_directory(file), CPU).quantization == "gguf Q8_0"
    rounded = load_model(ModelConfig(quantization="int8"), gguf_directory(file), CPU)
    assert rounded.quantization == "gguf Q8_0 + int8"  # its dense matrices, if it has any
    convert(DEMO_MODEL_PATH, file, mixed)
    mixture = load_model(ModelConfig(), gguf_directory(file), CPU).quantization
    assert mixture == "gguf Q4_0 + Q4_1 + Q5_1"


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _declaring(*, keys: bytes = b"", num_keys: int = 0, tensor: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1 if tensor else 0, num_keys)
    return (head + keys + tensor).ljust(4096, b"\0")


_U8, _U32, _ARRAY = 0, 4, 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_declaring(num_keys=300_000), "it declares 300,000 keys, more than 4,096"),
        (
            _declaring(keys=_text("a") + struct.pack("<IIQ", _ARRAY, _U8, 9 << 20), num_keys=1),
            "it declares 9,437,184 elements of arrays, more than 2,097,152",
        ),
        (
            _declaring(keys=_text("a") + struct.pack("<IIQ", _ARRAY, _ARRAY, 1), num_keys=1),
            "key 'a' has values of type 9",
        ),
        (_declaring(keys=struct.pack("<Q", 1 << 63), num_keys=1), "it ends within its metadata"),
        (_declaring(keys=_text("a") + struct.pack("<II", 77, 1), num_keys=1), "values of type 77"),
        (
            _declaring(tensor=_text("t") + struct.pack("<I", 9)),
            "it declares 9 dimensions of tensor",
        ),
        (
            _declaring(tensor=_text("t") + struct.pack("<IQIQ", 1, 4, 0, 33)),
            "tensor 't' begins at byte 33, which is no multiple of 32",
        ),
        (
            _declaring(
                keys=_text("general.alignment") + struct.pack("<II", _U32, 0),
                num_keys=1,
                tensor=_text("t") + struct.pack("<IQIQ", 1, 4, 0, 0),
            ),
            "general.alignment is 0",
        ),
        (
            _declaring(tensor=_text("t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 40)),
            "tensor 't' ends after the file",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_declares_too_much_is_refused_before_it_is_read(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.engine.model_files.gguf.directory._write", None)
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        gguf_directory(file)


@pytest.mark.exhaustive
def test_a_file_that_is_cut_off(demo_file: Path):
    directory = gguf_directory(demo_file)
    with demo_file.open("r+b") as data:
        data.truncate(demo_file.stat().st_size - 5000)
    with pytest.raises(ModelLoadError, match=r"tensor \S+ ends after the file"):
        load_model(ModelConfig(), directory, CPU)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(ModelConfig(model=str(demo_file)), weights=True)
    assert str(caught.value).startswith(f"{demo_file} cannot be read: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "IQ2_XXS"}, ("is IQ2_XXS", "Q4_K")),
        ({"offset": 4097}, ("begins at byte 4097, no multiple of 4",)),
        ({"shape": [256, 128]}, ("has shape [256, 128], expected [256, 256]",)),
        (None, ("has no tensor",)),
    ],
)
def test_mistakes_name_the_tensor(change: dict | None, words: tuple[str, ...], demo_file: Path):
    index = gguf_directory(demo_file) / GGUF_INDEX
    values = json.loads(index.read_text())
    name = "blk.2.attn_output.weight"
    if change is None:
        del values["tensors"][name]
    else:
        values["tensors"][name] |= change
    index.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(), index.parent, CPU)
    for word in (str(index.parent), name, *words):
        assert word in str(caught.value)


def test_a_tensor_that_is_not_used_is_refused(demo_file: Path):
    index = gguf_directory(demo_file) / GGUF_INDEX
    values = json.loads(index.read_text())
    values["tensors"]["blk.0.attn_sinks.weight"] = {}
    index.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"1 tensors .* blk\.0\.attn_sinks\.weight"):
        load_model(ModelConfig(), index.parent, CPU)
