"""Every family against transformers: the same logits, in torch and by the CPU's kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.model_families import FAMILIES, OF_EVERY_SWITCH, SIX, tiny_config
from tests.support.tiers import tiered

from penstock.engine.config import DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.layers.rotary import RopeConfig, theta_frequencies
from penstock.engine.models.families.llama import read_llama_config
from penstock.engine.models.loader import load_model
from penstock.engine.models.registry import ARCHITECTURES, Architecture, read_model_config
from penstock.engine.startup import build_core
from penstock.kernels.cpu.isa import usable_isas

NUM_TOKENS = 45
CHUNKS = [16, 1, 13, *[1] * 15]
_ISAS = usable_isas()
ISA_OF = {name: _ISAS[number % len(_ISAS)] for number, name in enumerate(FAMILIES)}


def _token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def _expected(reference, name, path, dtype="float32") -> torch.Tensor:
    # The eager attention of Falcon in transformers 5 adds ALiBi twice.
    model = reference(path, dtype, "sdpa" if name == "falcon rw" else "eager")
    return model(torch.tensor([_token_ids()]), use_cache=False).logits[0].float()


# What a family's configuration says reaches both; what each makes of it is shown by few.
BOTH = [*product(FAMILIES, ("kernels",)), *product(FAMILIES, ("torch",))]
FIRST = [*BOTH[: len(FAMILIES)], *product(OF_EVERY_SWITCH, ("torch",))]


@pytest.mark.parametrize(("name", "paged_logits"), tiered(BOTH, FIRST), indirect=["paged_logits"])
def test_float32_logits(name, tiny_checkpoint, reference, paged_logits):
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, **options)
    expected = _expected(reference, name, path)
    assert expected.std() > 0.3
    for chunks in ([NUM_TOKENS], CHUNKS):
        found = paged_logits(path, _token_ids(), chunks, isa=ISA_OF[name])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_few_families_meet_every_switch(tmp_path):
    def switches(names: Iterable[str]) -> set[tuple[str, object]]:
        found: set[tuple[str, object]] = set()
        for name in names:
            architecture, options = FAMILIES[name]
            config = tiny_config(architecture, **options)
            config.architectures = [architecture]
            config.save_pretrained(tmp_path)
            ours = read_model_config(tmp_path)[1]
            found |= {("rope", each.rope_type) for each in ours.ropes}
            found |= {("interleaved", each.is_interleaved) for each in ours.ropes}
            for field in fields(ours):
                value = getattr(ours, field.name)
                if isinstance(value, bool | str):
                    found.add((field.name, value))
                elif not isinstance(value, int | RopeConfig):
                    found.add((field.name, value == field.default))
        return found

    assert switches(OF_EVERY_SWITCH) == switches(FAMILIES)


@pytest.mark.parametrize("paged_logits", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", tiered(FAMILIES, SIX))
def test_chunks_change_no_bit(name, tiny_checkpoint, paged_logits):
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, dtype="bfloat16", **options)
    whole, chunked = (paged_logits(path, _token_ids(), each) for each in ([NUM_TOKENS], CHUNKS))
    assert torch.equal(whole, chunked)


@pytest.mark.parametrize("name", tiered(FAMILIES, SIX[1:3]))
def test_bfloat16_is_as_exact_as_transformers(name, tiny_checkpoint, reference, paged_logits):
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, dtype="bfloat16", **options)
    exact = _expected(reference, name, path)
    theirs = _expected(reference, name, path, "bfloat16")
    ours = paged_logits(path, _token_ids(), CHUNKS)
    our_error, their_error = ((each - exact).pow(2).mean().sqrt() for each in (ours, theirs))
    assert our_error < 1.25 * their_error


@pytest.mark.parametrize("paged_logits", ["kernels"], indirect=True)
def test_sinks(tiny_checkpoint, tmp_path, paged_logits, monkeypatch):
    """No family here has them without experts: the program gives the logits of the decoder in
    torch."""
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("LlamaForCausalLM"), path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    plain = paged_logits(path, _token_ids(), CHUNKS)
    sinks = {f"model.layers.{n}.self_attn.sinks": torch.tensor([0.5, -1, 2, 0]) for n in range(2)}
    save_file(tensors | sinks, file)
    family = Architecture(
        read_config=lambda fields: replace(read_llama_config(fields), has_sinks=True)
    )
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", family)
    found, in_torch = (
        paged_logits(path, _token_ids(), CHUNKS, implementation=each)
        for each in ("kernels", "torch")
    )
    torch.testing.assert_close(found, in_torch, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.05


@pytest.mark.parametrize("name", ["pythia", "phi2", "gpt2", "glm4"])
def test_rounded_weights_of_reordered_rows(name, tiny_checkpoint):
    """Rows of fused, turned or transposed matrices get the scales of their own."""
    architecture, options = FAMILIES[name]
    path, device = tiny_checkpoint(architecture, **options), torch.device("cpu")
    exact = load_model(ModelConfig(), path, device)
    rounded = load_model(ModelConfig(quantization="int8"), path, device)
    for exact_layer, layer in zip(exact.matrix_layers, rounded.matrix_layers, strict=True):
        weight = torch.cat([each.dequantize() for each in layer.quantized])
        torch.testing.assert_close(weight, exact_layer.weight.data, atol=5e-3, rtol=0.02)


def test_longrope_follows_the_maximum_length(tiny_checkpoint, tmp_path):
    """And no block of keys is taken for one of the other factors."""
    architecture, options = FAMILIES["phi3 128k"]
    path = tiny_checkpoint(architecture, **options | {"original_max_position_embeddings": 64})
    lengths, roots = {64: False, 65: True, None: True}, {}
    for max_model_len, is_long in lengths.items():
        model = ModelConfig(model=str(path), max_model_len=max_model_len)
        core, _ = build_core(EngineConfig(model=model, device=DeviceConfig(device="cpu")))
        roots.setdefault(is_long, set()).add(core.scheduler.blocks._prefixes._cache_root)
        rope = load_model(model, path, torch.device("cpu")).rotaries[0]
        factors = rope.config.long_factors if is_long else rope.config.short_factors
        plain = theta_frequencies(rope.config.theta, 12)
        torch.testing.assert_close(rope.inverse_frequencies, plain / torch.tensor(factors))
    assert len(roots[True]) == len(roots[False]) == 1
    assert roots[True] != roots[False]


@pytest.mark.parametrize("name", ["gpt2", "falcon 40b"])
def test_names_without_the_models_own(name, tiny_checkpoint, tmp_path):
    """As the first checkpoints on the Hub have them."""
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(FAMILIES[name][0], **FAMILIES[name][1]), path)
    tensors = load_file(path / "model.safetensors")
    bare = {each.removeprefix("transformer."): tensor for each, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    expected = load_model(ModelConfig(), path, torch.device("cpu")).state_dict()
    save_file(bare, path / "model.safetensors")
    found = load_model(ModelConfig(), path, torch.device("cpu")).state_dict()
    assert all(torch.equal(found[each], tensor) for each, tensor in expected.items())


@pytest.mark.parametrize("name", tiered(FAMILIES, ["gpt2", "gemma2"]))
def test_random_weights_need_no_checkpoint(name, tiny_checkpoint):
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, **options)
    exact, random = (
        load_model(ModelConfig(load_format=each), path, torch.device("cpu")).state_dict()
        for each in ("auto", "dummy")
    )
    assert {name: each.shape for name, each in exact.items()} == {
        name: each.shape for name, each in random.items()
    }


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse"]),
        ("GPTBigCodeForCausalLM", {"multi_query": False}, ["multi_query", "only True"]),
        ("GPT2LMHeadModel", {"n_embd": "64"}, ["n_embd"]),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, ["do_layer_norm_before", "True"]),
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}, ["word_embed_proj_dim"]),
        ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, ["attn_config.qk_ln", "False"]),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, ["attn_config.alibi", "True"]),
        ("OlmoForCausalLM", {"clip_qkv": "8"}, ["clip_qkv", "'8'"]),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, ["rope_scaling.short_factor"]),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [1] * 7 + [0]}},
            ["rope_scaling.long_factor", "0"],
        ),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4}}, ["rope_scaling"]),
        ("GPTJForCausalLM", {"rotary_dim": 3}, ["rotary_dim"]),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, ["no_rope_layers"]),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, ["use_bidirectional"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture, changes, words, tiny_checkpoint, tmp_path
):
    options = {"pad_token_id": 0} if architecture.startswith(("Phi3", "SmolLM3")) else {}
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(architecture, **options), path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(model_impl="native"), path, torch.device("cpu"))
    assert all(word in str(caught.value) for word in ("config.json", *words)), caught.value
