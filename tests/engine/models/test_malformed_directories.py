"""Malformed model directories: each is one `ConfigError` in one line that names the file and the
field at fault, soon and without filling memory. Through `LLM`, and some through `penstock serve`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.tiers import tiered

from penstock.engine import LLM
from penstock.engine.errors import ConfigError, InvalidRequestError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.offline.prompts import engine_config
from penstock.engine.text import ChatTemplate
from penstock.engine.text.chat_template import SlowTemplateError

_HANG_S = 120.0  # what hangs in a regular expression or a template takes hours
_MAX_MESSAGE_CHARS = 1100
_MAX_NEW_BYTES = 4 << 30  # of address space
_USER = [{"role": "user", "content": "hello"}]
Change = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model, whose files can be replaced."""
    path = tmp_path / "model"
    path.mkdir()
    for file in DEMO_MODEL_PATH.iterdir():
        (path / file.name).symlink_to(file)
    return path


@contextmanager
def bounded() -> Iterator[None]:
    """It ends, in a few GiB more than now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = psutil.Process().memory_info().vms + _MAX_NEW_BYTES

    def end(*_: object) -> None:
        raise AssertionError("it hangs")

    handler = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    signal.setitimer(signal.ITIMER_REAL, _HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def put(name: str, content: str | bytes) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def fields(name: str, **changes: Any) -> Change:
    def change(path: Path) -> None:
        values = json.loads((path / name).read_text()) | changes
        put(name, json.dumps(values))(path)

    return change


def config(**changes: Any) -> Change:
    return fields("config.json", **changes)


def rope(**changes: Any) -> Change:
    return config(rope_parameters=None, rope_scaling=changes)


def template(source: str) -> Change:
    return fields("tokenizer_config.json", chat_template=source)


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the header of the weights."""

    def apply(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8 : 8 + size])
        change(tensors)
        text = json.dumps(tensors).encode()
        put("model.safetensors", len(text).to_bytes(8, "little") + text + data[8 + size :])(path)

    return apply


def index(content: str) -> Change:
    def change(path: Path) -> None:
        (path / "model.safetensors").unlink()
        put("model.safetensors.index.json", content)(path)

    return change


def instead(name: str, make: Callable[[Path], object]) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        make(path / name)

    return change


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


_DEEP = '{"x":' + "[" * 200_000 + "]" * 200_000 + "}"
_NORM = "model.norm.weight"
_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json")
_KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
    "directory": (lambda path: path.mkdir(), "is a directory, not a regular file"),
    "socket": (_socket, "is a socket, not a regular file"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "is a link to a missing file"),
    "link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic"),
}
_FILES = (*_SMALL, "tokenizer.json", "chat_template.jinja", "model.safetensors",
          "model.safetensors.index.json", "more.safetensors")  # fmt: skip


