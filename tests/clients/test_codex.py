"""OpenAI's Codex, unedited, reads a file through its shell tool, and compacts its conversation.

The model has random weights; what it writes is what a grammar leaves it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

from ..system.processes import Served, serve
from . import scripted_server

pytestmark = [pytest.mark.node, pytest.mark.external]

CONTEXT = 65_536
COMPACTS_AT = 14_400  # tokens: after five turns of 1,250 each, and 9,700 before them
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of each two requests, it answers the first with a call and the second with `SAID`."""
    texts = [call("exec_command", cmd="cat note.txt"), SAID]
    with scripted(tmp_path_factory.mktemp("codex"), texts * len(TRANSPORTS)) as served:
        yield served


def run(codex: Path, server: Served, folder: Path, config: str, prompt: str) -> str:
    """What Codex tells, one JSON object a line."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir(exist_ok=True)
    (home / "config.toml").write_text(config)
    asked = [codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    done = subprocess.run(
        [*asked, prompt],
        cwd=work,
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def config_of(server: Served, *, has_websockets: bool) -> str:
    config = EXAMPLE.read_text()
    websockets = f"supports_websockets = {json.dumps(has_websockets)}"
    for text, ours in zip(
        IN_EXAMPLE, ("tiny", str(CONTEXT), server.base_url, websockets), strict=True
    ):
        assert config.count(text) == 1
        config = config.replace(text, ours)
    return config


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_file_is_read(codex: Path, server: Served, tmp_path: Path, transport: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("The secret word is marzipan.\n")
    before = server.log.read_text()
    config = config_of(server, has_websockets=transport == "websocket")
    told = run(codex, server, tmp_path, config, "What does note.txt say?")
    log = server.log.read_text().removeprefix(before)
    assert ("WEBSOCKET /v1/responses" in log) == (transport == "websocket")
    events = [json.loads(line) for line in told.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [ran] = [item for item in items if item["type"] == "command_execution"]
    assert "marzipan" in ran["aggregated_output"]
    assert ran["exit_code"] == 0
    assert items[-1]["text"] == SAID
    assert events[-1]["type"] == "turn.completed"


def test_ten_turns_with_a_compaction(codex: Path, tmp_path: Path) -> None:
    """It asks the server for one where it takes it for OpenAI's."""
    more = [f"echo {number} >> lines.txt" for number in range(10)]
    more[:5] = [f"{command}; seq 300" for command in more[:5]]  # of 1,250 tokens each
    calls = [call("exec_command", cmd=command) for command in more]
    texts = [*calls[:5], "Lines are written.", *calls[5:], SAID]
    with scripted(tmp_path, texts) as server:
        config = config_of(server, has_websockets=False).replace(
            '"penstock"\nbase', '"OpenAI"\nbase'
        )
        limit = f"model_auto_compact_token_limit = {COMPACTS_AT}\n"
        told = run(codex, server, tmp_path, limit + config, "Write ten lines.")
        written = (tmp_path / "work" / "lines.txt").read_text().split()
        assert written == [str(number) for number in range(10)]
        events = [json.loads(line) for line in told.splitlines()]
        assert events[-1]["type"] == "turn.completed"
        used = events[-1]["usage"]
        assert used["cached_input_tokens"] > 0.75 * used["input_tokens"]
        assert " 400 in" not in server.log.read_text()
