"""Tokens with adapters are PEFT's, whatever else runs in the same steps."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from penstock.engine import LLM, LoRARequest
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, InvalidRequestError
from penstock.engine.lora.files import find_adapter
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.models import backends
from penstock.engine.models.cpu_model import CpuModel
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.request import Adapter, Request, SamplingParams
from penstock.engine.runner.cuda_graphs import GraphedModel
from penstock.engine.startup import build_core
from penstock.engine.weights.quantization import quantize_rows
from tests.engine.model_families import FAMILIES
from tests.engine.models.test_experts import VARIANTS as EXPERTS
from tests.engine.runner.recorded_graphs import record_graphs
from tests.support.peft_models import PeftAnswers, write_adapter
from tests.support.tiers import tiered

NUM_NEW = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
# What PEFT's configurations can say, an adapter each.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "rslora": {"r": 4, "use_rslora": True, "lora_alpha": 5},
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "target_modules": r".*\.(q_proj|o_proj|down_proj)",
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 16},
        "alpha_pattern": {"o_proj": 40},
    },
    "tables": {"target_modules": ["embed_tokens", "lm_head"], "r": 16},
    "one layer": {"layers_to_transform": [1], "target_modules": ["gate_proj", "up_proj", "k_proj"]},
    "half": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "target_modules": ["o_proj", "up_proj"]},
}


@pytest.fixture(
    scope="module", params=tiered(["Qwen2ForCausalLM", "LlamaForCausalLM"], ["Qwen2ForCausalLM"])
)
def base(request, tiny_checkpoint) -> Path:
    return tiny_checkpoint(request.param, tie_word_embeddings=request.param.startswith("Qwen"))


@pytest.fixture(scope="module")
def adapters(base, make_adapter) -> dict[str, Path]:
    return {
        name: make_adapter(base, seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    }


def engine(base: Path, *, in_torch: bool = False, **sections: Any) -> EngineCore:
    given: dict[str, Any] = {
        "cache": CacheConfig(num_blocks=300),
        "scheduler": SchedulerConfig(max_num_batched_tokens=64),
        "lora": LoraConfig(enable_lora=True),
        **sections,
    }
    model = ModelConfig(model=str(base), dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        if in_torch:
            patch.setattr(backends, "load_library", lambda _: None)
        core, _ = build_core(
            EngineConfig(**{"model": model, "device": DeviceConfig(device="cpu"), **given})
        )
    return core


def run(core: EngineCore, requests: Iterable[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests:
        core.add(request)
        tokens[request.request_id] = []
    live = set(tokens)
    while live:
        core.wait()
        for output in core.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            live -= {output.request_id} if output.is_last else set()
        core.scheduler.blocks.check_integrity()
    return tokens


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


def requests_for(
    adapters: Mapping[str, Path | None], params: SamplingParams = GREEDY
) -> dict[str, tuple[Request, Path | None]]:
    """Three for each, with prompts of which some begin alike for all of them."""
    requests = {}
    for number, (name, path) in enumerate(adapters.items()):
        adapter = None if path is None else find_adapter(name, str(path))
        shared = prompt(0, 40)
        for kind, token_ids in enumerate((shared, shared + prompt(number, 9), prompt(number, 21))):
            request = Request(
                request_id=f"{name} {kind}",
                prompt_token_ids=tuple(token_ids),
                sampling_params=params,
                adapter=adapter,
            )
            requests[request.request_id] = (request, path)
    return requests


@pytest.mark.parametrize(
    "kind", tiered([CpuModel, TorchModel, GraphedModel], [CpuModel, GraphedModel])
)
def test_eight_adapters_in_one_batch(base, adapters, peft_tokens, kind, monkeypatch):
    if kind is GraphedModel:
        record_graphs(monkeypatch, "full")
    schedule = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=32)
    core = engine(base, in_torch=kind is not CpuModel, scheduler=schedule)
    assert type(core._executor._runner._model) is kind
    if kind is GraphedModel:
        monkeypatch.setattr(TorchModel, "step", None)  # every step is replayed
    requests = requests_for({**adapters, "base": None})
    expected = {
        name: peft_tokens(base, path, list(request.prompt_token_ids), NUM_NEW)
        for name, (request, path) in requests.items()
    }
    given = [request for request, _ in requests.values()]
    assert run(core, given) == expected
    assert len({tuple(each) for name, each in expected.items() if name.endswith("0")}) == 9
    # Again, with their own prefixes, and nobody else's, in the cache.
    hits = core.scheduler.blocks.counters.prefix_hits
    again = [replace(each, request_id=f"{each.request_id} again") for each in given]
    assert list(run(core, again).values()) == list(expected.values())
    assert core.scheduler.blocks.counters.prefix_hits > hits + 9 * 32


@pytest.mark.parametrize(
    "sections",
    [
        {
            "cache": CacheConfig(block_size=4, num_blocks=66, num_host_blocks=400),
            "scheduler": SchedulerConfig(max_num_batched_tokens=64, preemption="swap"),
        },
        {
            "cache": CacheConfig(block_size=4, num_blocks=66, num_host_blocks=0),
            "scheduler": SchedulerConfig(max_num_batched_tokens=64),
        },
        {
            "scheduler": SchedulerConfig(
                max_num_batched_tokens=64, speculative_config='{"method": "ngram"}'
            )
        },
        {"lora": LoraConfig(enable_lora=True, max_loras=2, max_cpu_loras=3)},
    ],
    ids=["swap", "recompute", "speculation", "two at once"],
)
def test_tokens_stay_under_pressure(base, adapters, sections):
    longer = replace(GREEDY, max_tokens=6 * NUM_NEW)  # than admission keeps room for
    wanted = requests_for({**adapters, "base": None}, longer).values()
    requests = [request for request, _ in wanted]
    known = _known(base, requests)
    core = engine(base, **{"cache": CacheConfig(num_blocks=60), **sections})
    guessed = [
        replace(each, prediction_token_ids=tuple(known[each.request_id])) for each in requests
    ]
    assert run(core, guessed) == known
    counters, drafted = core.scheduler.counters, core.scheduler.drafting.counters
    assert counters.num_preemptions or "cache" not in sections
    assert drafted.num_accepted_tokens > 0


def test_outputs_go_on_with_their_adapters(base, adapters):
    """As after the death of an engine: in one that has seen neither them nor their adapters."""
    longer = replace(GREEDY, max_tokens=6 * NUM_NEW)
    requests = [each for each, _ in requests_for({**adapters, "base": None}, longer).values()]
    known = _known(base, requests)
    begun = [
        replace(each, output_token_ids=tuple(known[each.request_id][: 1 + 3 * number]))
        for number, each in enumerate(requests)
    ]
    rest = run(engine(base), begun)
    for each in begun:
        assert rest[each.request_id] == known[each.request_id][len(each.output_token_ids) :]


_KNOWN: dict[Path, dict[str, list[int]]] = {}


def _known(base: Path, requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of an engine without pressure."""
    if base not in _KNOWN:
        _KNOWN[base] = run(engine(base), requests)
    return _KNOWN[base]


