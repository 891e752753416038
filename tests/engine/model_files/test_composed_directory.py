"""`--tokenizer`, `--chat-template`, `--hf-overrides`: a directory that nobody reads about."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from penstock.engine import LLM, SamplingParams
from penstock.engine.config import CacheConfig, ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.model_summary import summarise
from penstock.engine.model_files.resolve import (
    DEMO_MODEL_PATH,
    read_generation_defaults,
    resolve_model,
    weights_fingerprint,
)
from penstock.engine.text import ChatTemplate, Tokenizer

from .gguf.written import convert

pytestmark = pytest.mark.usefixtures("own_cache")


def composed(**settings: object) -> Path:
    return resolve_model(ModelConfig(**settings), weights=True)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory with nothing but a tokenizer that has another template."""
    path = tmp_path / "other"
    path.mkdir()
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    return path


def test_another_tokenizer(other: Path) -> None:
    path = composed(tokenizer=str(other))
    assert ChatTemplate.from_directory(path).render([{"role": "user", "content": "x"}]) == "other"
    assert Tokenizer.from_directory(path)
    weights = "model.safetensors"
    assert (path / weights).samefile(DEMO_MODEL_PATH / weights)
    assert weights_fingerprint(path) == weights_fingerprint(DEMO_MODEL_PATH), "the same KV"
    assert composed(tokenizer=str(other)) == path, "it is made once"
    assert composed(tokenizer="demo") == DEMO_MODEL_PATH, "of itself there is nothing to make"


MINE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """The demo model with templates everywhere, of which one is broken, and an end of turns that
    none of them writes."""
    path = tmp_path / "several"
    shutil.copytree(DEMO_MODEL_PATH, path)
    tokenizer = (path / "tokenizer.json").read_text()
    spare = next(each for each in json.loads(tokenizer)["added_tokens"] if each["id"] == 1)
    renamed = tokenizer.replace(json.dumps(spare["content"]), '"<|im_end|>"')
    (path / "tokenizer.json").write_text(renamed)
    named = [{"name": name, "template": name} for name in ("default", "tool_use")]
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    (path / "chat_template.jinja").write_text("{% for")
    (path / "chat_template.json").write_text('{"chat_template": "x"}')
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return path


@pytest.mark.parametrize("is_file", [True, False])
def test_another_chat_template(several: Path, tmp_path: Path, is_file: bool) -> None:
    """It is the only one, also for tools; and the end of its turns ends an answer."""
    file = tmp_path / "mine.jinja"
    file.write_text(MINE)
    given = str(file) if is_file else MINE
    path = composed(model=str(several), chat_template=given)
    template = ChatTemplate.from_directory(path)
    assert (template.source, template.named) == (MINE, {})
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    said = template.render([{"role": "user", "content": "Hi"}], kwargs=tools)
    assert said == "<|im_start|>Hi<|im_end|>"
    ends = read_generation_defaults(path).eos_token_ids
    own = read_generation_defaults(several).eos_token_ids
    assert set(ends) - set(own) == {Tokenizer.from_directory(path).added_tokens["<|im_end|>"]}
    assert weights_fingerprint(path) == weights_fingerprint(several), "the same KV"
    assert composed(model=str(several), chat_template=given) == path, "it is made once"


def test_a_chat_template_of_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    convert(DEMO_MODEL_PATH, file)
    path = composed(model=str(file), chat_template="{{ messages[0].content }}!")
    assert ChatTemplate.from_directory(path).render([{"role": "user", "content": "x"}]) == "x!"
    said = refusal(model=str(file), chat_template="{{ 1//0 }}")
    assert said.startswith("--chat-template: the chat template is broken: ZeroDivisionError")


def test_what_is_no_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    for data, said in (
        (b"{% for", f"{file}: the chat template is broken: "),
        (b"{{ 'a' * 10**9 }}", f"{file}: the chat template is broken: it needs too much memory"),
        (b"\xff", f"cannot read {file}: "),
    ):
        file.write_bytes(data)
        assert refusal(chat_template=str(file)).startswith(said)
    os.mkfifo(tmp_path / "pipe")
    for given, said in (
        (str(tmp_path / "pipe"), f"{tmp_path}/pipe is a FIFO, not a regular file"),
        (str(tmp_path), f"{tmp_path} is a directory, not a regular file"),
        (str(tmp_path / "none.jinja"), f"there is no file '{tmp_path}/none.jinja', and it is no"),
        ("chatml", "there is no file 'chatml', and it is no template"),
        ("", "there is no file ''"),
        ("x" * 5000, "there is no file 'xxx"),
        ("{{ x }}" * 20_000, "a text this long must be in a file"),
    ):
        assert refusal(chat_template=given).startswith(f"--chat-template: {said}")


