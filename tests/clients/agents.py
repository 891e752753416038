"""What the tests of unedited agents share: a server with random weights, whose answers are what
grammars leave it, deaths in the middle of turns, and what of each prompt was cached.

In each turn an agent writes a line of `lines.txt`, so that a call that ran twice is seen there.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

from ..system.processes import END_S, Served, serve, wait_until
from . import scripted_server

CONTEXT = 32_768
KILLED = (2, 6)  # turns, which take long enough
VICTIMS = ("engine", "gateway")
_RUNNING = "penstock:num_requests_running"
_LEAST_CACHED = 0.98  # of the previous prompt


def tiny_model(folder: Path) -> Path:
    """Random weights, with the built-in model's tokenizer and chat template."""
    demo = json.loads((DEMO_MODEL_PATH / "config.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=demo["vocab_size"],
        eos_token_id=demo["eos_token_id"],
        bos_token_id=demo["bos_token_id"],
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )
    transformers.utils.logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_PATH / name, folder)
    return folder


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@contextmanager
def scripted(folder: Path, texts: Sequence[str]) -> Iterator[Served]:
    """A server that answers its prompts with these texts."""
    (folder / "grammars.json").write_text(json.dumps([f"start: {json.dumps(t)}" for t in texts]))
    command = (
        *("env", f"{scripted_server.FILE}={folder / 'grammars.json'}"),
        *(sys.executable, "-m", scripted_server.__name__),
    )
    model = (str(tiny_model(folder / "model")), "--served-model-name", "tiny")
    with serve(*model, log=folder / "log", command=command) as served:
        yield served


def lines(folder: Path) -> list[str]:
    """What was written by an agent that works in `folder / "work"`."""
    file = folder / "work" / "lines.txt"
    return file.read_text().split() if file.exists() else []


def check_hits(found: Sequence[tuple[int, int]], victim: str = "") -> None:
    """From the second turn on, the previous prompt was cached.

    Args:
        found: of each turn, how many tokens its prompt has, and how many of them were cached.
        victim: of `killed`. An engine takes its cache along, so in the turn in which it is killed
            all may be computed again, and in the next one nothing.
    """
    for turn, ((before, _), (num_tokens, num_cached)) in enumerate(itertools.pairwise(found), 1):
        assert num_tokens > before
        if victim != "engine" or turn not in KILLED:
            assert num_cached >= _LEAST_CACHED * before, found


@contextmanager
def killed(server: Served, folder: Path, victim: str) -> Iterator[None]:
    """Meanwhile a process of the server is killed in each turn of `KILLED`."""

    def kill() -> None:
        for number in KILLED:
            wait_until(lambda number=number: len(lines(folder)) == number and _is_busy(server))
            server.child(f"penstock-{victim}").kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()
    assert server.log.read_text().count(f"the {victim} died") == len(KILLED)


def _is_busy(server: Served) -> bool:
    try:
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=END_S).text
    except httpx.HTTPError:
        return False
    values = [line.split()[-1] for line in metrics.splitlines() if line.startswith(_RUNNING)]
    return any(float(value) > 0 for value in values)