def test_another_adapter_under_the_same_name_has_its_own_tokens(
    tiny_checkpoint, make_adapter, peft_tokens, tmp_path
):
    base = tiny_checkpoint("LlamaForCausalLM", tie_word_embeddings=False)
    first, second = make_adapter(base, 1), make_adapter(base, 2)
    place = tmp_path / "adapter"
    shutil.copytree(first, place)
    core = engine(base)
    token_ids = prompt(3, 48)

    def ask(adapter: Adapter, name: str) -> list[int]:
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(token_ids),
            sampling_params=GREEDY,
            adapter=adapter,
        )
        return run(core, [request])[name]

    old = find_adapter("mine", str(place))
    assert ask(old, "1") == peft_tokens(base, first, token_ids, NUM_NEW)
    shutil.rmtree(place)
    shutil.copytree(second, place)
    new = find_adapter("mine", str(place))
    expected = peft_tokens(base, second, token_ids, NUM_NEW)
    assert ask(new, "2") == expected
    assert expected != peft_tokens(base, first, token_ids, NUM_NEW)
    assert ask(old, "3") == peft_tokens(base, first, token_ids, NUM_NEW)  # still in memory
    other = engine(base)
    with pytest.raises(InvalidRequestError, match="has changed since"):
        other.preparation.load(other.adapters.need(old))
    # Its KV is dropped with its digest only.
    known = (*token_ids, *expected)
    assert core.drop_prefix(known) == 0
    assert core.drop_prefix(known, adapter=new.digest) > 0