def test_a_chat_template_offline(several: Path) -> None:
    """The engine ends answers with the end of its turns."""
    with LLM(str(several), dtype="float32", max_model_len=256, chat_template=MINE) as llm:
        assert 1 in llm.info.eos_token_ids
        params = SamplingParams(temperature=0.0, max_tokens=1)
        [answer] = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert answer.prompt == "<|im_start|>Hi<|im_end|>"


def test_other_fields() -> None:
    path = composed(hf_overrides='{"max_position_embeddings": 64, "text_config": {"a": 1}}')
    config = json.loads((path / "config.json").read_text())
    own = json.loads((DEMO_MODEL_PATH / "config.json").read_text())
    assert config == {**own, "max_position_embeddings": 64, "text_config": {"a": 1}}
    assert weights_fingerprint(path) != weights_fingerprint(DEMO_MODEL_PATH), "another KV"
    assert composed(hf_overrides="{}") == DEMO_MODEL_PATH


def test_a_section_is_replaced_by_field_and_another_object_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"a": 1, "b": 2}, "rope": {"c": 3}}')
    path = composed(model=str(tmp_path), hf_overrides='{"text_config": {"a": 5}, "rope": {"d": 4}}')
    found = json.loads((path / "config.json").read_text())
    assert found == {"text_config": {"a": 5, "b": 2}, "rope": {"d": 4}}


SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"rope_theta": 5.0}, {"rope_theta": 7.0, "rope_scaling": SCALING}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {"rope_parameters": {**SCALING, "rope_theta": 7.0}},
        ),
    ],
)
def test_other_positions(tmp_path: Path, own: dict[str, object], expected: object) -> None:
    """As transformers 4 and 5 write them."""
    (tmp_path / "config.json").write_text(json.dumps(own))
    overrides = json.dumps({"rope_scaling": SCALING, "rope_theta": 7.0})
    path = composed(model=str(tmp_path), hf_overrides=overrides)
    assert json.loads((path / "config.json").read_text()) == expected


def test_a_longer_context_by_scaling() -> None:
    config = ModelConfig(hf_overrides=json.dumps({"rope_scaling": SCALING}), max_model_len=8192)
    assert "8,192 tokens" in summarise(config, CacheConfig())


def test_a_model_runs_with_both(other: Path) -> None:
    shutil.copy(DEMO_MODEL_PATH / "tokenizer_config.json", other)
    question = [{"role": "user", "content": "Spell walnut."}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    overrides = '{"max_position_embeddings": 256}'
    with LLM("demo", dtype="float32", tokenizer=str(other), hf_overrides=overrides) as llm:
        assert llm.info.max_model_len == 256
        answer = llm.chat([question], params, use_tqdm=False)[0].outputs[0].text
    assert answer == "The word walnut is spelled w-a-l-n-u-t."


def refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        summarise(ModelConfig(**settings), CacheConfig())
    return str(caught.value)


def test_mistakes_name_the_users_files(tmp_path: Path, other: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_PATH, model)
    said = refusal(model=str(model), hf_overrides='{"num_attention_heads": "x"}')
    assert said.startswith(f"{model}/config.json: num_attention_heads: expected an integer")
    (other / "tokenizer.json").write_text("{")
    said = refusal(model=str(model), tokenizer=str(other))
    assert f"cannot read {other}/tokenizer.json: " in said
    (model / "generation_config.json").write_text('{"top_p": 0}')
    said = refusal(model=str(model), hf_overrides='{"a": 1}')
    assert said.startswith(f"{model}/generation_config.json: top_p must be in")


def test_mistakes_name_a_gguf_file(tmp_path: Path, other: Path) -> None:
    file = tmp_path / "some.gguf"
    convert(DEMO_MODEL_PATH, file)
    said = refusal(
        model=str(file), tokenizer=str(other), hf_overrides='{"num_attention_heads": "x"}'
    )
    assert said.startswith(f"{file}: llama.attention.head_count: expected an integer")


def test_mistakes_name_a_repository(tmp_path: Path) -> None:
    """Instead of a snapshot in the Hub's cache, in which files are links."""
    snapshot = tmp_path / "hub/models--acme--tiny/snapshots/0123"
    shutil.copytree(DEMO_MODEL_PATH, snapshot)
    blob = (snapshot / "config.json").rename(tmp_path / "blob")
    blob.write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": "x"}')
    (snapshot / "config.json").symlink_to(blob)
    assert refusal(model=str(snapshot)).startswith("acme/tiny/config.json: num_attention_heads: ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokenizer": "/no/such"}, "--tokenizer: model path '/no/such' is not a directory"),
        ({"hf_overrides": "[1]"}, "--hf-overrides must be a JSON object"),
        ({"hf_overrides": "{"}, "--hf-overrides must be a JSON object"),
    ],
)
def test_what_cannot_be_composed(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        composed(**settings)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--tokenizer: .* tokenizer\.json is missing"):
        composed(tokenizer=str(tmp_path))
