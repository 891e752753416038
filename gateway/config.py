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
        engine_address: ZeroMQ endpoint that the engine binds.
        host: the address the listening socket is bound to; on loopback the Host header is
            checked.
        host_name: what the user called it.
        api_keys: any of them opens `/v1/*`; none leaves it open.
        allowed_origins: browser origins let in besides the server's own; `*` lets in all.
        served_model_names: ids of the model in the API; empty takes the model as the user
            named it.
        max_body_bytes: of an HTTP request; a WebSocket message has its own limit.
        session_retention_s: how long the KV of a stored response is hinted to be worth keeping;
            0 gives no hint.
        sse_ping_s: silence on an event stream after which a comment is sent.
        shutdown_grace_s: how long streams may go on after SIGTERM.
    """

    engine_address: str
    host: str = "127.0.0.1"
    host_name: str = "localhost"
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    max_body_bytes: int = 4 << 20
    max_websocket_message_bytes: int = 1 << 20
    session_store_bytes: int = 256 << 20
    session_retention_s: float = 600.0
    sse_ping_s: float = 15.0
    shutdown_grace_s: float = 5.0
    log_level: str = "info"
    log_format: str = "%(asctime)s %(levelname)s %(name)s: %(message)s"
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
