"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.json_api import json_response
from penstock.gateway.api.operations import operation
from penstock.gateway.engines.engine_client import EngineClient
from penstock.gateway.generation.served_model import ServedModel


class Models:
    """The endpoints."""

    def __init__(self, engine: EngineClient, model: ServedModel) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())

    @operation(
        "GET /v1/models",
        "List the model's names.",
        "Models",
        links={"model": "$response.body#/data/0/id"},
    )
    async def list(self, _: Request) -> Response:
        return json_response(
            {"object": "list", "data": [self._card(name) for name in self._model.names]}
        )

    @operation("GET /v1/models/{model:path}", "Retrieve the model.", "Model")
    async def retrieve(self, request: Request) -> Response:
        return json_response(self._card(self._model.require(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._engine.info_for_running()
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "root": self._model.name,
            "max_model_len": info.max_model_len,
            "quantization": info.quantization,
            "weight_bytes": info.weight_bytes,
        }
