"""Settings of one gateway process.

The supervisor sends them as plain JSON. Of the engine's settings they hold only the model's.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from penstock.engine.config import ModelConfig, TlsFiles
from penstock.engine.errors import ConfigError

Routing = Literal["prefix", "least-loaded", "round-robin"]
KVTransfer = Literal["auto", "always", "never"]
ANY_NAME = "*"
_MAX_IMAGES, _DEFAULT_IMAGES = 256, 16  # of a prompt
_OTHER_MODALITIES = {"video", "audio"}  # of which there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway needs to know.

    Attributes:
        engine_address: path of the Unix socket at which the engine listens; in the server's own
            folder, and the same for all its gateways.
        engine_addresses: the same for several engines, which may be none; None: only that one.
        remote_engines: HOST:PORT of engines on other machines. A name may stand for several.
        discover: use engines that have registered in Redis for this model.
        tls_cert, tls_key, tls_ca: PEM files for engines on other machines.
        tls_server_name: what their certificates must name; None: the host of their address.
        routing: which engine gets a request.
        kv_transfer: whether the KV of streams that leave an engine is transferred.
        host: the address the listening socket is bound to; on loopback the Host header is
            checked.
        host_name: the same as the user wrote it.
        worker_index: number of this gateway process among those on the socket, from 0.
        num_workers: how many there are.

        api_keys: any of them opens `/v1/*`; none leaves it open.
        api_keys_file: keys with tenants, weights and limits; reread when it changes.
        allowed_origins: browser origins to accept besides the server's own; `*` accepts all.
        ssl_certfile, ssl_keyfile, ssl_keyfile_password: PEM files; with them only TLS is served.
        root_path: under which a proxy offers the server; requests may have it or not.
        served_model_names: names of the model in the API, of which `*` is any; without others: as
            the user named the model.

        enable_lora: the engine takes adapters.
        max_lora_rank: the largest rank of one.
        trust_request_chat_template: requests may bring their own template.
        tool_call_parser, reasoning_parser: formats of tool calls and thoughts; None: as the chat
            template shows; `none`: they stay text.
        default_chat_template_kwargs: a JSON object: variables of the template where a request has
            none.
        drop_billing_line: leave out the line that Claude Code begins its system prompt with.
        max_logprobs: alternatives that a request may ask for beside each token; -1: no limit but
            the API's.
        max_body_bytes: of an HTTP request; a WebSocket message has its own limit.
        max_prompt_bytes: largest prompt text to tokenise where context and tokenizer set no
            limit; None: `context_limits.default_prompt_bytes`.
        limit_mm_per_prompt: `image=N`: images that a prompt may have.
        max_image_bytes: of an image's file.
        allowed_media_domains: hosts that images may be fetched from, as `host` or `host:port`.
        allowed_local_media_path: directory of images that requests may name; None: none.
        media_timeout_s: for fetching one.
        max_connections: of this process, with TLS handshakes and WebSockets; further ones get 503.
        header_timeout_s: from a connection's start to the end of its TLS handshake, and from
            there, or from a later request's first byte, to the end of the header.
        body_timeout_s: from the end of the header to the end of the body.
        keep_alive_s: of an idle connection; longer than clients and proxies keep theirs, as they
            would otherwise send a request on a connection that is being closed.
        ping_interval_s: silence on an event stream after which a comment is sent; WebSockets are
            pinged as often.
        stream_interval_ms: least time between two delta events of a response; text in between is
            merged; 0: an event per engine step.

        max_queue_requests: waiting requests beyond which new ones are refused.
        max_queue_tokens: the same in prompt tokens.
        request_deadline_ms: refuse a request whose first token is predicted later than this;
            None: no limit. A request's `x-request-deadline-ms` overrides it.

        redis_url: where state is shared; secret, as it may hold a password. None: in memory.
        redis_patience_ms: how long an event of a stored response waits for Redis to confirm it;
            then it is sent, and the response can no longer be resumed.
        session_storage: while Redis is down, `required` refuses new sessions, `optional` runs
            them without storage.
        data_dir: the folder in which chats are kept on disk, without Redis and with one gateway;
            `none`: in memory; None: the user's own folder, or memory where that cannot be used.
        session_ttl_s: how long memory and Redis keep an untouched conversation.
        session_store_bytes: for conversations on disk or in memory; None: 4 GiB or 256 MiB.
        tenant_store_bytes: of a tenant's conversations and logs together, in memory or in Redis;
            None: no bound of its own. The key file overrides it.
        tenant_store_objects: the same in conversations and logs.
        session_retention_s: how long the engine is told to prefer the KV of a stored response;
            0: not at all.
        response_log_bytes: for logs of ended responses in memory.
        response_log_ttl_s: how long an ended response can be resumed.
        engine_wait_s: how long streams wait for a dead engine to return.
        disconnect_grace_s: how long a stored response continues without a reader.
        shutdown_grace_s: how long streams may continue after SIGTERM.

        otlp_endpoint: where traces go; None: nowhere.
        log_format: `text`, or `json`: one object per line.
    """

    engine_address: str
    engine_addresses: tuple[str, ...] | None = None
    remote_engines: tuple[str, ...] = ()
    discover: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tls_server_name: str | None = None
    routing: Routing = "prefix"
    kv_transfer: KVTransfer = "auto"
    host: str = "127.0.0.1"
    host_name: str = "localhost"
    worker_index: int = 0
    num_workers: int = 1

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    root_path: str | None = None
    served_model_names: tuple[str, ...] = ()
    enable_lora: bool = False
    max_lora_rank: int = 16
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_chat_template_kwargs: str | None = None
    drop_billing_line: bool = True
    max_logprobs: int = -1

    max_body_bytes: int = 4 << 20
    max_prompt_bytes: int | None = None
    max_websocket_message_bytes: int = 1 << 20
    limit_mm_per_prompt: str = f"image={_DEFAULT_IMAGES}"
    max_image_bytes: int = 8 << 20
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    media_timeout_s: float = 5.0
    max_connections: int = 10_000
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    ping_interval_s: float = 15.0
    stream_interval_ms: float = 0.0

    max_queue_requests: int = 4096
    max_queue_tokens: int = 16 << 20
    request_deadline_ms: float | None = None

    redis_url: str | None = field(default=None, repr=False)
    redis_patience_ms: float = 250.0
    session_storage: str = "required"
    data_dir: str | None = "none"
    session_ttl_s: float = 30 * 86400.0
    session_store_bytes: int | None = None
    tenant_store_bytes: int | None = None
    tenant_store_objects: int | None = None
    session_retention_s: float = 600.0
    response_log_bytes: int = 256 << 20
    response_log_ttl_s: float = 3600.0
    engine_wait_s: float = 60.0
    disconnect_grace_s: float = 60.0
    shutdown_grace_s: float = 30.0

    otlp_endpoint: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    model: ModelConfig = field(default_factory=ModelConfig)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GatewayConfig:
        """Read the options of `serve` by key; those of other parts are ignored."""
        values = {name: settings[name] for name in _PLAIN_FIELDS if name in settings}
        addresses = settings.get("engine_addresses")
        return cls(
            **values,
            engine_addresses=None if addresses is None else tuple(addresses),
            remote_engines=tuple(settings.get("engine") or ()),
            api_keys=tuple(settings.get("api_key") or ()),
            allowed_origins=tuple(_origin(text) for text in settings.get("allowed_origins") or ()),
            served_model_names=tuple(settings.get("served_model_name") or ()),
            allowed_media_domains=tuple(settings.get("allowed_media_domains") or ()),
            model=ModelConfig(**settings["model"]),
        )

    @property
    def tls_files(self) -> TlsFiles | None:
        """For engines on other machines."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def max_images(self) -> int:
        """The largest number of images of a prompt.

        Raises:
            ConfigError: the setting does not say.
        """
        limits = _limits(self.limit_mm_per_prompt)
        number = limits.pop("image", _DEFAULT_IMAGES)
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= _MAX_IMAGES or limits.keys() - _OTHER_MODALITIES:
            raise ConfigError(
                f"--limit-mm-per-prompt must be image=N with N from 0 to {_MAX_IMAGES}, not "
                f"{self.limit_mm_per_prompt!r}"
            )
        return int(number)

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


def _limits(text: str) -> dict[str, Any]:
    """From `image=2,video=0` or, as vLLM also has it, JSON such as `{"image": {"count": 2}}`."""
    if text.lstrip().startswith("{"):
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            return {text: None}
    else:
        pairs = [each.partition("=") for each in "".join(text.split()).split(",")]
        found = {name: int(number) if number.isdecimal() else None for name, _, number in pairs}
    return {
        name: each.get("count", _DEFAULT_IMAGES) if isinstance(each, dict) else each
        for name, each in found.items()
    }


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


def _origin(text: str) -> str:
    """An origin as browsers write it: `scheme://host[:port]`, lower case, no path.

    Raises:
        ConfigError: it is not an origin.
    """
    if text == "*":
        return text
    try:
        parts = urlsplit(text.strip().lower())
        is_valid = bool(parts.hostname) and parts.path in ("", "/") and not parts.query
    except ValueError:
        is_valid = False
    if not is_valid or not parts.scheme:
        raise ConfigError(
            f"--allowed-origins must be an origin such as https://example.org, not {text!r}"
        )
    return f"{parts.scheme}://{parts.netloc}"


_READ_APART = {
    "api_keys", "allowed_origins", "served_model_names", "model", "engine_addresses",
    "remote_engines", "allowed_media_domains",
}  # fmt: skip
_PLAIN_FIELDS = tuple(item.name for item in fields(GatewayConfig) if item.name not in _READ_APART)
