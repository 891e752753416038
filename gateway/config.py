"""Settings of one gateway process.

The supervisor sends them as plain JSON. Of the engine's settings they hold only the model's.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from penstock.engine.config import LoraConfig, ModelConfig, TlsFiles
from penstock.engine.settings.declaration import Group, Need, Section, others_of, same_as, setting
from penstock.engine.settings.kinds import (
    COUNT,
    ENDPOINT,
    FILE,
    INTERVAL,
    JSON,
    MILLISECONDS,
    NAME,
    POSITIVE_MILLISECONDS,
    SECONDS,
    SIZE,
    URL,
    Kind,
    one_of,
)

Routing = Literal["prefix", "least-loaded", "round-robin"]
KVTransfer = Literal["auto", "always", "never"]
SessionStorage = Literal["required", "optional"]
ANY_NAME = "*"
_MAX_IMAGES, _DEFAULT_IMAGES = 256, 16  # of a prompt
_OTHER_MODALITIES = {"video", "audio"}  # of which there are none

# What vLLM and SGLang call formats that have another name here: of the same marks.
_TOOL_SPELLINGS = {
    "glm": "glm45", "glm47": "glm45", "granite4": "hermes", "mimo": "qwen3_coder",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "gpt-oss": "openai",
    "llama3": "llama3_json", "qwen": "hermes", "qwen25": "hermes",
}  # fmt: skip
_REASONING_SPELLINGS = {
    "glm47": "glm45", "mimo": "qwen3", "nemotron_v3": "qwen3", "nano_v3": "qwen3",
    "holo2": "deepseek_r1", "minimax_m2": "deepseek_r1", "step3": "deepseek_r1",
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "gpt-oss": "openai_gptoss",
    "minimax": "deepseek_r1", "qwen3-thinking": "deepseek_r1",
}  # fmt: skip


def _origins(text: str) -> list[str]:
    """An origin, or those of a JSON list, as browsers write them."""
    found = json.loads(text) if text.startswith("[") else [text]
    return [_origin(str(each)) for each in found]


def _origin(text: str) -> str:
    """An origin as browsers write it: `scheme://host[:port]`, lower case, no path.

    Raises:
        ValueError: it is not an origin.
    """
    if text == "*":
        return text
    parts = urlsplit(text.strip().lower())
    if not parts.hostname or parts.path not in ("", "/") or parts.query or not parts.scheme:
        raise ValueError(f"{text!r} is no origin")
    return f"{parts.scheme}://{parts.netloc}"


def _images(text: str) -> int | None:
    """The number of images in `image=2,video=0` or, as vLLM also has it, JSON such as
    `{"image": {"count": 2}}`; None: it does not say."""
    if text.lstrip().startswith("{"):
        found: dict[str, Any] = json.loads(text)
    else:
        pairs = [each.partition("=") for each in "".join(text.split()).split(",")]
        found = {name: int(number) if number.isdecimal() else None for name, _, number in pairs}
    limits = {
        name: each.get("count", _DEFAULT_IMAGES) if isinstance(each, dict) else each
        for name, each in found.items()
    }
    number = limits.pop("image", _DEFAULT_IMAGES)
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if not is_number or not 0 <= number <= _MAX_IMAGES or limits.keys() - _OTHER_MODALITIES:
        return None
    return int(number)


KEY = Kind("KEY", "a key that is not empty: every caller would match an empty one",
           accepts=lambda text: bool(text.strip()))  # fmt: skip
SERVED_NAME = Kind("NAME", "a name that is not empty", accepts=lambda text: bool(text.strip()))
ORIGIN = Kind("ORIGIN", "an origin such as https://example.org", _origins,
              lambda text: _origin(text) == text)  # fmt: skip
PREFIX = Kind("PATH", "a path that begins with /", lambda text: text.rstrip("/"),
              lambda text: text == "" or text.startswith("/"))  # fmt: skip
LOGPROBS = Kind("N", "a whole number, 0 or more; -1: no limit of its own", int,
                lambda value: value >= -1)  # fmt: skip
IMAGES = Kind("image=N", f"image=N with N from 0 to {_MAX_IMAGES}",
              accepts=lambda text: _images(text) is not None, is_object=True)  # fmt: skip
MUTUAL_TLS = Need(("tls_cert", "tls_key", "tls_ca"), "between machines there is only mutual TLS")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig(Section):
    """What a gateway shares with `penstock engine`."""

    # fmt: off
    served_model_names: tuple[str, ...] = setting((), Group.LISTEN, "name of the model in the API; "
        "may be repeated; *: any name; default: MODEL as given", SERVED_NAME,
        name="served-model-name", is_daily=True)
    shutdown_grace_s: float = setting(30.0, Group.LISTEN, "how long streams may continue after "
        "SIGTERM", SECONDS, is_daily=True)
    tls_cert: str | None = setting(None, Group.ENGINES, "PEM file with this process's certificate, "
        "for connections between machines: engines and gateways both need one", FILE, is_daily=True)
    tls_key: str | None = setting(None, Group.ENGINES, "PEM file with its key", FILE, is_daily=True)
    tls_ca: str | None = setting(None, Group.ENGINES, "PEM file with the authority that has signed "
        "the others'", FILE, is_daily=True)
    redis_url: str | None = setting(None, Group.REDIS, "keep sessions in Redis, shared and across "
        "restarts, as redis://HOST:6379/0, or rediss:// for TLS", URL, is_secret=True,
        is_daily=True)
    log_level: str = setting("info", Group.LOGGING, "least severe messages to log",
        one_of(("debug", "info", "warning", "error")), is_daily=True)
    log_format: str = setting("text", Group.LOGGING, "lines of text, or one JSON object per line",
        one_of(("text", "json")), is_daily=True)
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(SharedConfig):
    """What a gateway needs to know.

    Attributes:
        engine_address: path of the Unix socket at which the engine listens; in the server's own
            folder, and the same for all its gateways.
        engine_addresses: the same for several engines, which may be none; None: only that one.
        host: the address the listening socket is bound to; on loopback the Host header is
            checked.
        host_name: the same as the user wrote it.
        worker_index: number of this gateway process among those on the socket, from 0.
        num_workers: how many there are.
        model: the engine's settings of it.
    """

    engine_address: str
    engine_addresses: tuple[str, ...] | None = None
    host: str = "127.0.0.1"
    host_name: str = "localhost"
    worker_index: int = 0
    num_workers: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)

    # fmt: off
    # -- listen
    root_path: str | None = setting(None, Group.LISTEN, "path under which a proxy offers the "
        "server, such as /llm; requests may have it or not", PREFIX, is_daily=True)
    max_connections: int = setting(10_000, Group.LISTEN, "connections per gateway process, with "
        "TLS handshakes and WebSockets; further ones get 503", COUNT)
    header_timeout_s: float = setting(10.0, Group.LISTEN, "time for a TLS handshake, and then for "
        "a request's header", INTERVAL)
    body_timeout_s: float = setting(60.0, Group.LISTEN, "time for a request's body", INTERVAL)
    # Clients and proxies would otherwise send a request on a connection that is being closed.
    keep_alive_s: float = setting(75.0, Group.LISTEN, "how long an idle connection stays open; "
        "must exceed what clients and proxies use", INTERVAL)
    ping_interval_s: float = setting(15.0, Group.LISTEN, "send a comment on an event stream after "
        "this much silence, and ping WebSockets this often", INTERVAL)
    stream_interval_ms: float = setting(0.0, Group.LISTEN, "least time between two events of a "
        "stream; text in between is merged; 0: an event per engine step", MILLISECONDS)

    # -- security
    api_keys: tuple[str, ...] = setting((), Group.SECURITY, "a key that callers must send; may be "
        "repeated", KEY, name="api-key", is_secret=True, is_daily=True)
    api_keys_file: str | None = setting(None, Group.SECURITY, "TOML file of keys with tenants, "
        "weights and limits; reread when it changes", FILE, is_daily=True)
    allowed_origins: tuple[str, ...] = setting((), Group.SECURITY, "browser origin to accept "
        "besides the server's own; may be repeated; * accepts all", ORIGIN, is_daily=True)
    ssl_certfile: str | None = setting(None, Group.SECURITY, "PEM file with the server's "
        "certificate; turns TLS on", FILE, is_daily=True)
    ssl_keyfile: str | None = setting(None, Group.SECURITY, "PEM file with its key; default: the "
        "certificate's file", FILE, needs=(Need(("ssl_certfile",)),), is_daily=True)
    ssl_keyfile_password: str | None = setting(None, Group.SECURITY, "password of an encrypted "
        "key", is_secret=True)
    trust_request_chat_template: bool = setting(False, Group.SECURITY, "let requests bring their "
        "own chat template. Only for trusted callers: a template is a program; each may use 2 s of "
        "a core and 512 MiB, one at a time")
    max_body_bytes: int = setting(4 << 20, Group.SECURITY, "largest request body", SIZE)
    max_websocket_message_bytes: int = setting(1 << 20, Group.SECURITY, "largest message of a "
        "WebSocket", SIZE)
    allowed_media_domains: tuple[str, ...] = setting((), Group.SECURITY, "host that images may be "
        "fetched from, as HOST or HOST:PORT; may be repeated; default: none, so that images are "
        "data URLs", NAME, is_daily=True)
    allowed_local_media_path: str | None = setting(None, Group.SECURITY, "directory from which "
        "requests may name images, as file:///DIR/NAME; default: none", FILE)
    media_timeout_s: float = setting(5.0, Group.SECURITY, "time to fetch an image", INTERVAL)
    max_image_bytes: int = setting(8 << 20, Group.SECURITY, "largest image file; --max-body-bytes "
        "bounds it too, unless it is fetched", SIZE)
    limit_mm_per_prompt: str = setting(f"image={_DEFAULT_IMAGES}", Group.SECURITY, "images that a "
        "prompt may have, with those of its conversation", IMAGES)
    # Without one: `context_limits.default_prompt_bytes`.
    max_prompt_bytes: int | None = setting(None, Group.SECURITY, "largest prompt text to tokenise "
        "where context and tokenizer set no limit (tokenizers that shorten text, /tokenize, "
        "truncate_prompt_tokens); default: 16 bytes per token of context, at least 1M", SIZE)

    # -- model
    tool_call_parser: str | None = setting(None, Group.MODEL, "how the model writes tool calls, by "
        "vLLM's names (hermes, llama3_json, mistral, …) or none; default: as its chat template "
        "shows", spellings=_TOOL_SPELLINGS, is_daily=True)
    reasoning_parser: str | None = setting(None, Group.MODEL, "how it writes thoughts (qwen3, "
        "deepseek_r1, …) or none; default: as its chat template shows",
        spellings=_REASONING_SPELLINGS, is_daily=True)
    reasoning_budget_message: str | None = setting(None, Group.MODEL, "text before the end of a "
        "thought that has used up its budget; default: what the model's family has learnt")
    default_chat_template_kwargs: str | None = setting(None, Group.MODEL, "variables of the chat "
        'template where a request has none, such as {"enable_thinking": false}', JSON,
        is_daily=True)
    drop_billing_line: bool = setting(True, Group.MODEL, "leave out the line that Claude Code "
        "begins its system prompt with: it changes with each request, so that nothing would be "
        "found in the cache")
    explain_cache: bool = setting(True, Group.MODEL, "say of requests with a predecessor why more "
        "of the prompt was not found in the cache (penstock.cache); keeps hashes of prompts")
    max_logprobs: int = setting(-1, Group.MODEL, "alternatives that a request may ask for beside "
        "each token; -1: as many as the API allows", LOGPROBS)
    enable_lora: bool = same_as(LoraConfig, "enable_lora")
    max_lora_rank: int = same_as(LoraConfig, "max_lora_rank")

    # -- scheduling
    max_queue_requests: int = setting(4096, Group.SCHEDULING, "requests that may wait; further "
        "ones get 503", COUNT, aliases=("--max-num-queued-reqs",), is_daily=True)
    max_queue_tokens: int = setting(16 << 20, Group.SCHEDULING, "prompt tokens that may wait",
        COUNT, aliases=("--max-num-queued-tokens",))
    request_deadline_ms: float | None = setting(None, Group.SCHEDULING, "refuse a request whose "
        "first token is predicted later than this; a request's header x-request-deadline-ms "
        "overrides it", MILLISECONDS)

    # -- several engines
    routing: Routing = setting("prefix", Group.ENGINES, "which engine gets a request. prefix: the "
        "one that has most of the prompt cached, less what it has to compute", one_of(Routing))
    kv_transfer: KVTransfer = setting("auto", Group.ENGINES, "whether streams that leave an engine "
        "take their KV along to the next one. auto: where that is quicker than to compute it, by "
        "the measured rates of both", one_of(KVTransfer))
    remote_engines: tuple[str, ...] = setting((), Group.ENGINES, "an engine on another machine "
        "(penstock engine); a name with several addresses stands for as many; may be repeated",
        ENDPOINT, name="engine", needs=(MUTUAL_TLS,), is_daily=True)
    discover: bool = setting(False, Group.ENGINES, "use all engines that have registered for this "
        "model in Redis (penstock engine --redis-url)",
        needs=(Need(("redis_url",), "engines register in Redis"), MUTUAL_TLS), is_daily=True)
    tls_server_name: str | None = setting(None, Group.ENGINES, "the name in the engines' "
        "certificates; default: the host of their address", NAME)
    engine_wait_s: float = setting(60.0, Group.ENGINES, "how long open streams and stored "
        "responses wait for an engine while there is none", SECONDS)

    # -- sessions
    data_dir: str | None = setting(None, Group.SESSIONS, "folder in which chats are kept, without "
        "Redis; none: they are kept in memory, until the server stops; default: penstock in "
        "$XDG_DATA_HOME or ~/.local/share", FILE, is_daily=True, in_code="none")
    session_ttl_s: float = setting(30 * 86400.0, Group.SESSIONS, "how long an untouched "
        "conversation is kept in memory or in Redis; on disk it does not expire", INTERVAL)
    disconnect_grace_s: float = setting(60.0, Group.SESSIONS, "how long a stored response "
        "continues without a reader", SECONDS, is_daily=True)
    response_log_ttl_s: float = setting(3600.0, Group.SESSIONS, "how long an ended response can be "
        "resumed", SECONDS)
    session_store_bytes: int | None = setting(None, Group.SESSIONS, "room for conversations, "
        "without Redis; the oldest by use are dropped for new ones; default: 4G on disk, 256M in "
        "memory", SIZE)
    response_log_bytes: int = setting(256 << 20, Group.SESSIONS, "room for logs of ended "
        "responses, without Redis", SIZE)
    tenant_store_bytes: int | None = setting(None, Group.SESSIONS, "how much one tenant may store, "
        "conversations and logs of responses together; beyond it, its own oldest are dropped. The "
        "key file's store_bytes comes first; default: no bound of its own", SIZE)
    tenant_store_objects: int | None = setting(None, Group.SESSIONS, "the same as a number of "
        "conversations and logs; store_objects in the key file", COUNT)
    session_retention_s: float = setting(600.0, Group.SESSIONS, "how long the KV of a stored "
        "response is kept in preference to other cached KV; 0: not at all", SECONDS)
    usage_days: int = setting(400, Group.SESSIONS, "how many days of each API key's usage are kept "
        "(GET /v1/usage)", COUNT)

    # -- Redis
    session_storage: SessionStorage = setting("required", Group.REDIS, "while Redis is down, "
        "required: refuse new sessions; optional: run them without storage",
        one_of(SessionStorage), is_daily=True)
    redis_patience_ms: float = setting(250.0, Group.REDIS, "how long an event of a stored response "
        "waits for Redis (longer if Redis is distant); then it is sent, and the response cannot be "
        "resumed", POSITIVE_MILLISECONDS)

    # -- logging
    otlp_endpoint: str | None = setting(None, Group.LOGGING, "OpenTelemetry collector for traces, "
        "as http://localhost:4318", URL, aliases=("--otlp-traces-endpoint",), is_daily=True)
    # fmt: on

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GatewayConfig:
        """From settings by key and what the supervisor adds; those of other parts are ignored."""
        others = {name: settings[name] for name in others_of(cls) if name in settings}
        if others.get("engine_addresses") is not None:
            others["engine_addresses"] = tuple(others["engine_addresses"])
        return cls.of(settings, **{**others, "model": ModelConfig(**settings["model"])})

    @property
    def tls_files(self) -> TlsFiles | None:
        """For engines on other machines."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def max_images(self) -> int:
        """The largest number of images of a prompt."""
        return _images(self.limit_mm_per_prompt) or 0

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in the API, the preferred one first."""
        return tuple(name for name in self.served_model_names if name != ANY_NAME) or (
            self.model.model,
        )

    @property
    def takes_any_name(self) -> bool:
        """Whether requests may call the model whatever they like."""
        return ANY_NAME in self.served_model_names

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Variables of the chat template where a request has none."""
        found: dict[str, Any] = json.loads(self.default_chat_template_kwargs or "{}")
        return found

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or is_loopback(self.host)


def is_loopback(address: str) -> bool:
    """Whether an IP address reaches this machine only; False for a name."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def pool_name(settings: Mapping[str, Any]) -> str:
    """Under which engines of these options register, and gateways find them."""
    names = [name for name in settings["served_model_name"] if name != ANY_NAME]
    return str((names or [settings["model"]])[0])


def is_any(address: str) -> bool:
    """Whether a socket bound to this IP address is reached at all of the machine's."""
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False
