"""The sums of usage in Redis, shared by all gateways. They are in one slot, so that one script
changes them.

penstock:{usage}:day:<number>    a hash: tenant, key and name of a count, by lines → its sum
penstock:{usage}:of:<id>         what was recorded of a request: see `usage.lua`
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from penstock.gateway.storage.redis.link import RedisLink, Script
from penstock.gateway.storage.usage.ledger import Counts, KeyUsage, UsageRecord

_PUT = Script(files("penstock.gateway.storage.usage").joinpath("usage.lua").read_text("utf-8"))
_READ = Script(
    "local found = {} "
    "for number, key in ipairs(KEYS) do found[number] = redis.call('HGETALL', key) end "
    "return found"
)
_NAMES = Counts.__struct_fields__
_TOLD_MS = 86_400_000  # for which it is known that a response was recorded
_REPEAT_MS = 600_000  # the same of a request that only its gateway records, perhaps again


class RedisUsage:
    """A `UsageStore`.

    Args:
        num_days: for which sums are kept.
    """

    def __init__(self, link: RedisLink, *, num_days: int) -> None:
        self._link = link
        self._keep_ms = (num_days + 1) * 86_400_000

    async def put(self, records: Sequence[UsageRecord]) -> None:
        keys: list[str] = []
        args: list[str | int] = [self._keep_ms, " ".join(_NAMES)]
        for record in records:
            keys += (f"penstock:{{usage}}:of:{record.id}", _day_key(record.day))
            ttl_ms = _TOLD_MS if record.may_move else _REPEAT_MS
            owner = f"{record.tenant}\n{record.key_id}"
            args += (record.epoch, ttl_ms, owner, *record.counts.numbers)
        await self._link.run(_PUT, keys, args)

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        days = range(first, last + 1)
        found = await self._link.run(_READ, [_day_key(day) for day in days], ())
        sums: dict[tuple[int, str, str], dict[str, int]] = {}
        for day, fields in zip(days, found, strict=True):
            try:
                for field, number in zip(fields[::2], fields[1::2], strict=True):
                    owner, key_id, name = field.decode().split("\n")
                    if tenant in (None, owner):
                        sums.setdefault((day, owner, key_id), {})[name] = int(number)
            except ValueError as error:
                raise self._link.unreadable(_day_key(day), error) from error
        return [
            KeyUsage(*key, Counts(*(counts.get(name, 0) for name in _NAMES)))
            for key, counts in sorted(sums.items(), key=lambda each: each[0])
        ]


def _day_key(day: int) -> str:
    return f"penstock:{{usage}}:day:{day}"
