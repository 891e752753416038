"""Vectors and scores: those of `transformers` on the same weights, the same bits beside others."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from penstock.engine import LLM, LoRARequest
from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.errors import InvalidRequestError, ModelLoadError, PromptTooLongError
from penstock.engine.pooling.pairs import PairPrompts
from penstock.engine.pooling.settings import ModelPooling, PoolingParams, read_pooling, shortened
from penstock.engine.request import NO_OUTPUT, Request, RequestOutput, SamplingParams
from penstock.engine.startup import build_core
from tests.support.peft_models import read_adapted, write_adapter

from ..lettered import lettered

QWEN3 = "Qwen3ForCausalLM"
LAST = [("Pooling", {"pooling_mode_lasttoken": True}), ("Normalize", {})]
# Architecture, its modules (None: those of a model that generates), and the kind of pooling.
CHECKPOINTS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]] | None, str]] = {
    "a model that generates": (QWEN3, None, "last"),
    "last, normalised": (QWEN3, LAST, "last"),
    "mean": ("LlamaForCausalLM", [("Pooling", {"pooling_mode": "mean"})], "mean"),
    "first": ("Qwen2ForCausalLM", [("Pooling", {"pooling_mode_cls_token": True})], "cls"),
}


def prompts(num: int = 12) -> list[list[int]]:
    rng = random.Random(7)
    stem = [rng.randrange(3, 160) for _ in range(40)]
    lengths = [1, 2, 90, *(rng.randint(3, 60) for _ in range(num - 3))]
    return [
        [*stem[: length // 2], *(rng.randrange(3, 160) for _ in range(length - length // 2))]
        for length in lengths
    ]


def write_modules(path: Path, modules: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """As sentence-transformers does."""
    library = "sentence_transformers.models"
    entries = [{"path": "", "type": f"{library}.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        folder = f"{number}_{kind}"
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(config))
        entries.append({"path": folder, "type": f"{library}.{kind}"})
    (path / "modules.json").write_text(json.dumps(entries))


@pytest.fixture
def embedder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """Makes a checkpoint; one with modules is saved from the model without its head."""

    def make(name: str) -> Path:
        architecture, modules, _ = CHECKPOINTS[name]
        path = lettered(tiny_checkpoint(architecture), tmp_path / "model")
        if modules is not None:
            AutoModelForCausalLM.from_pretrained(path).base_model.save_pretrained(path)
            write_modules(path, modules)
        return path

    return make


@torch.inference_mode()
def expected(path: Path, token_ids: Sequence[int], kind: str, *, is_normalized: bool) -> Any:
    """What `transformers` computes, alone."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    hidden = model(torch.tensor([token_ids])).last_hidden_state[0].double()
    pooled = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
    return torch.nn.functional.normalize(pooled, dim=0) if is_normalized else pooled


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_vectors_are_those_of_transformers(embedder: Callable[[str], Path], name: str) -> None:
    """In chunks, beside each other and alone, with a warm cache and without: the same bits."""
    path, (_, modules, kind) = embedder(name), CHECKPOINTS[name]
    is_normalized = modules is None or ("Normalize", {}) in modules
    settings = {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 300, "swap_space": 0}
    with LLM(str(path), dtype="float32", **settings) as llm:
        together = llm.embed(prompts(), use_tqdm=False)
        alone = [llm.embed(each, use_tqdm=False)[0] for each in prompts()]
        short = llm.embed(prompts(), dimensions=5, use_tqdm=False)
        if modules is not None:
            with pytest.raises(InvalidRequestError, match="makes embeddings"):
                llm.generate([5, 6], use_tqdm=False)
        with pytest.raises(PromptTooLongError):
            llm.embed([5] * 257, use_tqdm=False)
        assert len(llm.embed([5] * 256, use_tqdm=False)[0]) == 64  # the whole context
    assert together == alone
    for prompt, vector, first in zip(prompts(), together, short, strict=True):
        wanted = expected(path, prompt, kind, is_normalized=is_normalized)
        found = torch.tensor(vector, dtype=torch.float64)
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 1 - 1e-9
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(
            torch.tensor(first, dtype=torch.float64),
            torch.nn.functional.normalize(wanted[:5], dim=0),
            atol=2e-5,
            rtol=2e-5,
        )


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel], ids=["whole", "headless"])
def test_vectors_of_adapters_are_pefts(
    embedder: Callable[[str], Path], tmp_path: Path, auto: Any
) -> None:
    """Different ones beside each other, whether or not they were made with the model's head."""
    path, paths = embedder("mean"), [tmp_path / "a", tmp_path / "b"]
    for seed, each in enumerate(paths):
        write_adapter(path, each, seed, auto=auto)
    adapters = [None, *(LoRARequest(name=each.name, path=each) for each in paths)]
    several = [(prompt, each) for prompt in prompts(4) for each in adapters]
    with LLM(str(path), dtype="float32", enable_lora=True, num_blocks=300) as llm:
        found = llm.embed(
            [prompt for prompt, _ in several],
            lora_request=[each for _, each in several],
            use_tqdm=False,
        )
        (near,) = llm.score("a", "b", lora_request=adapters[1], use_tqdm=False)
        assert near != llm.score("a", "b", use_tqdm=False)[0]
    models = {name: read_adapted(path, name and tmp_path / name, auto) for name in (None, "a", "b")}
    for (prompt, adapter), vector in zip(several, found, strict=True):
        model = models[adapter and adapter.name]
        with torch.inference_mode():
            states = model(
                input_ids=torch.tensor([prompt]), output_hidden_states=True
            ).hidden_states
        torch.testing.assert_close(
            torch.tensor(vector), states[-1][0].mean(0), atol=3e-5, rtol=3e-5
        )


