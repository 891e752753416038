"""Endpoints are declared where they are written: `operation` says of a handler all that routing,
the guard and the OpenAPI document need to know.

    class Models:
        @operation("GET /v1/models", "List the model's names.", "Models")
        async def list(self, request: Request) -> Response: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.routing import BaseRoute, Mount, Route

from penstock.gateway.api.schema.model import Model

_ATTRIBUTE = "operation"
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        path: as Starlette writes it.
        answer: name of the schema of a 200 (`openapi.ANSWERS`); empty: plain text.
        body: schemas of the request body, of which one applies.
        query: schema of the query string.
        statuses: failures beside those that every operation has, and 404 where the path has
            parameters.
        failure: name of the schema of its failures.
        streams: whether it may answer with server-sent events.
        example: an example of a body.
        links: parameters of other operations' paths → where its answer has them (OpenAPI's links).
        next_bodies: other operations → a body that continues from this one's answer.
        needs_key: whether the caller needs an API key, if the server has any.
    """

    method: str
    path: str
    summary: str
    answer: str = ""
    body: tuple[type[Model], ...] = ()
    query: type[Model] | None = None
    statuses: tuple[int, ...] = ()
    failure: str = "Error"
    streams: bool = False
    example: Mapping[str, Any] | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    next_bodies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs_key: bool = True


def operation(
    route: str, summary: str, answer: str = "", **more: Any
) -> Callable[[_Handler], _Handler]:
    """Declares that a method of a class serves an operation.

    Args:
        route: its method and path.
        more: further fields of `Operation`.
    """
    method, path = route.split()
    declared = Operation(method=method, path=path, summary=summary, answer=answer, **more)

    def declare(handler: _Handler) -> _Handler:
        setattr(handler, _ATTRIBUTE, declared)
        return handler

    return declare


def routes_of(apis: Iterable[object], *, mount: str) -> tuple[list[Route], list[Route]]:
    """The routes of all operations that the classes of these objects declare: those below a mount,
    relative to it, and the others."""
    handlers = [
        getattr(api, name)
        for api in apis
        for name, member in vars(type(api)).items()
        if hasattr(member, _ATTRIBUTE)
    ]
    below: list[Route] = []
    others: list[Route] = []
    for handler in handlers:
        declared: Operation = getattr(handler, _ATTRIBUTE)
        is_below = declared.path.startswith(f"{mount}/")
        path = declared.path.removeprefix(mount) if is_below else declared.path
        (below if is_below else others).append(Route(path, handler, methods=[declared.method]))
    return below, others


def operations_of(routes: Iterable[BaseRoute]) -> Iterator[Operation]:
    """The operations that routes serve."""
    for route in routes:
        if isinstance(route, Mount):
            yield from operations_of(route.routes)
        elif isinstance(route, Route) and hasattr(route.endpoint, _ATTRIBUTE):
            yield getattr(route.endpoint, _ATTRIBUTE)
