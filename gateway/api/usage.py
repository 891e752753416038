"""`GET /v1/usage`: what the requests of each API key have used, by day.

A caller is shown its own tenant's keys; an admin all. The answer has the form of OpenAI's
`/v1/organization/usage/completions`, grouped by project and key: a project is a tenant.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.schema.model import invalid
from penstock.gateway.api.shared.items import Query, read_query
from penstock.gateway.api.shared.json_api import json_response
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.storage.usage.ledger import (
    KeyUsage,
    Ledger,
    begin_of,
    day_named,
    name_of,
    today,
)

_DEFAULT_DAYS, _MAX_DAYS = 31, 92  # of an answer


class UsageQuery(Query):
    """Days in UTC, as `YYYY-MM-DD`, both included. Without `end_date` it is today, without
    `start_date` 30 days before the end."""

    start_date: str | None = None
    end_date: str | None = None

    def days(self, now: int) -> tuple[int, int]:
        """The first day and the last.

        Args:
            now: today.

        Raises:
            RequestRefusedError: 400: a date is wrong.
        """
        last = _day("end_date", self.end_date, otherwise=now)
        first = _day("start_date", self.start_date, otherwise=last - _DEFAULT_DAYS + 1)
        if first > last:
            raise invalid("start_date", f"must not be after end_date, {name_of(last)}")
        if last - first >= _MAX_DAYS:
            raise invalid(
                "start_date", f"must be at most {_MAX_DAYS - 1} days before end_date: ask in parts"
            )
        return first, last


class Usage:
    """The endpoint.

    Args:
        max_days: for which `ledger` keeps sums.
    """

    def __init__(self, ledger: Ledger, *, max_days: int) -> None:
        self._ledger = ledger
        self._max_days = max_days

    @operation(
        "GET /v1/usage",
        "Tell what each API key has used, by day.",
        "UsageByDay",
        query=UsageQuery,
    )
    async def read(self, request: Request) -> Response:
        """The sums of the usage that each request's answer told. A bucket for each day that is
        kept, the oldest first; empty if nothing was used."""
        caller, now = caller_of(request.scope), today()
        first, last = read_query(UsageQuery, request.query_params).days(now)
        first, last = max(first, now - self._max_days + 1), min(last, now)
        used = await self._ledger.days(
            first, last, tenant=None if caller.is_admin else caller.tenant
        )
        by_day: dict[int, list[dict[str, Any]]] = {day: [] for day in range(first, last + 1)}
        for each in used:
            by_day[each.day].append(_result(each))
        buckets = [
            {
                "object": "bucket",
                "date": name_of(day),
                "start_time": begin_of(day),
                "end_time": begin_of(day + 1),
                "results": results,
            }
            for day, results in by_day.items()
        ]
        page = {"object": "page", "data": buckets, "has_more": False, "next_page": None}
        return json_response(page)


def _day(param: str, text: str | None, *, otherwise: int) -> int:
    if text is None:
        return otherwise
    try:
        return day_named(text)
    except ValueError:
        raise invalid(param, "must be a day as YYYY-MM-DD") from None


def _result(used: KeyUsage) -> dict[str, Any]:
    counts = used.counts
    return {
        "object": "organization.usage.completions.result",
        "project_id": used.tenant,
        "api_key_id": used.key_id,
        "num_model_requests": counts.num_requests,
        "input_tokens": counts.prompt_tokens,
        "input_cached_tokens": counts.cached_tokens,
        "input_uncached_tokens": counts.prompt_tokens - counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "penstock": counts.beyond_openai,
    }