# A family of each layout of matrices, and what its adapter changes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2": {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_fc", "c_proj", "wte"]},
    "opt": {},
    "gptj": {},  # rows of queries and keys are turned
    "pythia": {"target_modules": ["query_key_value", "dense_h_to_4h", "lm_head"]},  # by head
    "falcon 40b": {},
    "bloom": {},
    "mpt": {},
    "phi2": {},
    "phi3": {},
    "glm4": {},  # turned, and two matrices in one
    "cohere": {"target_modules": ["q_proj", "k_proj", "down_proj", "embed_tokens"]},
    "qwen2 shared": {"target_modules": r".*(q_proj|v_proj|o_proj|shared_expert.(up|down)_proj)"},
}


FIRST = [("gpt2", False), ("pythia", False), ("phi3", False), ("gptj", True)]
FIRST += [("qwen2 shared", False), ("qwen2 shared", True)]


@pytest.mark.parametrize(("family", "in_torch"), tiered(product(LAYOUTS, (False, True)), FIRST))
def test_adapters_of_each_layout_of_matrices(
    tiny_checkpoint, make_adapter, peft_tokens, family, in_torch
):
    architecture, options = (FAMILIES | EXPERTS)[family]
    base = tiny_checkpoint(architecture, **options)
    path = make_adapter(base, 3, **LAYOUTS[family])
    core = engine(base, in_torch=in_torch)
    token_ids = prompt(2, 21)
    given = {None: "base", path: "adapted"}
    requests = [
        Request(
            request_id=name,
            prompt_token_ids=tuple(token_ids),
            sampling_params=replace(GREEDY, max_tokens=8),
            adapter=None if each is None else find_adapter(name, str(each)),
        )
        for each, name in given.items()
    ]
    expected = {name: peft_tokens(base, each, token_ids, 8) for each, name in given.items()}
    assert run(core, requests) == expected
    assert expected["adapted"] != expected["base"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_on_quantized_bases(tiny_checkpoint, make_adapter, quantization):
    """The C program gives torch's logits, to rounding; and the adapter changes them."""
    base = tiny_checkpoint("Qwen2ForCausalLM", tie_word_embeddings=True)
    adapter = find_adapter("mine", str(make_adapter(base, 5)))
    model = ModelConfig(
        model=str(base), dtype="float32", quantization=quantization, quantize_activations=False
    )
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt(1, 30)),
        sampling_params=replace(GREEDY, max_tokens=1, logprobs=20),
    )

    def top(core: EngineCore, adapter: Adapter | None) -> dict[int, float]:
        core.add(replace(request, adapter=adapter))
        found: dict[int, float] = {}
        while not found:
            core.wait()
            for output in core.step():
                found.update(output.logprobs[0].top)
        return found

    in_c, in_torch = (engine(base, model=model, in_torch=each) for each in (False, True))
    adapted = top(in_c, adapter)
    assert adapted == pytest.approx(top(in_torch, adapter), abs=1e-3)
    assert set(adapted) != set(top(in_c, None))


