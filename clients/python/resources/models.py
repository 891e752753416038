"""`/v1/models`."""

from __future__ import annotations

from typing import Generic

from ..objects import Model, ModelList
from ..operation import R, Resource, operation
from ..server import Server
from ..steps import Steps


class Models(Resource[R], Generic[R]):
    """The models that the server offers."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server

    @operation
    def list(self) -> Steps[ModelList]:
        answer: ModelList = yield from self._server.call(self._server.request("GET", "/models"))
        return answer

    @operation
    def retrieve(self, model: str) -> Steps[Model]:
        answer: Model = yield from self._server.call(
            self._server.request("GET", f"/models/{model}")
        )
        return answer
