"""Requests with several of adapter, images, grammar and drafts have the reference's tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.lora.files import find_adapter
from penstock.engine.request import Request, StructuredOutputs
from penstock.engine.startup import build_core
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from tests.support.peft_models import read_adapted, write_adapter

from ..lora.test_parity import run
from ..vision.test_images import Model, Part
from ..vision.vision_models import picture

NUM_NEW = 32
SPECULATION = '{"method": "ngram"}'
WORDS = StructuredOutputs("regex", "([a-z]{1,5}-){20}")  # longer than every output
PARTS: dict[bool, list[Part]] = {
    False: ["user: no picture at all. assistant: "],
    True: ["user: what is in ", picture(0), " and ", picture(1, 60, 20), "? assistant: "],
}


def engine(path: Path) -> EngineCore:
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32"),
            cache=CacheConfig(block_size=8, num_blocks=200),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, speculative_config=SPECULATION),
            device=DeviceConfig(device="cpu", num_threads=1),
            lora=LoraConfig(enable_lora=True),
        )
    )
    return core


def allowed_by(path: Path, vocab_size: int, num_prompt: int) -> Callable[..., list[int]]:
    """Which tokens the grammar allows, as `generate` asks for it."""
    compiler = GrammarCompiler(path, vocab_size=vocab_size, eos_token_ids=())
    bits = torch.empty(-(-vocab_size // 32), dtype=torch.int32)

    def allowed(_: int, token_ids: torch.Tensor) -> list[int]:
        matcher = compiler.matcher(WORDS)
        assert matcher.consume_tokens(token_ids[num_prompt:].tolist())
        matcher.unsafe_compute_mask_ptr(bits.data_ptr(), 4 * len(bits))
        flags = bits[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        return [int(each) for each in flags.flatten().nonzero() if each < vocab_size]

    return allowed


@torch.inference_mode()
def generated(model: Any, given: dict[str, Any], **options: Any) -> list[int]:
    found = model.generate(
        **given, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, **options
    )
    return found[0, given["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def check(core: EngineCore, requests: list[Request], expected: dict[str, list[int]]) -> None:
    """All at once; and then one after the other, with a guess of the output that is half right."""
    assert len({tuple(each) for each in expected.values()}) == len(expected)
    assert run(core, requests) == expected
    counters = core.scheduler.drafting.counters
    for each in requests:
        output = expected[each.request_id]
        guess = (*output[: NUM_NEW // 2], *range(40, 60))
        before = counters.num_accepted_tokens
        assert run(core, [replace(each, prediction_token_ids=guess)])[each.request_id] == output
        assert counters.num_accepted_tokens - before > NUM_NEW // 4


def test_adapters_images_grammars_and_drafts(tmp_path: Path) -> None:
    """Of each some requests have none, beside each other."""
    model, auto = Model("llava", tmp_path / "model"), AutoModelForImageTextToText
    changed = r".*language_model\..*(q_proj|o_proj|up_proj|embed_tokens)"
    write_adapter(model.path, tmp_path / "a", 1, auto=auto, target_modules=changed)
    references = {None: model.reference, "a": read_adapted(model.path, tmp_path / "a", auto)}
    requests, expected = [], {}
    for adapter, has_images, has_grammar in product((None, "a"), (False, True), (False, True)):
        name = f"{adapter=},{has_images=},{has_grammar=}"
        made = model.request(PARTS[has_images], name, params={"max_tokens": NUM_NEW})
        given, options = model.given(PARTS[has_images]), {}
        if has_grammar:
            params = replace(made.sampling_params, structured_outputs=WORDS)
            made = replace(made, sampling_params=params)
            allowed = allowed_by(model.path, 360, given["input_ids"].shape[1])
            options = {"prefix_allowed_tokens_fn": allowed}
        if adapter is not None:
            made = replace(made, adapter=find_adapter(adapter, str(tmp_path / adapter)))
        requests.append(made)
        expected[name] = generated(references[adapter], given, **options)
    check(engine(model.path), requests, expected)