def _replace(name: str, make: Callable[[Path], object]) -> Change:
    def change(path: Path) -> None:
        if name.endswith("index.json"):
            (path / "model.safetensors").unlink()
        instead(name, make)(path)

    return change


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    **{
        f"{name} is a {kind}": (_replace(name, make), (name, words))
        for name in _FILES
        for kind, (make, words) in _KINDS.items()
        if (name, kind) != ("more.safetensors", "device")  # like the others, and slow to copy
    },
    **{f"{name} is deep": (put(name, _DEEP), (name, "nested too deeply")) for name in _SMALL},
    **{f"{name} is empty": (put(name, ""), (name, "not valid JSON")) for name in _SMALL},
    **{f"{name} is huge": (instead(name, _sparse), (name, "more than")) for name in _SMALL},
    "many digits": (
        put("config.json", f'{{"vocab_size": {"9" * 5000}}}'),
        ("config.json", "a number in it has too many digits"),
    ),
    "deep tokenizer": (put("tokenizer.json", _DEEP), ("tokenizer.json",)),
    "deep header": (
        put("model.safetensors", len(_DEEP).to_bytes(8, "little") + _DEEP.encode()),
        ("model.safetensors", "corrupt or incomplete"),
    ),
    "deep index": (index(_DEEP), ("model.safetensors.index.json", "nested too deeply")),
    "deep value": (config(vocab_size=json.loads("[" * 400 + "]" * 400)), ("vocab_size: expected",)),
    # Sizes
    **{
        f"{name} {value!r:.30}": (config(**{name: value}), ("config.json", f"{name}: expected"))
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "intermediate_size",
            "vocab_size",
            "num_attention_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for value in (10**9, 10**18, 10**400, -1, 0, 1.5, True, "x" * 50_000, float("nan"))
    },
    "more layers than tensors": (
        config(num_hidden_layers=900),
        ("config.json: num_hidden_layers", "no tensor model.layers.899.input_layernorm.weight"),
    ),
    "wider than its tensors": (
        config(hidden_size=1 << 20, head_dim=16),
        ("model.safetensors", "by config.json"),
    ),
    # Positions
    **{
        f"theta {value}": (
            config(rope_parameters=None, rope_theta=value),
            ("rope_theta: expected",),
        )
        for value in (1e-300, 0, -1.0, 1e300, float("inf"), "10000", True, [10000])
    },
    **{
        f"{kind} factor {value}": (
            rope(rope_type=kind, factor=value, low_freq_factor=1.0, high_freq_factor=4.0),
            ("config.json", "rope_scaling.factor: expected a number"),
        )
        for kind in ("linear", "dynamic", "yarn", "llama3")
        for value in (1e-300, 0.5, 0, -2.0, 1e300, 10**400, "2", True, [2.0, 2.0])
    },
    "long context": (
        rope(rope_type="linear", factor=1e6),
        ("config.json: max_position_embeddings", "the context of 2048000000 tokens is too long"),
    ),
    "rope type": (rope(rope_type="spiral"), ("rope_scaling.rope_type: 'spiral' is not supported",)),
    "rope list": (config(rope_parameters=None, rope_scaling=[1]), ("rope_scaling: expected an o",)),
    "llama3 factors": (
        rope(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0),
        ("rope_scaling.high_freq_factor: must exceed low_freq_factor (4)",),
    ),
    "yarn betas": (
        rope(rope_type="yarn", factor=2.0, beta_fast=1.0, beta_slow=2.0),
        ("rope_scaling.beta_fast: must be at least beta_slow (2)",),
    ),
    "yarn scale": (
        rope(rope_type="yarn", factor=2.0, attention_factor=1e5),
        ("rope_scaling.attention_factor: expected a number from 1e-06 to 100",),
    ),
    # Ids and defaults
    **{
        f"EOS {value} in {name}": (
            fields(name, eos_token_id=value),
            (f"{name}: eos_token_id: expected a token id",),
        )
        for name in ("config.json", "generation_config.json")
        for value in (-1, True, 10**9, 10**18, 1.5, "2", [2, True], [[2]])
        if name == "generation_config.json"
    },
    "EOS only in config.json": (
        lambda path: ((path / "generation_config.json").unlink(), config(eos_token_id=-1)(path)),
        ("config.json: eos_token_id: expected a token id, or a list of them, from 0 to",),
    ),
    "BOS": (config(bos_token_id=True), ("config.json: bos_token_id: expected a token id",)),
    "padding": (
        fields("generation_config.json", pad_token_id=-2),
        ("generation_config.json: pad_token_id: expected a token id",),
    ),
    "temperature": (
        fields("generation_config.json", temperature=10**400),
        ("generation_config.json: temperature: expected a number",),
    ),
    "top_k": (
        fields("generation_config.json", top_k=1.5),
        ("top_k: expected an integer, not 1.5",),
    ),
    # Texts
    "special token": (
        fields("tokenizer_config.json", bos_token=True),
        ("tokenizer_config.json: bos_token: expected a string",),
    ),
    "surrogate": (
        fields("tokenizer_config.json", eos_token="\ud800"),
        ("tokenizer_config.json: eos_token: expected valid Unicode",),
    ),
    "nameless template": (
        fields("tokenizer_config.json", chat_template=[{"template": "x"}]),
        ("tokenizer_config.json: chat_template: each of a list must be an object with `name`",),
    ),
    "template of a wrong type": (
        fields("tokenizer_config.json", chat_template=5),
        ("chat_template: expected a string or",),
    ),
    **{
        f"template {source[:30]}": (
            template(source),
            ("tokenizer_config.json: the chat template", fault),
        )
        for source, fault in {
            "{{ 10**10000000 }}": "is broken: it needs too much memory",
            "{{ '%9999999999d' % 1 }}": "is broken: it needs too much memory",
            "{{ '%9999999999d' | format(1) }}": "is broken: it needs too much memory",
            "{{ '{:>9999999999}'.format(1) }}": "is broken: it needs too much memory",
            "{{ 'a'*10**10 }}": "is broken: it needs too much memory",
            "{{ 'a' | center(10**10) }}": "is broken: it needs too much memory",
            "{{ 'a'.zfill(10**10) }}": "is broken: it needs too much memory",
            "{{ 2.5 | round(10**9) }}": "is broken: it needs too much memory",
            "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}"
            "{% set n.s = n.s ~ n.s %}{% endfor %}": "is broken: it needs too much memory",
            "{{ range(10**12) }}": "is broken: OverflowError: Range too big",
            f"{{{{ {'(' * 3000}1{')' * 3000} }}}}": "is broken: it is nested too deeply",
            "{% set x = range(99999) %}{% for a in x %}{% for b in x %}{% for c in x %}"
            "{% endfor %}{% endfor %}{% endfor %}": "takes more than 2 s to render",
            "{{ '\\ud800' }}": "produces invalid Unicode",
            "{% for": "is broken: ",
        }.items()
    },
    # Weights
    "dtype": (
        header(lambda tensors: tensors[_NORM].update(dtype="Q9")),
        ("model.safetensors", "corrupt"),
    ),
    "overlap": (
        header(lambda tensors: tensors[_NORM].update(data_offsets=[0, 4])),
        ("model.safetensors", "corrupt"),
    ),
    "name of many characters": (
        header(lambda tensors: tensors.update({"l1\nl2" * 20_000: tensors.pop(_NORM)})),
        ("the checkpoint has no tensor model.norm.weight",),
    ),
    "file outside": (index('{"weight_map": {"a": "../a.safetensors"}}'), ("weight_map: files",)),
    "index of nothing": (index('{"weight_map": {"a": "b.safetensors"}}'), ("is missing",)),
    "quantization": (config(quantization_config=[4]), ("quantization_config: expected an object",)),
    "several lines": (config(architectures=["a\nb"]), (r"architectures: a\nb is not supported",)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line(name: str, model: Path) -> None:
    change, words = CASES[name]
    change(model)
    with bounded(), pytest.raises(ConfigError) as caught:
        LLM(str(model), num_blocks=256, swap_space=0, device="cpu", num_threads=1)
    message = str(caught.value)
    assert message.isprintable(), "one line"
    assert len(message) < _MAX_MESSAGE_CHARS
    for word in (str(model), *words):
        assert word in message, message


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size"])
def test_dummy_weights_are_bounded_by_the_memory(name: str, model: Path) -> None:
    config(**{name: 1 << 24}, num_hidden_layers=900, head_dim=1 << 16)(model)
    with bounded(), pytest.raises(ConfigError, match=r"config\.json: weights of .* bytes free"):
        LLM(str(model), load_format="dummy", device="cpu")


def test_dummy_weights_load(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with LLM(str(model), load_format="dummy", num_blocks=256, swap_space=0, device="cpu") as llm:
        assert llm.generate("hello", use_tqdm=False)


def test_ids_that_real_models_have(model: Path) -> None:
    config(pad_token_id=-1, bos_token_id=None)(model)
    fields("generation_config.json", pad_token_id=10**6, eos_token_id=[1, 2], top_k=None)(model)
    LLM(str(model), num_blocks=256, swap_space=0, device="cpu").close()


@pytest.mark.parametrize("size", [0, -16, 1, 17, 131_072])
def test_impossible_block_sizes(size: int) -> None:
    fault = f"--block-size must be an even number from 2 to 65536, not {size}"
    with pytest.raises(ConfigError, match=fault):
        engine_config("demo", {"block_size": size})


def test_a_rendering_that_runs_away_costs_a_bounded_time() -> None:
    rounds = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done"
    chat = ChatTemplate(rounds, {})
    with bounded(), pytest.raises(SlowTemplateError) as caught:
        chat.render(_USER, kwargs={"n": 99_999}, max_cpu_s=0.1)
    assert str(caught.value) == "the chat template takes more than 0.1 s to render"
    assert caught.value.param == "messages"
    assert chat.render(_USER, kwargs={"n": 3}) == "done"
    long = ChatTemplate("{{ messages[0].content * n }}", {})
    with bounded(), pytest.raises(InvalidRequestError, match="fails: it needs too much memory"):
        long.render(_USER, kwargs={"n": 10**9})
    assert long.render(_USER, kwargs={"n": 2}) == "hellohello"


SERVED = [
    (config(num_hidden_layers=10**9), 1, "num_hidden_layers: expected an integer from 1"),
    (instead("generation_config.json", os.mkfifo), 1, "is a FIFO, not a regular file"),
    (lambda _: None, 2, "--max-model-len 99999 is not between 1 and the model's 2048"),
]


@pytest.mark.parametrize(
    ("change", "code", "fault"),
    tiered(SERVED, SERVED[:1]),
)
def test_serve_ends_with_one_line(change: Change, code: int, fault: str, model: Path) -> None:
    change(model)
    command = [str(Path(sys.executable).with_name("penstock")), "serve", str(model), "--port", "0"]
    options = ["--max-model-len", "99999"] if code == 2 else []
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=180)
    assert ended.returncode == code
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith("penstock: error: ")
    assert fault in line
