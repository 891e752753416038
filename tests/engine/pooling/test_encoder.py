"""Encoders run by `transformers`: its vectors and scores, whatever shares a forward pass."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from penstock.engine import LLM
from penstock.engine.errors import ConfigError, InvalidRequestError, ModelLoadError

from ..model_files.gguf.written import directory_of
from .test_pooling import write_modules

WORDS = [f"w{number}" for number in range(90)]
SHAPE = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 130, "initializer_range": 0.3,
}  # fmt: skip
SCORED = [("w1 w2 w3", "w4"), ("w1 w2", "w5 w6 w7 w8 w9"), ("w9", "w9 w1")]
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Makes a tiny random encoder whose tokens are words."""

    def make(kind: str, *, is_scorer: bool = False, num_labels: int = 1, **fields: Any) -> Path:
        path = tmp_path / kind
        begin, end, pad = (
            ("[CLS]", "[SEP]", "[PAD]") if kind == "bert" else ("<s>", "</s>", "<pad>")
        )
        special = [begin, pad, end, "<unk>"]
        words = {token: number for number, token in enumerate([*special, *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}",
            pair=f"{begin} $A {end} $B:1 {end}:1"
            if kind == "bert"
            else f"{begin} $A {end} {end} $B {end}",
            special_tokens=[(begin, 0), (end, 2)],
        )
        tokenizer.add_special_tokens(special)
        types = {"type_vocab_size": 2 if kind == "bert" else 1}
        config = AutoConfig.for_model(
            kind, pad_token_id=1, num_labels=num_labels, **SHAPE, **types, **fields
        )
        torch.manual_seed(1)
        model: Any = AutoModelForSequenceClassification if is_scorer else AutoModel
        model.from_config(config).save_pretrained(path)
        tokenizer.save(str(path / "tokenizer.json"))
        return path

    return make


def texts() -> list[str]:
    rng = random.Random(4)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 120))) for _ in range(24)]


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "pooling_mode_cls_token"), ("xlm-roberta", "pooling_mode_mean_tokens")],
)
@torch.inference_mode()
def test_vectors_are_those_of_transformers(build: Build, kind: str, pooling: str) -> None:
    path = build(kind)
    write_modules(path, [("Pooling", {pooling: True}), ("Normalize", {})])
    with LLM(str(path), max_num_batched_tokens=512) as llm:
        together = torch.tensor(llm.embed(texts(), use_tqdm=False))
        alone = torch.tensor([llm.embed(each, use_tqdm=False)[0] for each in texts()])
        ids = [llm.tokenizer.encode(each) for each in texts()]
        assert llm.info.max_model_len == 130 - 2 * (kind == "xlm-roberta")
        with pytest.raises(InvalidRequestError, match="makes embeddings"):
            llm.generate("w1", use_tqdm=False)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    model = AutoModel.from_pretrained(path).eval()
    for each, vector in zip(ids, together, strict=True):
        hidden = model(torch.tensor([each])).last_hidden_state[0]
        wanted = hidden[0] if "cls" in pooling else hidden.mean(0)
        wanted = torch.nn.functional.normalize(wanted, dim=0)
        assert wanted @ vector > 1 - 1e-6
        torch.testing.assert_close(vector, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@torch.inference_mode()
def test_scores_are_those_of_transformers(build: Build, kind: str) -> None:
    path = build(kind, is_scorer=True)
    queries, documents = map(list, zip(*SCORED, strict=True))
    with LLM(str(path)) as llm:
        scores = llm.score(queries, documents, use_tqdm=False)
        pairs = [llm.tokenizer._backend.encode(one, other) for one, other in SCORED]
        with pytest.raises(InvalidRequestError, match="scores pairs"):
            llm.embed("w1", use_tqdm=False)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for pair, score in zip(pairs, scores, strict=True):
        types = torch.tensor([pair.type_ids])
        wanted = model(torch.tensor([pair.ids]), token_type_ids=types).logits.sigmoid().item()
        assert score == pytest.approx(wanted, abs=1e-5)
    assert len({round(score, 3) for score in scores}) == 3


@pytest.mark.parametrize(
    ("kind", "num_labels", "problem"),
    [
        ("bert", 2, None),
        ("distilbert", 3, "single_label_classification"),
        ("xlm-roberta", 3, "multi_label_classification"),
        ("bert", 4, "regression"),
    ],
)
@torch.inference_mode()
def test_labels_are_those_of_transformers(
    build: Build, kind: str, num_labels: int, problem: str | None
) -> None:
    path = build(kind, is_scorer=True, num_labels=num_labels, problem_type=problem)
    with LLM(str(path), max_num_batched_tokens=512) as llm:
        together = torch.tensor(llm.classify(texts(), use_tqdm=False))
        ids = [llm.tokenizer.encode(each) for each in texts()]
        for refused in (lambda: llm.score("w1", "w2"), lambda: llm.embed("w1")):
            with pytest.raises(InvalidRequestError, match="classifies texts"):
                refused()
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    logits = torch.cat([model(torch.tensor([each])).logits for each in ids])
    wanted = {
        "multi_label_classification": logits.sigmoid(),
        "regression": logits,
    }.get(problem or "", logits.softmax(1))
    torch.testing.assert_close(together, wanted, atol=1e-5, rtol=0)
    assert together.std(0).min() > 1e-3


def test_what_an_encoder_cannot_do_is_said_at_start(build: Build) -> None:
    path = build("bert")
    with pytest.raises(ConfigError, match="--deterministic"):
        LLM(str(path), deterministic=True)
    with pytest.raises(ConfigError, match="--quantization"):
        LLM(str(path), quantization="int8")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        LLM(str(path))


@pytest.mark.parametrize(
    ("kind", "architecture", "tokenizer", "num_cut"),
    [
        ("bert", gguf.MODEL_ARCH.BERT, "bert", 0),
        ("roberta", gguf.MODEL_ARCH.BERT, "gpt2", 2),
        ("xlm-roberta", gguf.MODEL_ARCH.BERT, "t5", 2),
        ("nomic_bert", gguf.MODEL_ARCH.NOMIC_BERT, "bert", 0),
    ],
)
def test_a_gguf_file(
    build: Build, tmp_path: Path, kind: str, architecture: int, tokenizer: str, num_cut: int
) -> None:
    """With the names that llama.cpp's converter gives; pooling is the file's.

    Args:
        num_cut: positions before that of a text's first token, which the file lacks.
    """
    source, file = build(kind), tmp_path / "x.gguf"
    names = gguf.get_tensor_name_map(architecture, 2)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_tokenizer_model(tokenizer)
    writer.add_pad_token_id(1)
    writer.add_context_length(130 - num_cut)
    if kind == "nomic_bert":
        writer.add_rope_freq_base(1000.0)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for name, values in load_file(source / "model.safetensors").items():
        if not name.startswith("pooler."):
            kept = values[num_cut:] if "position_embeddings" in name else values
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = directory_of(file, tmp_path / "made")
    shutil.copy(source / "tokenizer.json", path)
    texts = ["w1 w2 w3", "w4"]
    with LLM(str(source), device="cpu") as llm:
        expected = llm.embed(texts)
    with LLM(str(path), device="cpu") as llm:
        found = llm.embed(texts)
    normalised = torch.nn.functional.normalize(torch.tensor(expected))
    torch.testing.assert_close(torch.tensor(found), normalised, rtol=1e-5, atol=1e-6)
