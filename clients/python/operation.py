"""One definition of an operation for both clients.

    class Models(Resource[R]):
        @operation
        def list(self) -> Steps[ModelList]: ...

    Client().models.list()              # → ModelList
    await AsyncClient().models.list()   # → ModelList

The operation is a generator of steps (`steps`); the resource's runner drives it, and type checkers
know both results.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from .steps import Steps, T

P = ParamSpec("P")


class Runner(Protocol):
    """Drives steps to their result, or returns a coroutine that does."""

    def run(self, steps: Steps[Any]) -> Any: ...

    def new_lock(self) -> Any: ...


class SyncRunner(Protocol):
    """Drives steps while the caller waits."""

    def run(self, steps: Steps[T]) -> T: ...

    def new_lock(self) -> Any: ...


class AsyncRunner(Protocol):
    """Drives steps in the caller's task."""

    def run(self, steps: Steps[T]) -> Coroutine[Any, Any, T]: ...

    def new_lock(self) -> Any: ...


R = TypeVar("R", bound=Runner)


class Resource(Generic[R]):
    """A group of operations. Its runner decides between sync and async."""

    def __init__(self, runner: R) -> None:
        self._runner = runner


class operation(Generic[P, T]):  # noqa: N801 (a decorator)
    """Turns a method that returns steps into one that returns their result."""

    def __init__(self, function: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self.steps = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, owner: Resource[SyncRunner], kind: object = None) -> Callable[P, T]: ...

    @overload
    def __get__(
        self, owner: Resource[AsyncRunner], kind: object = None
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, owner: Resource[Any], kind: object = None) -> Callable[P, Any]:
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return owner._runner.run(self.steps(owner, *args, **kwargs))

        return call