@pytest.mark.parametrize("in_torch", [False, True], ids=["C", "torch"])
@pytest.mark.parametrize("family", ["gptj", "phi3"])  # turned rows, fused matrices
def test_adapters_of_other_layouts_on_quantized_bases(
    tiny_checkpoint, make_adapter, peft_tokens, tmp_path, family, in_torch
):
    """PEFT's tokens, on a base of numbers that int8 keeps as they are."""
    architecture, options = FAMILIES[family]
    base = Path(shutil.copytree(tiny_checkpoint(architecture, **options), tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    rounded = {
        name: quantize_rows(each, "int8", each).dequantize() if each.dim() == 2 else each
        for name, each in tensors.items()
    }
    assert any(not tensors[name].equal(each) for name, each in rounded.items())
    save_file(rounded, base / "model.safetensors", {"format": "pt"})
    path = make_adapter(base, 3)
    model = ModelConfig(
        model=str(base), dtype="float32", quantization="int8", quantize_activations=False
    )
    core = engine(base, model=model, in_torch=in_torch)
    token_ids = prompt(2, 21)
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(token_ids),
        sampling_params=replace(GREEDY, max_tokens=8),
        adapter=find_adapter("mine", str(path)),
    )
    expected = peft_tokens(base, path, token_ids, 8)
    assert run(core, [request]) == {"r": expected}
    assert expected != peft_tokens(base, None, token_ids, 8)


def test_without_adapters_the_program_is_what_it_was(tiny_checkpoint):
    base = tiny_checkpoint()
    programs = []
    for lora in (LoraConfig(), LoraConfig(enable_lora=True)):
        core = engine(base, lora=lora)
        run(core, [Request(request_id="r", prompt_token_ids=(5, 6), sampling_params=GREEDY)])
        program = str(core._executor._runner._model._program)
        programs.append(re.sub("num_rows=[0-9]+", "", program).split("\n"))
    plain, with_room = programs
    assert not [line for line in plain if "lora" in line]
    assert [line for line in with_room if not line.startswith("lora")] == plain


def test_adapters_of_the_output_head_have_no_prompt_logprobs(tiny_checkpoint, make_adapter):
    base = tiny_checkpoint("LlamaForCausalLM", tie_word_embeddings=False)
    path = make_adapter(base, 4, target_modules=["lm_head"])
    core = engine(base)
    params = replace(GREEDY, prompt_logprobs=1)
    core.add(
        Request(
            request_id="r",
            prompt_token_ids=(5, 6),
            sampling_params=params,
            adapter=find_adapter("head", str(path)),
        )
    )
    outputs: list[Any] = []
    while core.wait():
        outputs += core.step()
    assert outputs[0].is_refused
    assert outputs[0].param == "prompt_logprobs"


def test_offline_calls_take_one_adapter_or_one_for_each_prompt(tmp_path):
    write_adapter(DEMO_MODEL_PATH, tmp_path / "a", 1, std=0.05)
    write_adapter(DEMO_MODEL_PATH, tmp_path / "b", 2, std=0.05)
    first = LoRARequest(name="a", path=tmp_path / "a")
    second = LoRARequest("b", 1, str(tmp_path / "b"))  # vLLM's form
    token_ids, params = list(range(20, 50)), SamplingParams(temperature=0, max_tokens=8)
    answers = PeftAnswers()
    expected = [
        answers(DEMO_MODEL_PATH, path, token_ids, 8)
        for path in (None, tmp_path / "a", tmp_path / "b")
    ]
    params = replace(params, ignore_eos=True)
    with LLM(dtype="float32", enable_lora=True, num_blocks=200) as llm:

        def ask(lora_request: Any) -> list[list[int]]:
            prompts = [token_ids] * (len(lora_request) if isinstance(lora_request, list) else 1)
            outputs = llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)
            return [list(each.outputs[0].token_ids) for each in outputs]

        assert ask(first) == [expected[1]]
        assert ask([None, first, second, first]) == [expected[n] for n in (0, 1, 2, 1)]
        known = [*token_ids, *expected[2]]
        assert llm.drop_prefix(known, lora_request=second) > 0
        assert llm.drop_prefix(known, lora_request=second) == 0
        with pytest.raises(InvalidRequestError, match="2 adapters for 1 prompts"):
            llm.generate([token_ids], lora_request=[first, second])
        with pytest.raises(InvalidRequestError, match="nowhere") as refusal:
            llm.generate([token_ids], lora_request=LoRARequest("x", 3, "/nowhere"))
        assert refusal.value.param == "lora_request"
    with (
        LLM(num_blocks=200) as llm,
        pytest.raises(InvalidRequestError, match=r"needs LLM\(enable_lora=True\)"),
    ):
        llm.generate([token_ids], lora_request=first)


def test_a_damaged_adapter_of_the_command_line_stops_the_start(tiny_checkpoint, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    lora = LoraConfig(enable_lora=True, lora_modules=(f"mine={tmp_path}",))
    with pytest.raises(ConfigError, match=r"--lora-modules mine: .*lora_alpha"):
        engine(tiny_checkpoint(), lora=lora)
