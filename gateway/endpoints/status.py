"""How the server is: `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.endpoints.http import json_response
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.errors import refusal
from penstock.gateway.metrics import CONTENT_TYPE, Metrics


class Status:
    """The endpoints."""

    def __init__(self, engine: EngineClient, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def health(self, _: Request) -> Response:
        """200 unless an engine was lost: a server that still starts up is not ill."""
        if self._engine.is_lost:
            return refusal(503, code="engine_unavailable", message="the engine died").response()
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 when a request would be served."""
        if not self._engine.is_alive:
            return refusal(
                503, code="engine_unavailable", message="no engine answers yet"
            ).response()
        return json_response({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        return Response(await self._metrics.render(), headers={"content-type": CONTENT_TYPE})
