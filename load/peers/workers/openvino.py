"""OpenVINO GenAI's continuous batching, driven step by step.

python -m penstock.load.peers.workers.openvino MODEL_DIRECTORY PROPERTIES_JSON
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

from penstock.load.peers.workers.closed_loop import Event, own_stdout, serve

_KV_CACHE_GB = 2


class Pipeline:
    """A `Library`."""

    def __init__(self, model: str, properties: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_CACHE_GB
        scheduler.max_num_seqs = 128
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[request_id] = self._pipeline.add_request(request_id, tokens, config)

    def step(self) -> list[Event]:
        self._pipeline.step()
        now_s = time.perf_counter()
        events = []
        for request_id, handle in list(self._handles.items()):
            while handle.can_read():
                [output] = handle.read().values()
                is_last = output.finish_reason != genai.GenerationFinishReason.NONE
                events.append(Event(now_s, request_id, output.generated_ids, is_last))
                if is_last:
                    del self._handles[request_id]
        return events


if __name__ == "__main__":
    _answers = own_stdout()
    serve(Pipeline(sys.argv[1], json.loads(sys.argv[2])), _answers)