def run(
    path: Path, requests: Sequence[Request], *, num_blocks: int, preemption: str = "auto"
) -> tuple[dict[str, tuple[Any, ...]], int]:
    """What each request got, tokens or a vector, and how many were preempted."""
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32", max_model_len=128),
            cache=CacheConfig(num_blocks=num_blocks, block_size=8, num_host_blocks=200),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=48,
                max_num_seqs=10,
                preemption=preemption,  # type: ignore[arg-type]
                max_steps_in_flight=1 + (preemption == "recompute"),
            ),
        )
    )
    got: dict[str, tuple[Any, ...]] = {each.request_id: () for each in requests}
    waiting = list(requests)
    while waiting or core.has_work():
        for request in waiting[:2]:  # they arrive while others run
            core.add(request)
        waiting = waiting[2:]
        for output in core.step():
            assert output.error is None
            got[output.request_id] += output.token_ids or _vector(output)
        core.scheduler.blocks.check_integrity()
    num_preempted = core.scheduler.counters.num_preemptions
    core.close()
    return got, num_preempted


def _vector(output: RequestOutput) -> tuple[Any, ...]:
    return () if output.vector is None else (output.vector,)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_streams_beside_vectors_keep_their_tokens(
    kind: Any, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And vectors their bits, in a fifth of the memory, swapped, or recomputed with two steps in
    flight."""
    path = tiny_checkpoint(QWEN3)
    # No checkpoint is both today: one with a mean is not known to have a head.
    both = ModelPooling(tasks=("generate", "embed"), kind=kind, size=64)
    monkeypatch.setattr("penstock.engine.startup.read_pooling", lambda *_: both)
    streams = [
        Request(
            request_id=f"stream {number}",
            prompt_token_ids=tuple(prompt[:40]),
            sampling_params=SamplingParams(
                temperature=0.7 * (number % 2), seed=number, max_tokens=60, ignore_eos=True
            ),
        )
        for number, prompt in enumerate(prompts(8))
    ]
    texts = [
        Request(
            request_id=f"text {number}",
            prompt_token_ids=tuple(prompt),
            sampling_params=NO_OUTPUT,
            pooling=PoolingParams(task="embed"),
        )
        for number, prompt in enumerate(prompts(24))
    ]
    alone = run(path, streams, num_blocks=200)[0] | run(path, texts, num_blocks=200)[0]
    mixed = [
        each
        for pair in zip(streams, texts[:8], texts[8:16], texts[16:], strict=True)
        for each in pair
    ]
    for preemption in ("swap", "recompute"):
        together, num_preempted = run(path, mixed, num_blocks=40, preemption=preemption)
        assert together == alone
        assert num_preempted > 0


# -- scores ------------------------------------------------------------------------------------


@pytest.fixture
def judge(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A reranker that answers yes or no, as Qwen3-Reranker is published."""
    path = lettered(
        tiny_checkpoint(QWEN3, max_position_embeddings=1024), tmp_path / "Qwen3-Reranker-S"
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


PAIRS = (["what is it?", "why?"], ["a thing", "because of a long reason, " * 5])


def _pair_ids(llm: LLM) -> Iterator[list[int]]:
    pairs = PairPrompts(llm.tokenizer, "yes_no")
    for query, document in zip(*PAIRS, strict=True):
        yield pairs.prompt(query, document, instruction="be fair")[0]


@torch.inference_mode()
def test_a_judge_says_how_likely_yes_is(judge: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32).eval()
    with LLM(str(judge), dtype="float32", num_blocks=300, swap_space=0) as llm:
        ids = llm.tokenizer.added_tokens
        wanted = [
            model(torch.tensor([each])).logits[0, -1, [ids["no"], ids["yes"]]].softmax(0)[1]
            for each in _pair_ids(llm)
        ]
        scores = llm.score(*PAIRS, instruction="be fair", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="scores pairs"):
            llm.embed("text", use_tqdm=False)
    assert scores == pytest.approx([float(each) for each in wanted], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@torch.inference_mode()
def test_a_head_for_scores(judge: Path) -> None:
    config = json.loads((judge / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForSequenceClassification"],
        "num_labels": 1,
        "pad_token_id": 0,
    }
    (judge / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    model.score.weight.normal_(std=0.3)
    model.save_pretrained(judge)
    with LLM(str(judge), dtype="float32", num_blocks=300, swap_space=0) as llm:
        wanted = [
            model(torch.tensor([each]), attention_mask=torch.ones(1, len(each))).logits.sigmoid()
            for each in _pair_ids(llm)
        ]
        scores = llm.score(*PAIRS, instruction="be fair", use_tqdm=False)
    assert scores == pytest.approx([float(each) for each in wanted], abs=1e-5)


@pytest.mark.parametrize("architecture", ["Qwen3", "Llama", "Qwen2"])
@torch.inference_mode()
def test_labels_are_those_of_transformers(
    architecture: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = lettered(tiny_checkpoint(f"{architecture}ForCausalLM"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    names = {"0": "good", "1": "bad", "2": "ugly"}
    config |= {"architectures": [f"{architecture}ForSequenceClassification"], "id2label": names}
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model.score.weight.normal_(std=0.3)
    model.save_pretrained(path)
    settings = {"max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 300, "swap_space": 0}
    with LLM(str(path), dtype="float32", **settings) as llm:
        together = llm.classify(prompts(), use_tqdm=False)
        assert together == [llm.classify(each, use_tqdm=False)[0] for each in prompts()]
        with pytest.raises(InvalidRequestError, match="classifies texts"):
            llm.score("a", "b")
        with pytest.raises(InvalidRequestError, match="classifies texts"):
            llm.generate([5, 6], use_tqdm=False)
    assert read_pooling(path).labels == ("good", "bad", "ugly")
    for each, found in zip(prompts(), together, strict=True):
        mask = torch.ones(1, len(each))
        wanted = model(torch.tensor([each]), attention_mask=mask).logits[0].softmax(0)
        assert found == pytest.approx(wanted.tolist(), abs=1e-5)


# -- what checkpoints say ----------------------------------------------------------------------


def _directory(path: Path, architecture: str, **config: Any) -> Path:
    fields = {"architectures": [architecture], "hidden_size": 64, **config}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_what_checkpoints_say(tmp_path: Path) -> None:
    assert read_pooling(_directory(tmp_path, QWEN3)) == ModelPooling(size=64)
    assert read_pooling(_directory(tmp_path, "Qwen3Model")).tasks == ("embed",)
    assert read_pooling(_directory(tmp_path, QWEN3), "Qwen/Qwen3-Reranker-4B").tasks == ("score",)
    tokens = {"classifier_from_token": ["nein", "ja"]}
    assert read_pooling(_directory(tmp_path, QWEN3, **tokens)).answers == ("ja", "nein")
    bert = read_pooling(_directory(tmp_path, "BertModel"))
    assert (bert.kind, bert.is_normalized, bert.is_encoder) == ("mean", False, True)
    linear = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    one = {"num_labels": 1, **linear}
    cross = read_pooling(_directory(tmp_path, "BertForSequenceClassification", **one))
    assert (cross.tasks, cross.activation, cross.pair_format) == (("score",), "identity", "pair")
    # Two are `transformers`' default, which it does not write.
    binary = read_pooling(_directory(tmp_path, "LlamaForSequenceClassification"))
    assert (binary.tasks, binary.labels) == (("classify",), ("LABEL_0", "LABEL_1"))
    assert (binary.activation, binary.kind) == ("softmax", "last")
    gaps = {"id2label": {"0": "a", "2": "b"}}
    with pytest.raises(ModelLoadError, match="id2label: expected labels"):
        read_pooling(_directory(tmp_path, "BertForSequenceClassification", **gaps))
    write_modules(tmp_path, [("LogitScore", {"true_token_id": 5, "false_token_id": 6})])
    judge = read_pooling(_directory(tmp_path, QWEN3))
    assert (judge.tasks, judge.answer_tokens) == (("score",), (5, 6))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([("Dense", {"out_features": 3})], r"modules.json: \[1\].type: .*Dense"),
        ([("Pooling", {"pooling_mode_max_tokens": True})], "expected one of last, mean and cls"),
        ([("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})], "cls"),
        ([("Pooling", {"pooling_mode": "mean", "include_prompt": False})], "include_prompt"),
        ([("Normalize", {})], "names no module of the kind Pooling"),
    ],
)
def test_modules_that_are_not_supported(
    modules: list[tuple[str, dict[str, Any]]], message: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, modules)
    with pytest.raises(ModelLoadError, match=message):
        read_pooling(_directory(tmp_path, "Qwen3Model"))


def test_a_shortened_vector_of_zeros_stays() -> None:
    assert shortened(array("f", [0.0, 0.0, 3.0]), 2).tolist() == [0.0, 0.0]
