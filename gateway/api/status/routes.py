"""`/health`, `/ping`, `/live`, `/ready`, `/load`, `/metrics`, `/version` and `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway import installed_version
from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation, operations_of
from penstock.gateway.auth.callers import Caller, caller_of
from penstock.gateway.engines.engine_link import EngineLink
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import refusal
from penstock.gateway.telemetry.metrics import CONTENT_TYPE, Metrics


class Status:
    """The endpoints.

    Args:
        kind: of the storage, as `redis`.
        trouble: tells what is wrong with it: a word, and a message; None while nothing is.
    """

    def __init__(
        self,
        engine: EnginePool,
        metrics: Metrics,
        *,
        kind: str,
        trouble: Callable[[], tuple[str, str] | None],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._kind = kind
        self._trouble = trouble

    @operation("GET /health", "Check whether the engine is up.", "Status", needs_key=False)
    async def health(self, _: Request) -> Response:
        """200 once there was an engine, unless it is lost: then `penstock.estimated_wait_ms` says
        when the next is expected, by how long that took before. A server whose disk or Redis is not
        well is healthy, because it serves what needs neither, and so is one with several engines
        of which one is left; the answer names what is wrong.
        """
        if self._engine.info is None:
            state = "the engine died" if self._engine.is_lost else "the engine is starting"
            failure = refusal(503, code="engine_unavailable", message=state)
            if (wait_s := self._engine.back_in_s) is not None:
                failure = replace(failure, details={"estimated_wait_ms": round(wait_s * 1e3)})
            return failure.response()
        if (trouble := self._trouble()) is not None:
            about = dict(zip(("state", "message"), trouble, strict=True))
            return json_response({"status": "degraded", self._kind: about, **self._engines()})
        is_whole = len(self._engine.links) < 2 or all(each.is_usable for each in self._engine.links)
        return json_response({"status": "ok" if is_whole else "degraded", **self._engines()})

    @operation("GET /ping", "The same, as SageMaker asks.", "Status", needs_key=False)
    async def ping(self, request: Request) -> Response:
        return await self.health(request)

    @operation("POST /ping", "The same, as SageMaker asks.", "Status", needs_key=False)
    async def ping_by_post(self, request: Request) -> Response:
        return await self.health(request)

    @operation("GET /load", "The number of requests, as vLLM gives it.", "Load", needs_key=False)
    async def load(self, _: Request) -> Response:
        """What runs and waits in the engines, whichever of the server's gateways has it: as they
        last said, and at least what this gateway knows."""
        num_requests = sum(
            max(
                link.stats.num_requests_running + link.stats.num_requests_waiting,
                link.load.num_streams,
            )
            for link in self._engine.links
        )
        return json_response({"server_load": num_requests})

    def _engines(self) -> dict[str, list[dict[str, Any]]]:
        """What is said of several engines."""
        links = self._engine.links
        return {"engines": [_about(link) for link in links]} if len(links) > 1 else {}

    @operation("GET /live", "Check whether the server runs.", "Status", needs_key=False)
    async def live(self, _: Request) -> Response:
        """200 from the first second on, while the model is loaded and while there is no engine."""
        return json_response({"status": "live"})

    @operation("GET /ready", "Check whether requests would be served.", "Status", needs_key=False)
    async def ready(self, _: Request) -> Response:
        """200 when a request would be served, whichever of the server's gateways gets it."""
        if not (self._engine.is_alive and await self._metrics.have_engine()):
            return refusal(
                503, code="engine_unavailable", message="the engine is not ready yet"
            ).response()
        return json_response({"status": "ready"})

    @operation("GET /metrics", "Metrics for Prometheus.", needs_key=False)
    async def metrics(self, request: Request) -> Response:
        """Tenants' names are not for everybody: without an admin's key there are only totals."""
        text = await self._metrics.render(names_tenants=caller_of(request.scope).is_admin)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @operation(
        "GET /version", "The server's version, as vLLM gives it.", "Version", needs_key=False
    )
    async def version(self, _: Request) -> Response:
        return json_response({"version": installed_version()})


def _about(link: EngineLink) -> dict[str, Any]:
    state = "ready" if link.info is not None else "lost" if link.num_connections else "starting"
    stats = link.stats
    num_queries, num_blocks = stats.prefix_cache_queries_total, stats.num_blocks
    return {
        "name": link.name,
        "state": "draining" if link.is_draining else state,
        "num_requests_running": stats.num_requests_running,
        "num_requests_waiting": stats.num_requests_waiting,
        "num_streams": link.load.num_streams,
        "kv_cache_usage": stats.num_blocks_used / num_blocks if num_blocks else 0.0,
        "prefix_cache_hit_rate": (
            stats.prefix_cache_hits_total / num_queries if num_queries else 0.0
        ),
    }


class Description:
    """`GET /openapi.json`."""

    def __init__(self, model_names: Callable[[Caller], Sequence[str]], root_path: str = "") -> None:
        self._model_names = model_names
        self._root_path = root_path

    @operation("GET /openapi.json", "This document.", "Document", needs_key=False)
    async def read(self, request: Request) -> Response:
        # Loaded on demand: few clients request it, and it takes memory.
        from penstock.gateway.api.openapi import document

        names = self._model_names(caller_of(request.scope))
        operations = operations_of(request.app.routes)
        return json_response(document(names, operations, root_path=self._root_path))
