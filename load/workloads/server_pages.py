"""What a server says of itself besides streams: the model it serves, and its metrics.

Knows where the pages are; not what the metrics mean.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.address import Address

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerPages:
    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def first_model(self) -> str:
        """The name of the first model it lists.

        Raises:
            ConfigError: it cannot be reached, or lists none.
        """
        try:
            status, body = self._get("/v1/models")
        except OSError as error:
            raise ConfigError(f"no server at {self.base_url}: {error}") from error
        try:
            return str(orjson.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self.base_url}/v1/models names no model (status {status}): say --model"
            ) from error

    def metrics(self) -> str | None:
        """The Prometheus text; None where there is none."""
        try:
            status, body = self._get("/metrics")
        except (OSError, http.client.HTTPException):
            return None
        return body.decode(errors="replace") if status == 200 else None

    @asynccontextmanager
    async def watched(self, *, every_s: float) -> AsyncIterator[list[str]]:
        """The metrics before, every so often during, and after the block; empty without any.

        They are fetched in a thread, and only kept here: reading them would disturb the run.
        """
        texts: list[str] = []
        before = await asyncio.to_thread(self.metrics)
        if before is None:
            yield texts
            return
        texts.append(before)
        watch = asyncio.create_task(self._watch(texts, every_s))
        try:
            yield texts
        finally:
            watch.cancel()
        after = await asyncio.to_thread(self.metrics)
        if after is not None:
            texts.append(after)

    async def _watch(self, texts: list[str], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            text = await asyncio.to_thread(self.metrics)
            if text is not None:
                texts.append(text)

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body; by no proxy, whatever the environment says."""
        address = Address.parse(self.base_url)
        kind = http.client.HTTPSConnection if address.is_tls else http.client.HTTPConnection
        connection = kind(address.host, address.port, timeout=_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            connection.request("GET", address.prefix + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
