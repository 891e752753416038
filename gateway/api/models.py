"""`GET /v1/models` and `GET /v1/models/{id}`: the model's names, and its adapters.

Requests with Anthropic's `anthropic-version` get them in the form of its API.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.anthropic.models import model_object, model_page
from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.generation.served_model import ServedModel


class Models:
    """The endpoints."""

    def __init__(self, engine: EnginePool, model: ServedModel, adapters: AdapterRegistry) -> None:
        self._engine = engine
        self._model = model
        self._adapters = adapters
        self._created = int(time.time())

    @operation(
        "GET /v1/models",
        "List the model's names.",
        "Models",
        links={"model": "$response.body#/data/0/id"},
    )
    async def list(self, request: Request) -> Response:
        names = (*self._model.names, *self._adapters.of(caller_of(request.scope)))
        cards = [self._card(name, request) for name in names]
        if _is_anthropic(request):
            return json_response(model_page(cards, request.query_params))
        return json_response({"object": "list", "data": cards})

    @operation("GET /v1/models/{model:path}", "Retrieve the model.", "Model")
    async def retrieve(self, request: Request) -> Response:
        name = request.path_params["model"]
        name = await self._adapters.require(name, caller_of(request.scope))
        return json_response(self._card(name, request))

    def _card(self, name: str, request: Request) -> dict[str, Any]:
        info = self._engine.info_for_running()
        if _is_anthropic(request):
            max_model_len = info.max_model_len
            return model_object(name, created=self._created, max_model_len=max_model_len)
        is_adapter = self._adapters.known(name) is not None
        parent = {"parent": self._model.name} if is_adapter else {}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "penstock",
            "root": self._model.name,
            "max_model_len": info.max_model_len,
            "input_modalities": ["text"] if self._model.images is None else ["text", "image"],
            "quantization": info.quantization,
            "weight_bytes": info.weight_bytes,
            "chat_sampling": self._model.chat_sampling,
            **parent,
        }


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers
