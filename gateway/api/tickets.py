"""`POST /v1/tickets`: a ticket that opens one WebSocket."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.auth.tickets import TICKET_TTL_S, Tickets


class TicketRoutes:
    """The endpoint. Every authenticated caller may create a ticket; the request needs no body."""

    def __init__(self, tickets: Tickets) -> None:
        self._tickets = tickets

    @operation("POST /v1/tickets", "Create a ticket that opens one WebSocket.", "Ticket")
    async def create(self, request: Request) -> Response:
        ticket = await self._tickets.issue(caller_of(request.scope).key_id)
        response = json_response({"ticket": ticket, "expires_in": TICKET_TTL_S})
        response.headers["Cache-Control"] = "no-store"
        return response
