"""An EAGLE-3 head gives the guesses of its definition, whatever happens to the blocks, and changes
no token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine import ConfigError, SamplingParams
from penstock.engine.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ModelLoadError
from penstock.engine.lora.files import find_adapter
from penstock.engine.models import backends
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.loader import load_drafting_model
from penstock.engine.models.registry import read_model_config
from penstock.engine.request import Request
from penstock.engine.runner.cuda_graphs import GraphedModel
from penstock.engine.startup import build_core
from tests.support.peft_models import PeftAnswers, read_adapted, write_adapter
from tests.support.tiers import tiered

from ...conftest import Reference, TinyCheckpoint
from ...runner.recorded_graphs import record_graphs
from ..test_speculation import run

VOCAB, HIDDEN, HEADS, KV_HEADS, EPS = 160, 64, 4, 2, 1e-5
WEIGHTS = "model.safetensors"
LAYERS = (2, 4, 5)  # of eight, as the method chooses them
KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {},
    "chunked": {"max_num_batched_tokens": 32},
    "swapped": {"num_blocks": 30, "preemption": "swap"},
    "recomputed": {"num_blocks": 30, "preemption": "recompute"},
    "in flight": {"max_steps_in_flight": 2},
}


@pytest.fixture(scope="module")
def target(tiny_checkpoint: TinyCheckpoint) -> Path:
    """A random model whose head size the CPU kernels support."""
    return tiny_checkpoint(num_hidden_layers=8, max_position_embeddings=512)


Weights = dict[str, Tensor]


def random_weights(*, num_drafts: int = 100, head_dim: int = 16) -> Weights:
    """A head in the published layout, for the tiny models."""
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.2 / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=generator)

    token_ids = torch.randperm(VOCAB, generator=generator)[:num_drafts].sort().values
    return {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(96, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(96, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, 96),
        "norm.weight": norm(),
        "lm_head.weight": matrix(num_drafts, HIDDEN) * 3,
        "d2t": token_ids - torch.arange(num_drafts),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, token_ids, True),
    }


def write_head(path: Path, weights: Weights, **fields: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": len(weights["midlayer.mlp.gate_proj.weight"]),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": len(weights["midlayer.self_attn.q_proj.weight"]) // HEADS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | fields
    path.mkdir(exist_ok=True, parents=True)
    given = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(given))
    save(path, weights)
    return path


def save(path: Path, weights: Weights) -> None:
    save_file(
        {name: each.clone(memory_format=torch.contiguous_format) for name, each in weights.items()},
        path / WEIGHTS,
    )


def core_with(
    target: Path,
    head: Path | None,
    *,
    num_blocks: int = 400,
    num_drafts: int = 3,
    dtype: Any = "float32",
    lora: LoraConfig | None = None,
    **scheduler: Any,
) -> EngineCore:
    if head is not None:
        scheduler["speculative_config"] = {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": num_drafts,
        }
    config = EngineConfig(
        model=ModelConfig(model=str(target), dtype=dtype, max_model_len=320),
        cache=CacheConfig(num_blocks=num_blocks, num_host_blocks=100),
        scheduler=SchedulerConfig(**scheduler),
        lora=lora or LoraConfig(),
    )
    return build_core(config)[0]


def requests(vocab_size: int = VOCAB, **params: Any) -> list[Request]:
    """Greedy and seeded, of many lengths."""
    rng = random.Random(5)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(
                rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2, 15, 17, 90, 200]))
            ),
            sampling_params=SamplingParams(
                **{
                    "max_tokens": 20 + 8 * number,
                    "seed": number,
                    "temperature": float(number % 2),
                    "ignore_eos": True,
                }
                | params
            ),
        )
        for number in range(12)
    ]


@dataclass(frozen=True, slots=True)
class PlainHead:
    """A head without caches: each call computes all positions from the beginning."""

    weights: Weights
    target: PreTrainedModel
    theta: float = 5000.0
    table: Tensor | None = None  # not the target's

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, HIDDEN]"""
        with torch.inference_mode():
            states = self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        inputs = torch.cat([states[layer][0] for layer in LAYERS], dim=1)
        return inputs @ self.weights["fc.weight"].T

    def __call__(self, features: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [num_positions, VOCAB] and the stream, from the features at each position and the
        tokens after each."""
        weights, layer = self.weights, "midlayer."
        table = self.target.get_input_embeddings().weight.data if self.table is None else self.table
        embedded = table[list(token_ids)]
        pair = (
            _norm(embedded, weights[layer + "input_layernorm.weight"]),
            _norm(features, weights[layer + "hidden_norm.weight"]),
        )
        stream = features + self._attend(torch.cat(pair, dim=1))
        x = _norm(stream, weights[layer + "post_attention_layernorm.weight"])
        gate, up, down = (
            weights[f"{layer}mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down")
        )
        stream = stream + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        known = _norm(stream, weights["norm.weight"]) @ weights["lm_head.weight"].T
        logits = torch.full((len(known), VOCAB), -torch.inf)
        logits[:, weights["d2t"] + torch.arange(known.shape[1])] = known
        return logits, stream

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            self._heads(x, f"midlayer.self_attn.{kind}_proj.weight") for kind in "qkv"
        )
        query, key = self._rotate(query), self._rotate(key)
        key, value = (
            each.repeat_interleave(len(query) // len(each), dim=0) for each in (key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(0, 1).flatten(1) @ self.weights["midlayer.self_attn.o_proj.weight"].T

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """[num_heads, num_positions, head_dim]"""
        head_dim = len(self.weights["midlayer.self_attn.q_proj.weight"]) // HEADS
        return (x @ self.weights[name].T).unflatten(1, (-1, head_dim)).transpose(0, 1)

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * angles.cos().repeat(1, 2) + turned * angles.sin().repeat(1, 2)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("head_dim", [16, 8], ids=["kernels", "torch"])
@pytest.mark.parametrize("chunk", [256, 16])
def test_logits_over_a_prompt_and_three_drafts(
    head_dim: int,
    chunk: int,
    tmp_path: Path,
    tiny_checkpoint: TinyCheckpoint,
    reference: Reference,
) -> None:
    path = tiny_checkpoint(num_hidden_layers=8, max_position_embeddings=512, head_dim=head_dim)
    weights = random_weights(head_dim=head_dim)
    core = core_with(path, write_head(tmp_path / "head", weights), max_num_batched_tokens=chunk)
    head = core._executor._runner._planners[0]._head  # type: ignore[attr-defined]
    positions: list[int] = []
    found: list[Tensor] = []

    def observe(_: Any, given: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        positions.extend(given[2].positions.tolist())
        found.append(head.logits(output[0]).clone())

    head.register_forward_hook(observe)
    prompt = [random.Random(2).randrange(3, VOCAB) for _ in range(50)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.add(Request(request_id="a", prompt_token_ids=tuple(prompt), sampling_params=params))
    tokens: list[int] = []
    while len(positions) < len(prompt) + 2:
        tokens += [each for output in core.step() for each in output.token_ids]
    assert positions == list(range(len(prompt) + 2))
    plain = PlainHead(weights, reference(path))
    known = [*prompt, tokens[0]]
    features = plain.features(prompt)
    for _ in range(3):
        logits, stream = plain(features, known[1:])
        known.append(int(logits[-1].argmax()))
        features = torch.cat((features, stream[-1:]))
    torch.testing.assert_close(torch.cat(found), logits, rtol=1e-4, atol=1e-4)


def observe_steps(core: EngineCore, observe: Callable[[Any, list[int], list[int]], None]) -> None:
    """Call `observe` after each step with each item for which drafts were drawn, its tokens before
    the step, and its new ones."""
    executor, submit = core._executor, core._executor.submit

    def observed(batch: Any) -> Any:
        handle = submit(batch)
        result = handle.result()
        sequences = executor._runner._batch  # type: ignore[attr-defined]
        for item in batch.scheduled:
            if item.num_wanted_drafts:
                new = list(result.token_ids[item.seq_id])
                observe(item, sequences.token_ids(item.seq_id)[: -len(new)], new)
        return handle

    executor.submit = observed  # type: ignore[method-assign]


def check_drafts(core: EngineCore, plain: PlainHead) -> Callable[[], int]:
    """Hold the greedy drafts of each step, and their logits, against the definition; how many there
    were so far."""
    drafter = core._executor._runner._planners[0]  # type: ignore[attr-defined]
    draw, num_checked = drafter._draw, 0
    found: dict[int, list[Tensor]] = {}  # seq_id → the logits of its drafts in this step
    drawn: list[Tensor] = []
    drafter._head.register_forward_hook(
        lambda head, _, output: drawn.append(head.logits(output[0]))
    )

    def observe_draw(spans: Any) -> Any:
        token_ids = draw(spans)
        ends = torch.tensor([end - start for start, end in spans.values()]).cumsum(0) - 1
        for seq_id, row in zip(spans, drawn[-1][ends], strict=True):
            found.setdefault(seq_id, []).append(row)
        return token_ids

    def check(item: Any, tokens: list[int], _: list[int]) -> None:
        nonlocal num_checked
        features = plain.features(tokens)[:-1]
        for draft, row in zip(item.draft_token_ids, found.pop(item.seq_id), strict=True):
            logits, stream = plain(features, tokens[1:])
            torch.testing.assert_close(row, logits[-1], rtol=1e-4, atol=1e-4)
            assert draft == int(row.argmax())
            tokens, features = [*tokens, draft], torch.cat((features, stream[-1:]))
            num_checked += 1

    drafter._draw = observe_draw
    observe_steps(core, check)
    return lambda: num_checked


@pytest.mark.parametrize(
    "kinds",
    [
        ("chunked", "recomputed", "in flight"),
        pytest.param(("alone", "together", "swapped"), marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_are_the_heads_own_and_tokens_those_without(
    kinds: tuple[str, ...], target: Path, tmp_path: Path, reference: Reference
) -> None:
    weights = random_weights()
    head, plain = write_head(tmp_path / "head", weights), PlainHead(weights, reference(target))
    greedy = {"temperature": 0.0, "logprobs": 2}
    off = core_with(target, None)
    expected = run(off, requests(**greedy))
    for kind in kinds:
        core = core_with(target, head, **KINDS[kind])
        num_checked = check_drafts(core, plain)
        assert run(core, requests(**greedy), at_once=kind != "alone") == expected, kind
        assert num_checked() > 25, kind
        counters = core.scheduler.counters
        if kind in ("swapped", "recomputed"):
            assert counters.num_swaps + counters.num_recomputes > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["C", "torch", "graphs"])
def test_an_adapters_drafts_follow_from_its_own_hidden_states(
    kind: str,
    target: Path,
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it changes; the head itself is the base model's. Tokens are PEFT's."""
    if kind != "C":
        monkeypatch.setattr(backends, "load_library", lambda _: None)
    if kind == "graphs":
        record_graphs(monkeypatch, "full")
    weights, path = random_weights(), tmp_path / "adapter"
    changed = ["embed_tokens", "q_proj", "down_proj", "lm_head"]
    write_adapter(target, path, 4, target_modules=changed)
    adapted = read_adapted(target, path)
    table = reference(target).get_input_embeddings().weight.data
    core = core_with(
        target, write_head(tmp_path / "head", weights), lora=LoraConfig(enable_lora=True),
        max_num_seqs=8,
    )  # fmt: skip
    assert isinstance(core._executor._runner._model, GraphedModel) == (kind == "graphs")
    num_checked = check_drafts(core, PlainHead(weights, adapted, table=table))
    adapter = find_adapter("mine", str(path))
    core.preparation.load(core.adapters.need(adapter))
    given = [replace(each, adapter=adapter) for each in requests(temperature=0.0)[1:4]]
    found = run(core, given)
    answers = PeftAnswers()
    for each in given:
        num_tokens = each.sampling_params.max_tokens
        assert num_tokens is not None
        wanted = answers(target, path, list(each.prompt_token_ids), num_tokens)
        assert list(found[each.request_id, 0][0]) == wanted
    assert num_checked() > 10


def test_a_prefix_hit_has_its_drafts_too(
    target: Path, tmp_path: Path, reference: Reference
) -> None:
    """Also where the cached text went on differently after the last block."""
    weights = random_weights()
    core = core_with(target, write_head(tmp_path / "head", weights))
    num_checked = check_drafts(core, PlainHead(weights, reference(target)))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = tuple(random.Random(3).randrange(3, VOCAB) for _ in range(64))

    def ask(name: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        request = Request(request_id=name, prompt_token_ids=token_ids, sampling_params=params)
        return tuple(run(core, [request])[name, 0][0])

    answer = ask("first", prompt)
    for name, more in {"on": answer, "other": (5, 6, 7), "within": ()}.items():
        before, hits = num_checked(), core.scheduler.blocks.counters.prefix_hits
        ask(name, (prompt[:40] if name == "within" else prompt) + more)
        assert core.scheduler.blocks.counters.prefix_hits > hits
        assert num_checked() > before


CYCLE = 64  # tokens, and as many hidden values


def write_cycle(path: Path, shuffle: Tensor) -> tuple[Path, Path]:
    """A model in which token t is most likely followed by shuffle[t], and a head that knows it.

    A token's hidden state is a single 1, which the model's layers leave where it is. The head's
    layer moves it to the next token's place, so that each guess needs the right feature.
    """
    one, nothing = torch.eye(CYCLE), torch.zeros(CYCLE, CYCLE)
    steps = one[shuffle]  # row t: the token after t
    ones, likely = torch.ones(CYCLE), 0.625 * steps.T
    model = {"model.embed_tokens.weight": one, "model.norm.weight": ones, "lm_head.weight": likely}
    for layer in range(8):
        for name in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            model[f"model.layers.{layer}.{name}_proj.weight"] = nothing
        for name in ("self_attn.k", "self_attn.v"):
            model[f"model.layers.{layer}.{name}_proj.weight"] = nothing[: CYCLE // 2]
        for name in ("input", "post_attention"):
            model[f"model.layers.{layer}.{name}_layernorm.weight"] = ones
    ids = torch.randperm(CYCLE, generator=torch.Generator().manual_seed(7))
    both = torch.zeros(CYCLE, 2 * CYCLE)
    head = {
        "fc.weight": torch.cat((one, one, one), dim=1) / 3,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones,
        "midlayer.self_attn.q_proj.weight": both,
        "midlayer.self_attn.k_proj.weight": both[: CYCLE // 2],
        "midlayer.self_attn.v_proj.weight": both[: CYCLE // 2],
        "midlayer.self_attn.o_proj.weight": nothing,
        "midlayer.post_attention_layernorm.weight": ones,
        # The norm makes 8 of the 1; silu(16) · 8 = 128
        "midlayer.mlp.gate_proj.weight": 2 * one,
        "midlayer.mlp.up_proj.weight": one,
        "midlayer.mlp.down_proj.weight": (steps.T - one) / 128,
        "norm.weight": ones,
        "lm_head.weight": likely[ids],
        "d2t": ids - torch.arange(CYCLE),
    }
    fields = {"vocab_size": CYCLE, "rope_theta": None}
    write_head(path / "head", head, **fields)
    write_head(
        path / "model",
        head,
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=8,
        draft_vocab_size=None,
        **fields,
    )
    save(path / "model", model)
    return path / "model", path / "head"


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    tiered(
        [("float32", ("together", "swapped")), ("bfloat16", tuple(KINDS))],
        [("float32", ("together", "swapped"))],
    ),
)
def test_a_head_that_knows_its_model_is_right(
    dtype: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    shuffle = torch.randperm(CYCLE, generator=generator)
    target, head = write_cycle(tmp_path, shuffle)
    asked, greedy = requests(CYCLE, n=2), requests(CYCLE, temperature=0.0)
    off = core_with(target, None, dtype=dtype)
    seeded, expected = run(off, asked), run(off, greedy)
    is_right: list[bool] = []

    def observe(item: Any, tokens: list[int], new: list[int]) -> None:
        if len(tokens) > 1 and tokens[-1] == int(shuffle[tokens[-2]]):
            # The head knows what the model knows, and draws the same.
            is_right.append(new[0] == item.draft_token_ids[0])

    for kind in kinds:
        core = core_with(target, head, dtype=dtype, num_drafts=7, **KINDS[kind])
        counters = core.scheduler.drafting.counters
        assert run(core, greedy, at_once=kind != "alone") == expected, kind
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 50, kind
        is_right.clear()
        observe_steps(core, observe)
        assert run(core, asked, at_once=kind != "alone") == seeded, kind
        assert len(is_right) > 20, kind
        assert all(is_right), kind


def test_its_memory_counts(target: Path, tmp_path: Path) -> None:
    weights = random_weights()
    infos = [
        core_with(target, head)._executor.info
        for head in (None, write_head(tmp_path / "head", weights))
    ]
    tables = ("d2t", "t2d")
    num_bytes = sum(each.nbytes for name, each in weights.items() if name not in tables)
    assert infos[1].weight_bytes - infos[0].weight_bytes == num_bytes
    # One layer's keys and values, and a feature, of 16 tokens in float32.
    more = 16 * (2 * KV_HEADS * 16 + HIDDEN) * 4
    assert infos[1].bytes_per_block - infos[0].bytes_per_block == more


def drafts_of(target: Path, head: Path) -> list[tuple[int, ...]]:
    """Of one greedy request."""
    core = core_with(target, head)
    submit, found = core._executor.submit, []

    def observed(batch: Any) -> Any:
        handle = submit(batch)
        found.extend(item.draft_token_ids for item in batch.scheduled)
        return handle

    core._executor.submit = observed  # type: ignore[method-assign]
    run(core, requests(temperature=0.0)[-1:])
    return found


def test_other_spellings_are_the_same_head(target: Path, tmp_path: Path) -> None:
    weights = random_weights()
    expected = drafts_of(target, write_head(tmp_path / "head", weights))
    assert any(expected)
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}
    table = load_file(target / WEIGHTS)["model.embed_tokens.weight"]
    for name, tensors, fields in (
        ("numbered", weights, {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}),
        ("outputs", weights, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}),
        ("table", {**weights, "embed_tokens.weight": table}, {"target_hidden_size": HIDDEN}),
    ):
        assert drafts_of(target, write_head(tmp_path / name, tensors, **fields)) == expected, name
    path = write_head(tmp_path / "renamed", weights)
    save(path, renamed)
    assert drafts_of(target, path) == expected


def without(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        del weights[name]

    return change


def with_tensor(name: str, tensor: Tensor) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("fc.weight"), "no tensor fc.weight"),
        (without("d2t"), "no tensor d2t"),
        (without("lm_head.weight"), r"no tensor lm_head.weight"),
        (without("midlayer.hidden_norm.weight"), "no tensor midlayer.hidden_norm.weight"),
        (
            with_tensor("fc.weight", torch.zeros(64, 64)),
            r"fc.weight has shape \[64, 64\], expected",
        ),
        (
            with_tensor("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)),
            r"midlayer.self_attn.q_proj.weight has shape \[64, 64\], expected \[64, 128\]",
        ),
        (with_tensor("d2t", torch.full((100,), 61)), "d2t must name 100 different tokens"),
        (with_tensor("d2t", torch.full((100,), -1)), "d2t must name 100 different tokens"),
        (with_tensor("d2t", -torch.arange(100)), "d2t must name 100 different tokens"),
        (with_tensor("d2t", torch.zeros(100)), "d2t is F32"),
        (with_tensor("extra.weight", torch.zeros(1)), "extra.weight"),
    ],
)
def test_damaged_heads_are_refused(
    change: Callable[[Weights], None], message: str, target: Path, tmp_path: Path
) -> None:
    weights = random_weights()
    path = write_head(tmp_path / "head", weights)
    change(weights)
    save(path, weights)
    with pytest.raises(ModelLoadError, match=message):
        core_with(target, path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size: must be 64 in a head for this model, not 32"),
        ({"target_hidden_size": 32}, "target_hidden_size: must be 64"),
        ({"vocab_size": 161}, "vocab_size: must be 160"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: must be 1"),
        ({"draft_vocab_size": 161}, "draft_vocab_size: expected an integer from 1 to 160"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "layers 2, 4, 8 are no features"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, "ascending layers from 1 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, r"fc.weight has shape \[64, 192\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE-3 head"),
    ],
)
def test_heads_of_other_models_are_refused(
    fields: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        core_with(target, write_head(tmp_path / "head", random_weights(), **fields))


def test_other_methods_are_refused(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", random_weights())
    for settings, message in (
        ({"method": "eagle3"}, "the method eagle3 needs a model"),
        ({"method": "ngram", "model": str(head)}, "the method ngram has no model"),
    ):
        with pytest.raises(ConfigError, match=message):
            SchedulerConfig(speculative_config=settings)
    is_head = "LlamaForCausalLMEagle3 is a head for another model"
    config = SchedulerConfig(speculative_config={"model": str(head)})
    with pytest.raises(ModelLoadError, match=is_head):
        build_core(EngineConfig(model=ModelConfig(model=str(target)), scheduler=config))
    with pytest.raises(ModelLoadError, match=is_head):
        core_with(head, None)
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM is no EAGLE-3 head"):
        core_with(target, target)


def test_a_gpu_is_refused(target: Path, tmp_path: Path) -> None:
    """Known from the target's device, before anything of the head is read."""
    with torch.device("meta"):
        elsewhere = Decoder(read_model_config(target)[1])
    settings = {"method": "eagle3", "model": str(tmp_path / "none")}
    config = EngineConfig(scheduler=SchedulerConfig(speculative_config=settings))
    with pytest.raises(ConfigError, match="--speculative-config: the method eagle3 needs a CPU"):
        load_drafting_model(config, elsewhere)


def test_small_models_need_their_layers_named(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(max_position_embeddings=512)
    head = write_head(tmp_path / "head", random_weights())
    with pytest.raises(ModelLoadError, match="layers 2, 1, -1 are no features of a model with 2"):
        core_with(path, head)
