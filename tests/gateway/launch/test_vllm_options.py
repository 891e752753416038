"""Command lines written for vLLM: they start, with their meaning where there is one here."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import CONTEXT, FITTING_LEN, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.settings.kinds import parse_tokens
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import (
    SERVE_SETTINGS,
    engine_config,
    ignored_in_file,
    resolve_settings,
)
from penstock.gateway.launch.vllm_options import NOT_HERE, WITHOUT_EFFECT, without_effect

from ...support import options_document
from .test_cli import error_line, gateway_settings

_PARSER = _parser()  # takes longer than a line


def parsed(line: str) -> tuple[dict[str, Any], EngineConfig, GatewayConfig, list[str]]:
    """The settings of a command line, for engine and gateway, and what has no effect."""
    given = vars(_PARSER.parse_args(["serve", *shlex.split(line)]))
    settings = resolve_settings(given, {})
    return (
        settings,
        engine_config(settings),
        GatewayConfig.from_settings(gateway_settings(settings)),
        without_effect(given.get("without_effect", ())),
    )


# From vLLM's documentation, its model recipes and its examples for Docker and Kubernetes; what is
# after `vllm serve`. With each, the settings that differ from ours, and what is said to have none.
LINES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        {"model": "NousResearch/Meta-Llama-3-8B-Instruct", "api_key": ["token-abc123"]},
        [],
    ),
    ("--model mistralai/Mistral-7B-v0.1", {"model": "mistralai/Mistral-7B-v0.1"}, []),
    (
        "mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill "
        "--max_num_batched_tokens 1024",
        {"trust_remote_code": True, "max_num_batched_tokens": 1024},
        [],
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
        "--chat-template examples/tool_chat_template_llama3.1_json.jinja",
        {
            "tool_call_parser": "llama3_json",
            "chat_template": "examples/tool_chat_template_llama3.1_json.jinja",
        },
        ["--enable-auto-tool-choice"],
    ),
    (
        "meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=/m/sql/ other=/m/o",
        {"enable_lora": True, "lora_modules": ["sql-lora=/m/sql/", "other=/m/o"]},
        [],
    ),
    (
        "meta-llama/Llama-2-7b-hf --enable-lora --max-cpu-loras 2 --max-lora-rank 64 "
        "--lora-modules "
        """'{"name": "sql-lora", "path": "/m/l", "base_model_name": "meta-llama/Llama-2-7b"}'""",
        {"lora_modules": ["sql-lora=/m/l"], "max_cpu_loras": 2, "max_lora_rank": 64},
        [],
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --enable-reasoning "
        "--reasoning-parser deepseek_r1",
        {"reasoning_parser": "deepseek_r1"},
        ["--enable-reasoning"],
    ),
    (
        "Qwen/Qwen3-8B --reasoning-parser qwen3 --default-chat-template-kwargs "
        """'{"enable_thinking": false}'""",
        {"default_chat_template_kwargs": '{"enable_thinking": false}'},
        [],
    ),
    (
        "Qwen/Qwen2-VL-7B-Instruct --dtype half --tensor-parallel-size 2 "
        """--limit-mm-per-prompt '{"image": 2, "video": 0}' --allowed-local-media-path /data""",
        {"dtype": "float16", "tensor_parallel_size": 2, "allowed_local_media_path": "/data"},
        [],
    ),
    (
        "microsoft/Phi-3.5-vision-instruct --runner generate --trust-remote-code "
        "--max-model-len 4096 --limit-mm-per-prompt image=2,video=1",
        {"max_model_len": 4096, "trust_remote_code": True},
        ["--runner"],
    ),
    (
        "TIGER-Lab/VLM2Vec-Full --task embed --trust-remote-code --max-model-len 4096 "
        "--chat-template examples/template_vlm2vec.jinja",
        {"chat_template": "examples/template_vlm2vec.jinja"},
        ["--task"],
    ),
    (
        "jason9693/Qwen2.5-1.5B-apeach --runner pooling --convert classify --hf-overrides "
        """'{"architectures": ["Qwen2ForSequenceClassification"]}'""",
        {"hf_overrides": '{"architectures": ["Qwen2ForSequenceClassification"]}'},
        ["--runner", "--convert"],
    ),
    (
        "./tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf "
        "--tokenizer TinyLlama/TinyLlama-1.1B-Chat-v1.0 -tp 2",
        {"tokenizer": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tensor_parallel_size": 2},
        [],
    ),
    (
        "meta-llama/Llama-3.1-70B-Instruct -tp 4 -pp 2 --gpu-memory-utilization 0.95 "
        "--max-model-len 32k --max-num-seqs 256 --distributed-executor-backend mp",
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "max_model_len": 32000,
         "gpu_memory_utilization": 0.95, "max_num_seqs": 256},
        ["--distributed-executor-backend"],
    ),
    (
        "Qwen/Qwen3-30B-A3B-FP8 --data-parallel-size 4 --enable-expert-parallel --async-scheduling",
        {"replicas": 4},
        ["--enable-expert-parallel", "--async-scheduling"],
    ),
    (
        "openai/gpt-oss-20b --no-enable-prefix-caching --max-cudagraph-capture-size 2048 "
        "--max-num-batched-tokens 8K --stream-interval 20",
        {"enable_prefix_caching": False, "max_num_batched_tokens": 8192},
        ["--max-cudagraph-capture-size", "--stream-interval"],
    ),
    (
        "Qwen/Qwen3-0.6B -tp 1 --trust-remote-code --dtype bfloat16 "
        """-cc '{"pass_config": {"fuse_act_quant": false}, "custom_ops": ["all"]}'""",
        {"dtype": "bfloat16"},
        ["-cc"],
    ),
    (
        "meta-llama/Llama-2-7b-hf --uds /tmp/vllm.sock --disable-log-stats --disable-log-requests",
        {"uds": "/tmp/vllm.sock"},
        ["--disable-log-requests", "--disable-log-stats"],
    ),
    (
        "--model facebook/opt-125m --host 0.0.0.0 --port 8080 --served-model-name opt any-name "
        "--api-key k1 k2 --root-path /llm/ --enforce-eager --disable-uvicorn-access-log",
        {"model": "facebook/opt-125m", "host": "0.0.0.0", "port": 8080, "api_key": ["k1", "k2"],
         "served_model_name": ["opt", "any-name"], "root_path": "/llm", "cudagraph_mode": "none"},
        ["--disable-uvicorn-access-log"],
    ),
    (
        "TheBloke/Llama-2-7b-Chat-AWQ --quantization awq --max-model-len -1 --download-dir /models "
        "--kv-cache-dtype fp8_e4m3 --calculate-kv-scales --swap-space 4 --seed 42",
        {"quantization": "none", "max_model_len": FITTING_LEN, "download_dir": "/models",
         "kv_cache_dtype": "fp8", "swap_space": 4.0, "seed": 42},
        ["--calculate-kv-scales"],
    ),
    (
        "Qwen/Qwen2.5-1.5B-Instruct --generation-config vllm --max-logprobs 5 "
        """--override-generation-config '{"temperature": 0.5}' --cpu-offload-gb 10 """
        "--tokenizer-mode auto --load-format safetensors --structured-outputs-config.backend=x",
        {"generation_config": "none", "max_logprobs": 5, "load_format": "auto",
         "override_generation_config": '{"temperature": 0.5}'},
        ["--cpu-offload-gb", "--tokenizer-mode", "--structured-outputs-config"],
    ),
    (
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506 --tokenizer_mode mistral --config_format "
        "mistral --load_format mistral --tool-call-parser mistral --enable-auto-tool-choice "
        """--allowed-origins '["https://a.example", "https://b.example"]' -O3""",
        {"allowed_origins": ["https://a.example", "https://b.example"]},
        ["--tokenizer-mode", "--config-format", "--enable-auto-tool-choice", "-O"],
    ),
    (
        """Qwen/Qwen2.5-7B-Instruct --rope-scaling '{"rope_type": "yarn", "factor": 4.0}' """
        "--max-model-len 131072 --hf-token secret --response-role assistant",
        {"hf_overrides": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}',
         "max_model_len": 131072,
         "hf_token": "secret"},
        ["--response-role"],
    ),
    (
        "meta-llama/Meta-Llama-3-8B-Instruct --speculative-config.method ngram "
        "--speculative-config.num_speculative_tokens 5 --api-server-count 1 -asc 1",
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}',
         "api_workers": 1},
        [],
    ),
    (
        "meta-llama/Meta-Llama-3-8B-Instruct --spec-method ngram --spec-tokens=2 "
        """--speculative-config '{"prompt_lookup_max": 4}' --max-num-queued-reqs 216 """
        "--max_num_queued_tokens 5000",
        {"speculative_config":
         '{"prompt_lookup_max": 4, "method": "ngram", "num_speculative_tokens": 2}',
         "max_queue_requests": 216, "max_queue_tokens": 5000},
        [],
    ),
    (
        "demo --speculative-config auto --spec-tokens 4",
        {"speculative_config": '{"method": "auto", "num_speculative_tokens": 4}'},
        [],
    ),
    (
        "meta-llama/Llama-3.2-1B -cc.dynamic_shapes_config.type=backed -cc.mode=0 "
        "--eplb-config.window_size 1000 --logging-config.log_level DEBUG "
        "--limit-mm-per-prompt.image 2 "
        "--attention-config.backend TRITON_ATTN",
        {"limit_mm_per_prompt": '{"image": 2}'},
        ["-cc", "--eplb-config", "--logging-config", "--attention-config"],
    ),
    (
        "Qwen/Qwen3-0.6B --enable-sleep-mode --numa-bind --numa-bind-nodes 0 0 1 1 "
        "--shutdown-timeout 5 "
        "--enable-tokenizer-info-endpoint --enable-server-load-tracking --all2all-backend naive "
        "--device-memory-utilization 0.5 --profiler-config '{}'",
        {"gpu_memory_utilization": 0.5},
        ["--enable-sleep-mode", "--numa-bind-nodes", "--shutdown-timeout", "--all2all-backend",
         "--enable-tokenizer-info-endpoint", "--enable-server-load-tracking", "--profiler-config"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected", "unused"), LINES)
def test_a_line_from_vllms_documents_is_understood(
    line: str, expected: dict[str, Any], unused: list[str]
) -> None:
    settings, _, gateway, said = parsed(line)
    assert {name: settings[name] for name in expected} == expected
    assert gateway.max_images >= 0
    text = ", ".join(said)
    assert all(name in text for name in unused)
    assert bool(said) == bool(unused)


def test_each_option_without_effect_is_said_with_its_reason() -> None:
    [one, other] = without_effect(
        ["--max-log-len", "--disable-log-requests", "--max-log-len", "--no-async-scheduling"]
    )
    assert one == (
        "--max-log-len, --disable-log-requests "
        "(the log has no prompts, and one line for each request)"
    )
    assert other.startswith("--no-async-scheduling (")


@pytest.mark.parametrize(
    "name", [name for each in WITHOUT_EFFECT for name in (*each.switches, *each.options)]
)
def test_an_option_without_effect_takes_no_model_for_its_value(name: str) -> None:
    takes_value = any(name in each.options for each in WITHOUT_EFFECT)
    assert parsed(f"{name} {'x' * takes_value} org/model")[0]["model"] == "org/model"


def test_no_option_has_two_meanings() -> None:
    ours = [name for each in SERVE_SETTINGS for name in each.options]
    theirs = [*NOT_HERE, *(name for each in WITHOUT_EFFECT for name in each.names)]
    assert len({*ours, *theirs}) == len(ours) + len(theirs)


def test_the_document_is_made_of_the_options() -> None:
    assert options_document.PAGE.read_text("utf-8") == options_document.written(), (
        "run `make documents`"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("2k", 2000),
        ("32K", 32768),
        ("1m", 10**6),
        ("1M", 1 << 20),
        ("25.6k", 25600),
    ],
)
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert parse_tokens(text) == CONTEXT.parse(text) == number


@pytest.mark.parametrize("text", ["", "k", "0", "-2", "1.5", "1.5K", "x", "1e3", "2kb", "nank"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        CONTEXT.parse(text)


def test_the_context_may_be_what_fits() -> None:
    assert CONTEXT.parse("auto") == CONTEXT.parse("-1") == FITTING_LEN


def test_adapters_at_once_are_no_more_than_fit() -> None:
    for line, number in (
        ("--enable-lora --max-cpu-loras 2", 2),
        ("--enable-lora --max-cpu-loras 20", 8),
        ("--enable-lora", 8),
        ("--enable-lora --max-loras 3 --max-cpu-loras 4", 3),
    ):
        assert parsed(line)[1].lora.num_at_once == number
    with pytest.raises(ConfigError, match="--max-cpu-loras must be at least --max-loras"):
        parsed("--max-loras 3 --max-cpu-loras 2")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--modle x", "unknown option --modle (did you mean --model?)"),
        ("--model-imp native", "unknown option --model-imp (did you mean --model-impl?)"),
        ("--max-logprob 3", "(did you mean --max-logprobs?)"),
        ("--disable-log-request", "(did you mean --disable-log-requests?)"),
        ("--ssl-cert-reqs 2", "unknown option --ssl-cert-reqs"),  # it must not seem to be obeyed
        ("--middleware auth.check", "unknown option --middleware"),
        ("-dpl 1", "-dpl (vLLM's; this server has nothing like it)"),
        ("""--lora-modules '{"name": "x"}'""", "--lora-modules must be NAME=PATH, or {"),
        ("--hf-overrides [1]", "--hf-overrides must be a JSON object"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a is 1, so --hf-overrides.a.b"),
        ("--override-generation-config {", "--override-generation-config must be a JSON object"),
        ("--max-model-len 2.5K", "--max-model-len must be a number of tokens such as 4096"),
        ("--root-path llm", "--root-path must be a path that begins with /"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype must be one of auto, fp8, int8"),
        ("--enforce-eager.x 3", "unknown option --enforce-eager.x"),
        (
            "--kv-transfer-config {}",
            "--kv-transfer-config (vLLM's; this server has nothing like it)",
        ),
        (
            "--pooler-config.task x",
            "--pooler-config.task (vLLM's; this server has nothing like it)",
        ),
    ],
)
def test_other_options_are_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_line("serve", *shlex.split(line), capsys=capsys)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--tool-call-parser glm47 --reasoning-parser glm47", ("glm45", "glm45")),
        ("--tool-call-parser granite4", ("hermes", None)),
        ("--tool-call-parser mimo --reasoning-parser mimo", ("qwen3_coder", "qwen3")),
        ("--reasoning-parser minimax_m2", (None, "deepseek_r1")),
        # SGLang's
        ("--tool-call-parser qwen25 --reasoning-parser deepseek-r1", ("hermes", "deepseek_r1")),
        ("--tool-call-parser gpt-oss --reasoning-parser gpt-oss", ("openai", "openai_gptoss")),
        # as found
        ("--tool-call-parser auto --reasoning-parser none", ("auto", "none")),
    ],
)
def test_formats_by_other_names(line: str, settings: tuple[str | None, str | None]) -> None:
    found = parsed(line)[0]
    assert (found["tool_call_parser"], found["reasoning_parser"]) == settings


def test_a_chat_template_as_llama_cpp_names_it() -> None:
    assert parsed("--chat-template-file mine.jinja")[1].model.chat_template == "mine.jinja"


def test_a_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("a", "--model", "b"), ("--model", "b", "a")):
        said = error_line("serve", *words, capsys=capsys)
        assert "MODEL is 'a', but --model is 'b'" in said
    assert parsed("a --model a")[0]["model"] == "a"


def test_a_file_of_vllms(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: org/model\nhost: '127.0.0.1'\nport: 6379\nuvicorn-log-level: info\n"
        "served-model-name: [a, b]\nmax_model_len: 2k\nenable-prefix-caching: false\n"
        "api-server-count: 1\nlimit-mm-per-prompt: {image: 2}\nhf-overrides: {a: {b: 1}}\n"
        "lora-modules:\n  - {name: one, path: /one}\nenable-lora: true\nchat-template:\n"
    )
    settings = resolve_settings({"config": file}, {})
    wanted = {
        "model": "org/model", "port": 6379, "served_model_name": ["a", "b"], "api_workers": 1,
        "max_model_len": 2000, "enable_prefix_caching": False, "hf_overrides": '{"a": {"b": 1}}',
        "lora_modules": ["one=/one"], "enable_lora": True, "chat_template": None,
    }  # fmt: skip
    assert {name: settings[name] for name in wanted} == wanted
    assert GatewayConfig.from_settings(gateway_settings(settings)).max_images == 2
    assert ignored_in_file({"config": file}, {}) == ["--uvicorn-log-level"]
    for text, said in (("a: [", "is not YAML: "), ("- a", "is not a mapping"), ("a: 1", "unknown")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            resolve_settings({"config": file}, {})
    with pytest.raises(ConfigError, match="cannot read the config file"):
        resolve_settings({"config": tmp_path / "no.yaml"}, {})


@pytest.mark.parametrize("model", ["org/model", "./model", "~/m/x.gguf", "x.gguf"])
def test_a_list_does_not_take_the_model_in_silence(model: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name takes all values that follow it"):
        parsed(f"--served-model-name name {model}")
    with pytest.raises(ConfigError, match="--api-key takes all") as caught:
        parsed(f"--api-key k {model}")
    assert model not in str(caught.value)
    assert parsed("--api-key k1 k2 --served-model-name a b")[0]["model"] == "demo"
    for line in (f"--api-key k org/x --model {model}", f"{model} --served-model-name a org/b"):
        assert parsed(line)[0]["model"] == model


def test_the_same_from_the_environment() -> None:
    settings = resolve_settings(
        {},
        {
            "PENSTOCK_LORA_MODULES": '[{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]',
            "PENSTOCK_ENABLE_LORA": "1",
            "PENSTOCK_DTYPE": "half",
            "PENSTOCK_MAX_MODEL_LEN": "2k",
            "PENSTOCK_ALLOWED_ORIGINS": '["*"]',
        },
    )
    assert settings["lora_modules"] == ["a=/a", "b=/b"]
    assert (settings["dtype"], settings["max_model_len"]) == ("float16", 2000)
    assert settings["allowed_origins"] == ["*"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("image=3", 3), ('{"image": 3}', 3), ("image=3,video=1", 3), ("video=0", 16),
     ('{"image": {"count": 2, "width": 64}}', 2), ('{"audio": 1}', 16), ("image:3", None),
     ("image", None), ('{"image": "3"}', None), ("{", None), ("cats=3", None), ("image=999", None)],
)  # fmt: skip
def test_images_of_a_prompt(text: str, number: int | None) -> None:
    if number is None:
        with pytest.raises(ConfigError, match="--limit-mm-per-prompt must be image=N"):
            GatewayConfig(engine_address="x", limit_mm_per_prompt=text)
    else:
        config = GatewayConfig(engine_address="x", limit_mm_per_prompt=text)
        assert config.max_images == number
