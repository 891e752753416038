"""Hugging Face transformers: `generate` in static padded batches, or its continuous batching.

python -m penstock.load.peers.workers.hf MODEL_DIRECTORY static|continuous OPTIONS_JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from penstock.load.peers.workers.closed_loop import Event, Library, own_stdout, serve

_NO_TOKEN = -1


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


class Static:
    """A `Library`: submitted requests form one batch, and the next waits for its end."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._model.generation_config.eos_token_id = None
        self._waiting: list[tuple[int, list[int], int]] = []

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((request_id, prompt, max_tokens))

    def step(self) -> list[Event]:
        batch, self._waiting = self._waiting, []
        ids, mask = padded([prompt for _, prompt, _ in batch])
        streamer = _Streamer()
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(max_tokens for _, _, max_tokens in batch),
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
        return [
            Event(at_s, request_id, [tokens[row]], step + 1 == max_tokens)
            for step, (at_s, tokens) in enumerate(streamer.steps)
            for row, (request_id, _, max_tokens) in enumerate(batch)
            if step < max_tokens
        ]


class _Streamer:
    """Notes when each token of the batch came."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[int]]] = []
        self._has_seen_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._has_seen_prompt:
            self.steps.append((time.perf_counter(), tokens.tolist()))
        self._has_seen_prompt = True

    def end(self) -> None:
        pass


class Continuous:
    """A `Library`: the manager that batches in its own thread."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0, max_new_tokens=256
            ),
            continuous_batching_config=ContinuousBatchingConfig(**options),
        )
        self._manager.start()
        self._num_seen: dict[int, int] = {}

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self._num_seen[request_id] = 0
        self._manager.add_request(
            prompt,
            request_id=str(request_id),
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=_NO_TOKEN,
        )

    def step(self) -> list[Event]:
        output = self._manager.get_result(timeout=1.0)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the manager has stopped")
            return []
        if output.error:
            raise RuntimeError(output.error)
        request_id = int(output.request_id)
        fresh = output.generated_tokens[self._num_seen[request_id] :]
        self._num_seen[request_id] += len(fresh)
        return [Event(time.perf_counter(), request_id, fresh, output.is_finished())]


def _library(directory: str, kind: str, options: dict[str, Any]) -> Library:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.eval()
    return Static(model) if kind == "static" else Continuous(model, options)


if __name__ == "__main__":
    _answers = own_stdout()
    torch.set_grad_enabled(False)
    serve(_library(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])), _answers)
