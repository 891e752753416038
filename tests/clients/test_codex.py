"""OpenAI's Codex, unedited, reads a file through its shell tool.

The model has random weights; what it writes is what a grammar leaves it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.model_files import DEMO_MODEL_PATH

from ..system.processes import Served, serve
from . import scripted_server

pytestmark = [pytest.mark.node, pytest.mark.external]

CONTEXT = 65_536
TRANSPORTS = ("sse", "websocket")
SAID = "I read the note."
EXAMPLE = Path(__file__).parents[2] / "clients" / "examples" / "codex.toml"
IN_EXAMPLE = ("Qwen/Qwen3-4B", "40960", "http://127.0.0.1:8000", "supports_websockets = true")


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of each two requests, it answers the first with a call and the second with `SAID`."""
    folder = tmp_path_factory.mktemp("codex")
    texts = [call("exec_command", cmd="cat note.txt"), SAID]
    grammars = [f"start: {json.dumps(text)}" for text in texts] * len(TRANSPORTS)
    (folder / "grammars.json").write_text(json.dumps(grammars))
    command = (
        *("env", f"{scripted_server.FILE}={folder / 'grammars.json'}"),
        *(sys.executable, "-m", scripted_server.__name__),
    )
    model = (str(tiny_model(folder / "model")), "--served-model-name", "tiny")
    with serve(*model, log=folder / "log", command=command) as served:
        yield served


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_file_is_read(codex: Path, server: Served, tmp_path: Path, transport: str) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text("The secret word is marzipan.\n")
    config = EXAMPLE.read_text()
    websockets = f"supports_websockets = {json.dumps(transport == 'websocket')}"
    for text, ours in zip(
        IN_EXAMPLE, ("tiny", str(CONTEXT), server.base_url, websockets), strict=True
    ):
        assert config.count(text) == 1
        config = config.replace(text, ours)
    (home / "config.toml").write_text(config)
    asked = [codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    before = server.log.read_text()
    done = subprocess.run(
        [*asked, "What does note.txt say?"],
        cwd=work,
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    log = server.log.read_text().removeprefix(before)
    assert ("WEBSOCKET /v1/responses" in log) == (transport == "websocket")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [ran] = [item for item in items if item["type"] == "command_execution"]
    assert "marzipan" in ran["aggregated_output"]
    assert ran["exit_code"] == 0
    assert items[-1]["text"] == SAID
    assert events[-1]["type"] == "turn.completed"
