"""Settings of one gateway process.

The supervisor sends them as plain JSON; nothing else is read from the environment. Not known
here: the engine's own settings, except which model it runs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway needs to know.

    Attributes:
        engine_address: path of the Unix socket at which the engine listens.
        host: the address the listening socket is bound to; on loopback the Host header is
            checked.
        host_name: what the user called it.
        worker_index: which of the gateway processes on this socket it is, from 0.
        num_workers: how many they are.

        api_keys: any of them opens `/v1/*`; none leaves it open.
        api_keys_file: keys with tenants, weights and limits, read again when it changes.
        allowed_origins: browser origins let in besides the server's own; `*` lets in all.
        ssl_certfile, ssl_keyfile, ssl_keyfile_password: PEM files; with them TLS alone is spoken.
        served_model_names: ids of the model in the API; empty takes the model as the user
            named it.

        trust_request_chat_template: requests may bring a template of their own.
        max_body_bytes: of an HTTP request; a WebSocket message has its own limit.
        max_prompt_bytes: of a prompt's text where the context and the tokenizer set no limit
            before it is tokenised; None: `limits.default_prompt_bytes`.
        max_connections: of this process, TLS handshakes and WebSockets included; those beyond are
            answered 503.
        header_timeout_s: from a connection's begin to the end of its TLS handshake, and from there,
            or from a later request's first byte, to the end of the header.
        body_timeout_s: from there to the end of the body.
        keep_alive_s: of a connection without a request; longer than clients and proxies keep
            theirs, or they send a request on one that is being closed.
        ping_interval_s: silence on an event stream after which a comment is sent; a WebSocket is
            pinged as often.
        stream_interval_ms: the least time between two delta events of a response, whose text in
            between is merged; 0: one per iteration of the engine.

        max_queue_requests: requests waiting in the engine beyond which new ones are refused.
        max_queue_tokens: the same in prompt tokens.
        request_deadline_ms: a request whose first token is predicted later than this is refused;
            None: none is. `x-request-deadline-ms` of a request goes before it.

        redis_url: where state is shared; a secret, as it may hold a password. None: in memory.
        redis_patience_ms: how long an event of a stored response waits for Redis to confirm
            it; then it is shown, and its response cannot be resumed any more.
        session_storage: while Redis is down, `required` refuses new sessions, `optional` runs
            them without storage.
        session_ttl_s: how long an untouched conversation is kept in Redis.
        session_store_bytes: for conversations in memory.
        session_retention_s: how long the KV of a stored response is hinted to be worth keeping;
            0 gives no hint.
        response_log_bytes: for logs of ended responses in memory.
        response_log_ttl_s: how long an ended response can be resumed.
        engine_wait_s: how long streams wait for the return of an engine that died.
        disconnect_grace_s: how long a stored response runs on without a reader.
        shutdown_grace_s: how long streams may go on after SIGTERM.

        otlp_endpoint: where traces go; None: nowhere.
        log_format: `text` or `json`, one object a line.
    """

    engine_address: str
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
    served_model_names: tuple[str, ...] = ()
    trust_request_chat_template: bool = False

    max_body_bytes: int = 4 << 20
    max_prompt_bytes: int | None = None
    max_websocket_message_bytes: int = 1 << 20
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
    session_ttl_s: float = 30 * 86400.0
    session_store_bytes: int = 256 << 20
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
        """Read the flags of `serve` by key; those of other rooms are passed over."""
        values = {name: settings[name] for name in _PLAIN_FIELDS if name in settings}
        return cls(
            **values,
            api_keys=tuple(settings.get("api_key") or ()),
            allowed_origins=tuple(_origin(text) for text in settings.get("allowed_origins") or ()),
            served_model_names=tuple(settings.get("served_model_name") or ()),
            model=ModelConfig(**settings["model"]),
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Ids of the model in the API, the one to show first."""
        return self.served_model_names or (self.model.model,)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or is_loopback(self.host)


def is_loopback(address: str) -> bool:
    """Whether an IP address reaches this machine alone; a name is no address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _origin(text: str) -> str:
    """An origin as browsers write it: `scheme://host[:port]`, lower case, no path.

    Raises:
        ConfigError: it is none.
    """
    if text == "*":
        return text
    try:
        parts = urlsplit(text.strip().lower())
        is_valid = bool(parts.hostname) and parts.path in ("", "/") and not parts.query
    except ValueError:
        is_valid = False
    if not is_valid or not parts.scheme:
        raise ConfigError(f"--allowed-origins: {text!r} is no origin such as https://example.org")
    return f"{parts.scheme}://{parts.netloc}"


_PLAIN_FIELDS = tuple(
    item.name
    for item in fields(GatewayConfig)
    if item.name not in {"api_keys", "allowed_origins", "served_model_names", "model"}
)
