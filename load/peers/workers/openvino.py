"""OpenVINO GenAI's continuous batching in its own process, timed as a server's client times it.

    python -m penstock.load.peers.workers.openvino MODEL_DIRECTORY PROPERTIES_JSON

The parent sends workloads and receives records, one line of JSON each; times are those of
`time.perf_counter()`, which all processes share. There is no HTTP, in the library's favour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

_KV_CACHE_GB = 2


def pipeline_of(model: str, properties: dict[str, Any]) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = _KV_CACHE_GB
    scheduler.max_num_seqs = 128
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def hold(
    pipeline: Any, turns: list[tuple[list[int], int]], concurrency: int
) -> list[dict[str, Any]]:
    """Complete every prompt with its number of tokens, `concurrency` at a time: the fields of
    `StreamRecord` that a library can fill."""
    waiting, records = list(enumerate(turns))[::-1], list[dict[str, Any]]()
    handles: dict[int, tuple[Any, dict[str, Any]]] = {}
    while waiting or handles:
        while waiting and len(handles) < concurrency:
            number, (prompt, max_tokens) = waiting.pop()
            record: dict[str, Any] = {"dialogue": number, "scheduled_s": time.perf_counter(),
                      "prompt_tokens": len(prompt), "event_times_s": [],
                      "event_tokens": []}  # fmt: skip
            records.append(record)
            config = genai.GenerationConfig()
            config.max_new_tokens = max_tokens
            config.ignore_eos = True
            config.do_sample = False
            tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles[number] = (pipeline.add_request(number, tokens, config), record)
        pipeline.step()
        now_s = time.perf_counter()
        for number, (handle, record) in list(handles.items()):
            while handle.can_read():
                [output] = handle.read().values()
                record["ended_s"] = now_s
                if output.generated_ids:
                    record["event_times_s"].append(now_s)
                    record["event_tokens"].append(len(output.generated_ids))
                if output.finish_reason != genai.GenerationFinishReason.NONE:
                    del handles[number]
    return records


def own_stdout() -> TextIO:
    """Standard output for our answers alone; libraries print to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Report ready, then answer each line of standard input."""
    answers = own_stdout()
    pipeline = pipeline_of(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked, began_s = json.loads(line), time.perf_counter()
        records = hold(pipeline, asked["turns"], asked["concurrency"])
        answer = {"began_s": began_s, "ended_s": time.perf_counter(), "records": records}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
