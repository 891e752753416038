"""`GET /openapi.json`: what can be asked here, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.endpoints.http import json_response


class Description:
    """The endpoint."""

    def __init__(self, model_names: Sequence[str]) -> None:
        self._model_names = model_names

    async def read(self, _: Request) -> Response:
        # Few ever ask, and it takes memory.
        from penstock.gateway.openapi import document

        return json_response(document(self._model_names))
