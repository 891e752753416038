"""Options of vLLM that are no settings here: accepted without effect, or refused by name.

Those that mean the same as one of ours are its aliases, where it is declared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """Options of vLLM that have no meaning here: they are accepted, and said so once.

    Attributes:
        why: for the message.
        switches: those without a value, or with `--no-`.
        options: those with one.
        lists: those with several.
    """

    why: str
    switches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.switches + self.options + self.lists


WITHOUT_EFFECT = (
    WithoutEffect("it is always so", (
        "--enable-auto-tool-choice", "--enable-reasoning", "--enable-request-id-headers",
        "--enable-prompt-tokens-details", "--disable-frontend-multiprocessing",
        "--enable-ssl-refresh", "--enable-server-load-tracking", "--enable-tokenizer-info-endpoint",
    )),
    WithoutEffect("the log has no prompts, and one line for each request", (
        "--disable-log-requests", "--enable-log-requests", "--disable-uvicorn-access-log",
        "--enable-log-outputs", "--enable-log-deltas", "--exclude-log-deltas", "--log-error-stack",
    ), (
        "--max-log-len", "--uvicorn-log-level", "--disable-access-log-for-endpoints",
        "--log-config-file", "--logging-config",
    )),
    WithoutEffect("numbers are at /metrics, not in the log", (
        "--disable-log-stats", "--kv-cache-metrics", "--cudagraph-metrics",
        "--enable-logging-iteration-details", "--enable-mfu-metrics",
        "--enable-layerwise-nvtx-tracing", "--enable-per-request-metrics",
        "--aggregate-engine-logging",
    ), (
        "--show-hidden-metrics-for-version", "--kv-cache-metrics-sample", "--profiler-config",
        "--custom-histogram-buckets",
    ), ("--collect-detailed-traces",)),
    WithoutEffect("a model does all that it can: it generates, and makes vectors or scores",
                  options=("--runner", "--task", "--convert")),
    WithoutEffect("the files of the model decide", ("--allow-deprecated-quantization",), (
        "--tokenizer-mode", "--config-format", "--chat-template-content-format",
    )),
    WithoutEffect("there is one way to load files", ("--use-tqdm-on-load",), (
        "--safetensors-load-strategy", "--max-parallel-loading-workers",
        "--model-loader-extra-config", "--pt-load-map-location",
    ), ("--ignore-patterns",)),
    WithoutEffect("there is one implementation", (
        "--use-v2-block-manager", "--async-scheduling", "--disable-async-output-proc",
        "--disable-hybrid-kv-cache-manager", "--disable-cascade-attn", "--calculate-kv-scales",
        "--disable-custom-all-reduce", "--multi-step-stream-outputs", "--numa-bind",
        "--enable-flashinfer-autotune", "--disable-nccl-for-dp-synchronization",
        "--ray-workers-use-nsight", "--enable-dbo", "--scheduler-reserve-full-isl",
        "--kv-sharing-fast-prefill", "--enable-cumem-allocator", "--use-fp64-gumbel",
        "--guided-decoding-disable-fallback",
    ), (
        "--attention-backend", "--structured-outputs-config", "--guided-decoding-backend",
        "--distributed-executor-backend", "--prefix-caching-hash-algo", "--reasoning-backend",
        "--kv-offloading-backend", "--num-scheduler-steps", "--moe-backend",
        "--attention-config", "--kernel-config", "--linear-backend", "--mamba-backend",
        "--gdn-prefill-backend", "--ir-op-priority", "--all2all-backend", "--ubatch-size",
        "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--renderer-num-workers",
        "--data-parallel-backend", "-dpb", "--data-parallel-rpc-port", "-dpp",
        "--max-num-scheduled-tokens", "--mamba-block-size", "--mamba-cache-mode",
        "--num-lookahead-slots", "--tokenizer-pool-size", "--tokenizer-pool-type",
        "--tokenizer-pool-extra-config",
    ), ("--numa-bind-nodes", "--numa-bind-cpus")),
    WithoutEffect("--step-timeout-s says when an engine counts as stuck", options=(
        "--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds",
    )),
    WithoutEffect("see --shutdown-grace-s", options=("--shutdown-timeout",)),
    WithoutEffect("see --ping-interval-s", options=("--sse-keep-alive-interval",)),
    WithoutEffect("a server does not sleep: stop it", ("--enable-sleep-mode",)),
    WithoutEffect("nothing is compiled by it: see --cudagraph-mode", (), (
        "--compilation-config", "-O", "-cc", "--optimization-level", "--performance-mode",
        "--max-cudagraph-capture-size", "--max-seq-len-to-capture",
    ), ("--cudagraph-capture-sizes", "--cuda-graph-sizes")),
    WithoutEffect("--max-stall-ms bounds what prompts delay", (), (
        "--max-num-partial-prefills", "--max-long-partial-prefills",
        "--long-prefill-token-threshold", "--scheduler-delay-factor",
    )),
    WithoutEffect("see --stream-interval-ms", options=("--stream-interval",)),
    WithoutEffect("an answer's role is assistant", options=("--response-role",)),
    WithoutEffect("weights stay where they are computed with", options=(
        "--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size",
        "--offload-num-in-group", "--offload-prefetch-step", "--offload-params",
    )),
    WithoutEffect("experts are shared among ranks like other matrices", (
        "--enable-expert-parallel", "-ep", "--enable-eplb", "--enable-ep-weight-filter",
        "--eplb-log-balancedness",
    ), ("--eplb-config", "--expert-placement-strategy", "--num-redundant-experts",
        "--eplb-window-size", "--eplb-step-interval")),
    WithoutEffect("adapters have the model's dtype, and all their own parts", (
        "--fully-sharded-loras",
    ), ("--lora-dtype", "--lora-extra-vocab-size", "--long-lora-scaling-factors")),
    WithoutEffect("see --mm-encoder-cache-bytes and --limit-mm-per-prompt", (
        "--disable-mm-preprocessor-cache", "--skip-mm-profiling", "--language-model-only",
        "--interleave-mm-strings", "--disable-chunked-mm-input",
        "--enable-multimodal-encoder-data-parallel",
    ), ("--mm-processor-cache-gb", "--mm-processor-cache-type", "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend", "--media-io-kwargs", "--video-pruning-rate",
        "--video-pruning-method", "--mm-encoder-attn-dtype", "--mm-processor-device",
        "--mm-shm-cache-max-object-size-mb", "--mm-ipc-gpu-memory-gb", "--mm-tensor-ipc")),
    WithoutEffect("browsers may send what the API needs: see --allowed-origins", (
        "--allow-credentials",
    ), ("--allowed-methods", "--allowed-headers")),
    WithoutEffect("this server has no such limit or page", (
        "--disable-fastapi-docs", "--enable-offline-docs",
    ), (
        "--h11-max-incomplete-event-size", "--h11-max-header-count",
    )),
)  # fmt: skip

# Options of vLLM that would change what is answered, to whom or from where, and are not here: they
# end the command, without a question about another option that is meant.
NOT_HERE = frozenset((
    "-dcp", "-dpa", "-dpl", "-dpn", "-dpr", "--additional-config",
    "--anthropic-disabled-thinking-effort", "--aux-output-config", "--code-revision",
    "--cohere-format", "--cohere-is-reasoning-model", "--cp-kv-cache-interleave-size",
    "--data-parallel-address", "--data-parallel-external-lb", "--data-parallel-hybrid-lb",
    "--data-parallel-multi-port-external-lb", "--data-parallel-rank", "--data-parallel-size-local",
    "--data-parallel-start-rank", "--data-parallel-supervisor-port", "--dcp-comm-backend",
    "--dcp-kv-cache-interleave-size", "--dcp-q-replicate", "--decode-context-parallel-size",
    "--default-mm-loras", "--device-ids", "--diffusion-config", "--disable-sliding-window",
    "--dp-supervisor-probe-failure-threshold", "--dp-supervisor-probe-interval-s",
    "--dp-supervisor-probe-timeout-s", "--dp-sync-interval", "--ec-manager-config",
    "--ec-transfer-config", "--elastic-ep-max-dp-size", "--enable-batch-sharded-sampling",
    "--enable-elastic-ep", "--enable-fault-tolerance", "--enable-flash-late-interaction",
    "--enable-force-include-usage", "--enable-hc-sp", "--enable-lora-bias",
    "--enable-mamba-cache-stochastic-rounding", "--enable-mamba-shared-prefix-checkpoint",
    "--enable-mixed-moe-lora-format", "--enable-mm-embeds", "--enable-moe-shared-loras",
    "--enable-nccl-comm-suspend", "--enable-prompt-adapter", "--enable-prompt-embeds",
    "--enable-return-routed-experts", "--enable-scale-out", "--enable-shm-tensor-arena",
    "--enable-tower-connector-lora", "--enable-trace-replay", "--engram-config",
    "--exclude-tools-when-tool-choice-none", "--fail-on-environ-validation",
    "--fault-tolerance-config", "--fingerprint-mode", "--fingerprint-value", "--grpc-port",
    "--guided-decoding-disable-additional-properties", "--guided-decoding-disable-any-whitespace",
    "--headless", "--hf-config-path", "--io-processor-plugin", "--jit-monitor-mode",
    "--jit-monitor-verbose", "--kda-decode-backend", "--kda-prefill-backend",
    "--kv-cache-dtype-skip-layers", "--kv-events-config", "--kv-transfer-config",
    "--logits-processor-pattern", "--logits-processors", "--logprobs-mode",
    "--long-prefill-token-threshold-adaptive", "--lora-target-modules", "--mamba-cache-dtype",
    "--mamba-cache-philox-rounds", "--mamba-ssm-cache-dtype", "--mamba-ssu-algorithm",
    "--master-addr", "--master-port", "--max-lora-cls-labels", "--max-num-active-seqs",
    "--max-prompt-adapter-token", "--max-prompt-adapters", "--middleware",
    "--mm-device-do-normalize", "--mm-encoder-fp8-scale-path", "--mm-encoder-fp8-scale-save-margin",
    "--mm-encoder-fp8-scale-save-path", "--mm-encoder-only", "--mm-hasher-algorithm",
    "--mm-processor-kwargs", "--model-class-overrides", "--monokernel", "--nnodes", "--node-rank",
    "--override-attention-dtype", "--override-neuron-config", "--override-pooler-config",
    "--per-request-spec-decode-metrics", "--pooler-config", "--prefill-context-parallel-size",
    "--prefill-schedule-interval", "--prefix-cache-retention-interval", "--prefix-match-unit",
    "--prompt-adapters", "--qlora-adapter-name-or-path", "--quantization-config",
    "--reasoning-config", "--reasoning-effort-map", "--reasoning-parser-plugin",
    "--replayssm-buffer-len", "--return-sampling-mask", "--return-tokens-as-token-ids",
    "--safetensors-prefetch-block-size", "--safetensors-prefetch-num-threads", "--scheduler-cls",
    "--skip-tokenizer-init", "--sleep-mode-backend", "--sleep-mode-offload-cudagraph",
    "--sleep-preserve-parameter-names", "--sparse-indexer-topk-backend", "--specialize-active-lora",
    "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--swa-bounded-replay", "--tokens-only",
    "--tool-parser-plugin", "--tool-server", "--tool-strict-level", "--trust-request-mm-kwargs",
    "--use-replayssm", "--watchdog-config", "--watermark", "--watermark-config",
    "--weight-transfer-config", "--worker-cls", "--worker-extension-cls",
))  # fmt: skip


def without_effect(options: Iterable[str]) -> list[str]:
    """Options of the command line that have no effect, each group with the reason."""
    given = dict.fromkeys(options)
    found = []
    for each in WITHOUT_EFFECT:
        known = {name: None for name in given if _without_no(name) in each.names}
        if known:
            found.append(f"{', '.join(known)} ({each.why})")
    return found


def _without_no(name: str) -> str:
    return f"--{name[5:]}" if name.startswith("--no-") else name
