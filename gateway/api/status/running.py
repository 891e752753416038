"""`/v1/requests`: what this gateway has in the engine now, and ending one of them.

A caller is shown its own tenant's; an admin all, and ending another tenant's leaves a line in the
audit log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import Caller, audited, caller_of
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.generation import Generation


class RunningRequests:
    """The endpoints.

    Args:
        generations: all that were made and may still run.
        cancel: stops the response of an id; False: the id is no response's.
    """

    def __init__(self, generations: Iterable[Generation], *, cancel: Callable[[str], bool]) -> None:
        self._generations = generations
        self._cancel = cancel

    @operation("GET /v1/requests", "List the requests that run or wait.", "RunningRequests")
    async def list(self, request: Request) -> Response:
        """Those of the gateway process that answers, the oldest first."""
        found = sorted(self._of(caller_of(request.scope)), key=lambda each: each.began_at)
        return json_response({"object": "list", "data": [_about(each) for each in found]})

    @operation(
        "POST /v1/requests/{request_id}/cancel",
        "End a request that runs or waits.",
        "RunningRequest",
    )
    async def cancel(self, request: Request) -> Response:
        """Its caller gets the output so far, as of one that it has ended itself."""
        request_id = request.path_params["request_id"]
        caller = caller_of(request.scope)
        for each in self._of(caller):
            if each.request.request_id == request_id:
                about = _about(each)
                with ExitStack() as stack:
                    if about["tenant"] != caller.tenant:
                        what = stack.enter_context(audited(request.scope, "cancel_request"))
                        what.update(cancelled_id=request_id, cancelled_tenant=about["tenant"])
                    if not self._cancel(request_id):
                        each.cancel()
                return json_response(about)
        raise RequestRefusedError(
            f"no request {request_id!r} runs here", code="request_not_found", status=404
        )

    def _of(self, caller: Caller) -> Iterable[Generation]:
        for each in [*self._generations]:
            if each.is_open and (caller.is_admin or each.request.tenant == caller.tenant):
                yield each


def _about(generation: Generation) -> dict[str, Any]:
    request = generation.request
    return {
        "id": request.request_id,
        "object": "penstock.request",
        "created_at": int(generation.began_at),
        "tenant": request.tenant,
        "status": "running" if generation.has_begun else "waiting",
        "prompt_tokens": len(request.prompt_token_ids),
        "output_tokens": sum(len(branch.token_ids) for branch in generation.branches),
    }
