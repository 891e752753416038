"""`penstock bench images`: how long streams wait for their next token while images are encoded.

The streams decode alone, beside prompts of text, and beside prompts of as many tokens with an
image each, which differs from all others. The three take turns. The largest gap between two tokens
of a stream counts, from its second token on: what images add to the same number of tokens is the
encoder's doing.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import ImageInput, Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.engine.vision.image_file import load_image
from penstock.engine.vision.image_tokens import ImageTokens, read_image_tokens
from penstock.load.machine import frozen_garbage
from penstock.load.report.options import add_out, positive
from penstock.load.report.tables import publish, table

_KINDS = ("alone", "text", "images")
_SIZE = 224
# LLaVA's shape, small: a tower of CLIP's base size, and a language model of 60 million weights.
_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "dtype": "bfloat16",
    "image_token_index": 7,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": _SIZE, "patch_size": 14,
        "projection_dim": 512,
    },
}  # fmt: skip
_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": _SIZE},
    "crop_size": {"height": _SIZE, "width": _SIZE},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a directory; default: a small LLaVA with random weights")
    add("--num-streams", type=positive, default=8, help="streams that decode")
    add("--num-images", type=positive, default=4, help="images that arrive during a run")
    add("--max-tokens", type=positive, default=300, help="tokens of each stream")
    add("--repeats", type=positive, default=3, help="runs of each kind, in turn")
    add("--seed", type=int, default=0, help="seed of prompts and images")
    add_out(parser)


@dataclass(slots=True)
class _Run:
    """
    Attributes:
        gaps_s: between the tokens of each stream.
        waits_s: from a prompt's arrival to its first token.
    """

    gaps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


def run(parsed: argparse.Namespace) -> int:
    """Measure; return 1 if the largest gap beside images is more than twice that beside text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(parsed.model or folder)
        if parsed.model is None:
            (path / "config.json").write_text(json.dumps(_CONFIG))
            (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
        load_format: Any = "dummy" if parsed.model is None else "auto"
        core, info = build_core(
            EngineConfig(
                model=ModelConfig(model=str(path), load_format=load_format, max_model_len=2048),
                cache=CacheConfig(enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20),
                device=DeviceConfig(),
            )
        )
        tokens = read_image_tokens(path)
        assert tokens is not None, f"{path} takes no images"
        prompts = _Prompts(tokens, parsed.seed, info.vocab_size)
        runs: dict[str, list[_Run]] = {kind: [] for kind in _KINDS}
        for kind in _KINDS:  # once unmeasured
            _measure(core, prompts, kind, parsed)
        with frozen_garbage():
            for _ in range(parsed.repeats):
                for kind in _KINDS:
                    runs[kind].append(_measure(core, prompts, kind, parsed))
        core.close()
    largest = {kind: statistics.median(max(r.gaps_s) for r in each) for kind, each in runs.items()}
    usual = {
        kind: statistics.median(gap for r in each for gap in r.gaps_s)
        for kind, each in runs.items()
    }
    waits = {
        kind: statistics.median(each) if (each := [w for r in runs[kind] for w in r.waits_s]) else 0
        for kind in _KINDS
    }
    figures = {
        "model": "random LLaVA" if parsed.model is None else parsed.model,
        "device": info.device,
        "num_streams": parsed.num_streams,
        "num_images": parsed.num_images,
        "largest_gap_s": largest,
        "median_gap_s": usual,
        "first_token_s": waits,
        "ratio_to_text": largest["images"] / largest["text"],
        "ratio_to_alone": largest["images"] / largest["alone"],
        "median_ratio_to_alone": usual["images"] / usual["alone"],
    }
    rows = [
        [kind, *(f"{each[kind] * 1e3:.1f}" for each in (largest, usual, waits))] for kind in _KINDS
    ]
    report = "\n\n".join(
        [
            f"{figures['model']}, {info.dtype}, {info.device}: {parsed.num_streams} streams beside "
            f"{parsed.num_images} prompts of {prompts.num_tokens} tokens",
            table(["beside", "largest gap, ms", "median gap, ms", "first token, ms"], rows),
            f"The largest gap beside images is {figures['ratio_to_text']:.2f} times that beside "
            f"text, and {figures['ratio_to_alone']:.2f} times that of streams alone.",
        ]
    )
    publish(parsed.out, "images", "Images beside streams", report, figures)
    return int(largest["images"] > 2 * largest["text"])


class _Prompts:
    """Prompts that no other one begins like."""

    def __init__(self, tokens: ImageTokens, seed: int, vocab_size: int) -> None:
        self._rng, self._seeds = random.Random(seed), np.random.default_rng(seed)
        self._tokens, self._vocab_size = tokens, vocab_size
        self._number = 0
        self._num_features = tokens.expand(_SIZE, _SIZE).count(tokens.placeholder)
        self.num_tokens = self._num_features + 16

    def stream(self, max_tokens: int) -> Request:
        return self._request(self._ids(16), max_tokens, ())

    def other(self, kind: str) -> Request:
        if kind == "text":
            return self._request(self._ids(self.num_tokens), 1, ())
        pixels = self._seeds.integers(0, 256, (_SIZE, _SIZE, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        data = file.getvalue()
        image = ImageInput(
            digest=load_image(data).digest,
            offset=8,
            num_tokens=self._num_features,
            num_features=self._num_features,
            data=data,
        )
        ids = [*self._ids(8), *[self._tokens.token_id] * self._num_features, *self._ids(8)]
        return self._request(ids, 1, (image,))

    def _ids(self, number: int) -> list[int]:
        ids = (self._rng.randrange(16, self._vocab_size) for _ in range(number))
        return [token_id + (token_id == self._tokens.token_id) for token_id in ids]

    def _request(self, ids: list[int], max_tokens: int, images: tuple[ImageInput, ...]) -> Request:
        self._number += 1
        return Request(
            request_id=str(self._number),
            prompt_token_ids=tuple(ids),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            arrival_s=time.time(),
            images=images,
        )


def _measure(core: EngineCore, prompts: _Prompts, kind: str, parsed: argparse.Namespace) -> _Run:
    streams = [prompts.stream(parsed.max_tokens) for _ in range(parsed.num_streams)]
    last_s: dict[str, float] = {}
    arrived_s: dict[str, float] = {}
    for request in streams:
        core.add(request)
    found = _Run()
    names = {request.request_id for request in streams}
    num_seen, num_sent = 0, 0
    every = parsed.max_tokens // (parsed.num_images + 1)
    while any(map(core.has_request, names)):
        outputs = core.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.request_id in names and output.token_ids:
                if output.request_id in last_s:
                    found.gaps_s.append(now_s - last_s[output.request_id])
                last_s[output.request_id] = now_s
            elif output.request_id in arrived_s and output.token_ids:
                found.waits_s.append(now_s - arrived_s.pop(output.request_id))
        num_seen += len(last_s) == len(names)
        if kind != "alone" and num_sent < parsed.num_images and num_seen >= every * (num_sent + 1):
            request = prompts.other(kind)
            arrived_s[request.request_id] = time.perf_counter()
            core.add(request)
            num_sent += 1
    while any(map(core.has_request, arrived_s)):
        if not core.has_work():
            core.images.wait()
        for output in core.step():
            if output.request_id in arrived_s and output.token_ids:
                begun_s = arrived_s.pop(output.request_id)
                found.waits_s.append(time.perf_counter() - begun_s)
    return found
