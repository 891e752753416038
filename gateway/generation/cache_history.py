"""Why a prompt was not found in the KV cache, compared with the prompt of an earlier request.

    ChatPrompt ──► PromptShape (hashes of its parts) ─┐
    token ids  ──► hashes of their blocks ────────────┴─► Entry, kept by request id
    Entry of the predecessor + Entry + cached tokens ──► CacheReport

Only hashes are kept, keyed anew in each process, in memory, up to a bound for each tenant and for
all. Nobody finds another tenant's. They are kept by each gateway for the requests that it served.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import orjson

from penstock.engine.request import Request

REASONS = (
    "hit", "adapter", "template", "tools", "parameter", "system", "date", "messages", "evicted",
    "other_engine", "too_short", "not_found", "unavailable",
)  # fmt: skip
_MAX_BYTES, _MAX_TENANT_BYTES = 32 << 20, 8 << 20
_ENTRY_BYTES, _MESSAGE_BYTES = 1500, 300  # without blocks; of a message: about what they take
_SYSTEM = ("system", "developer")
NOTHING_DROPPED: Mapping[str, int] = MappingProxyType({})
_HEAD_CHARS = 1024  # of a rendering, where templates write the date
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = re.compile(
    r"\b(?:\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\d{1,2}:\d{2}(?::\d{2})?(?:\s?[AaPp][Mm])?"
    r"|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    rf"|{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
    rf"|\d{{1,2}}\.?\s+{_MONTH}(?:\s+\d{{4}})?)\b"
)


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Hashes of what a conversation's prompt was made of.

    Attributes:
        parameters: of the template's arguments, by name.
        messages: each by its fields.
        undated: of system messages and of the rendering's beginning, without dates and times.
        dropped: by the name of a rule, how much of the request is in none of them.
    """

    template: int
    tools: int
    parameters: Mapping[str, int]
    messages: tuple[Mapping[str, int], ...]
    num_system: int
    system: tuple[int, ...]
    undated: tuple[int, ...]
    head: int
    undated_head: int
    dropped: Mapping[str, int]


def shape_of(
    text: str,
    *,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    template: str | None,
    parameters: Mapping[str, Any],
    dropped: Mapping[str, int] = NOTHING_DROPPED,
) -> PromptShape:
    """The shape of a rendered conversation.

    Args:
        text: the rendering.
        parameters: what the template got beside messages and tools.
        dropped: as of the shape.
    """
    num_system = 0
    for message in messages:
        if message.get("role") not in _SYSTEM:
            break
        num_system += 1
    system = [_text_of(message) for message in messages[:num_system]]
    head = text[:_HEAD_CHARS]
    return PromptShape(
        template=hash(template),
        tools=_hash(tools),
        parameters={name: _hash(value) for name, value in parameters.items()},
        messages=tuple(
            {name: _hash(value) for name, value in message.items() if value is not None}
            for message in messages
        ),
        num_system=num_system,
        system=tuple(map(hash, system)),
        undated=tuple(map(_undated, system)),
        head=hash(head),
        undated_head=_undated(head),
        dropped=dropped,
    )


def _hash(value: Any) -> int:
    return hash(value if isinstance(value, str) else orjson.dumps(value, default=repr))


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else orjson.dumps(content, default=repr).decode()


_UNDATED: OrderedDict[int, int] = OrderedDict()  # by the hash of a text, which seldom changes
_MAX_UNDATED = 256


def _undated(text: str) -> int:
    """The hash of a text without dates and times."""
    whole = hash(text)
    known = _UNDATED.get(whole)
    if known is None:
        known = _UNDATED[whole] = hash(_DATE.sub("\0", text))
        if len(_UNDATED) > _MAX_UNDATED:
            _UNDATED.popitem(last=False)
    return known


@dataclass(frozen=True, slots=True)
class Predecessor:
    """With which earlier request one is compared.

    Attributes:
        request_id: it is asked for by name.
        series: names of what has several requests, as a conversation; the newest one's last counts.
        is_asked: the caller wants the comparison, and is told if there is nothing to compare.
    """

    request_id: str | None = None
    series: tuple[str, ...] = ()
    is_asked: bool = False


NO_PREDECESSOR = Predecessor()


def predecessor(
    request_id: str | None = None,
    *,
    previous_id: str | None = None,
    conversation_id: str | None = None,
    prompt_cache_key: str | None = None,
) -> Predecessor:
    """With which request one is compared.

    Args:
        request_id: what the caller wants it compared with.
        previous_id: the request that it continues.
    """
    named = {"conversation": conversation_id, "key": prompt_cache_key}
    series = tuple(f"{kind} {name}" for kind, name in named.items() if name)
    if request_id is None and previous_id is None and not series:
        return NO_PREDECESSOR
    return Predecessor(request_id or previous_id, series, is_asked=request_id is not None)


@dataclass(slots=True)
class Entry:
    """What is kept of a request.

    Attributes:
        keyed: hashes of what the KV depends on beside tokens.
        blocks: hashes of the prompt's whole blocks.
        engine: that computed it.
    """

    request_id: str
    adapter: str
    keyed: Mapping[str, int]
    shape: PromptShape | None
    blocks: array[int]
    num_tokens: int
    engine: str

    @property
    def num_bytes(self) -> int:
        num_messages = 0 if self.shape is None else len(self.shape.messages)
        return _ENTRY_BYTES + _MESSAGE_BYTES * num_messages + 8 * len(self.blocks)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a request found in the cache, and why not more.

    Attributes:
        reason: one of `REASONS`.
        reusable_tokens: of the predecessor's prompt, in whole blocks.
        missed_tokens: of those, the tokens that were computed again.
        message, field: the first difference: the number of the message, and what of it, or the
            name of a parameter.
    """

    reason: str
    predecessor: str | None = None
    reusable_tokens: int = 0
    missed_tokens: int = 0
    message: int | None = None
    field: str | None = None


@dataclass(slots=True)
class _OfTenant:
    entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    newest: OrderedDict[str, str] = field(default_factory=OrderedDict)  # by series
    num_bytes: int = 0


class CacheHistory:
    """The entries of this process's requests."""

    def __init__(
        self, *, max_bytes: int = _MAX_BYTES, max_tenant_bytes: int = _MAX_TENANT_BYTES
    ) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._tenants: OrderedDict[str, _OfTenant] = OrderedDict()  # by last use
        self.num_bytes = 0

    def find(self, tenant: str, predecessor: Predecessor) -> Entry | None:
        known = self._tenants.get(tenant)
        if known is None:
            return None
        names = [predecessor.request_id] if predecessor.request_id is not None else []
        if not names:
            names = [known.newest[each] for each in predecessor.series if each in known.newest][:1]
        return next((known.entries[name] for name in names if name in known.entries), None)

    def add(self, tenant: str, entry: Entry, series: Sequence[str]) -> None:
        """Keep an entry; the oldest of its tenant go, or those of tenants that are long silent."""
        kept = self._tenants.setdefault(tenant, _OfTenant())
        self._tenants.move_to_end(tenant)
        kept.entries[entry.request_id] = entry
        for name in series:
            kept.newest[name] = entry.request_id
            kept.newest.move_to_end(name)
        kept.num_bytes += entry.num_bytes
        self.num_bytes += entry.num_bytes
        while kept.num_bytes > self._max_tenant_bytes and len(kept.entries) > 1:
            self._drop_oldest(kept)
        while self.num_bytes > self._max_bytes:
            silent = next(iter(self._tenants.values()))
            self._drop_oldest(silent)
            if not silent.entries:
                self._tenants.popitem(last=False)

    def _drop_oldest(self, kept: _OfTenant) -> None:
        _, entry = kept.entries.popitem(last=False)
        kept.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        while len(kept.newest) > len(kept.entries):  # a series without an entry tells nothing
            kept.newest.popitem(last=False)


def entry_of(request: Request, shape: PromptShape | None, *, engine: str, block_size: int) -> Entry:
    data = memoryview(array("I", request.prompt_token_ids)).cast("B")
    step = 4 * block_size
    num = len(request.prompt_token_ids) // block_size
    params = request.sampling_params
    images = [(image.digest, image.offset) for image in request.images]
    return Entry(
        request_id=request.request_id,
        adapter="" if request.adapter is None else request.adapter.digest,
        keyed={
            "cache_salt": hash(request.cache_salt),
            "prompt_logprobs": hash(params.prompt_logprobs is not None),
            "images": hash(tuple(images)),
        },
        shape=shape,
        blocks=array("q", (hash(bytes(data[at * step : (at + 1) * step])) for at in range(num))),
        num_tokens=len(request.prompt_token_ids),
        engine=engine,
    )


def report_of(before: Entry, now: Entry, *, num_cached: int, block_size: int) -> CacheReport:
    """Why `now` found no more of what `before` left in the cache.

    Args:
        num_cached: tokens that were found.
    """
    num_before = len(before.blocks)
    num_common = _num_common(before.blocks, now.blocks)
    # A prompt's last token is always computed.
    reusable = min(num_before, (now.num_tokens - 1) // block_size) * block_size
    if num_common < num_before:
        reusable = num_before * block_size
    reason, message, name = _reason(before, now, is_same=num_common == num_before)
    if num_before == 0:
        reason, message, name = "too_short", None, None
    elif num_cached > reusable - block_size:
        reason, message, name = "hit", None, None
    missed = max(reusable - num_cached, 0) if reason != "hit" else 0
    return CacheReport(
        reason=reason,
        predecessor=before.request_id,
        reusable_tokens=reusable,
        missed_tokens=missed,
        message=message,
        field=name,
    )


class Comparison:
    """Of one request with its predecessor.

    Args:
        history: None: nothing is kept.
        prefill_tokens_per_s: of the engine that computes it; 0: not known.
        count: called with the reason and the tokens that were missed.
    """

    def __init__(
        self,
        history: CacheHistory | None,
        shape: PromptShape | None,
        predecessor: Predecessor,
        *,
        block_size: int,
        prefill_tokens_per_s: Callable[[], float],
        count: Callable[[str, int], None],
    ) -> None:
        self._history = history
        self._shape = shape
        self._predecessor = predecessor
        self._block_size = block_size
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._count = count

    def made(
        self, request: Request, *, num_cached: int, num_host_cached: int, engine: str
    ) -> dict[str, Any] | None:
        """`penstock.cache` of a request whose prompt is computed; None: it has no predecessor. It
        is kept for those that come after it."""
        history, asked = self._history, self._predecessor
        if history is None:
            return _told(CacheReport("unavailable"), 0, 0, None) if asked.is_asked else None
        before = history.find(request.tenant, asked)
        now = entry_of(request, self._shape, engine=engine, block_size=self._block_size)
        history.add(request.tenant, now, asked.series)
        if before is not None:
            report = report_of(before, now, num_cached=num_cached, block_size=self._block_size)
        elif asked.is_asked:
            report = CacheReport("not_found")
        else:
            return None
        self._count(report.reason, report.missed_tokens)
        rate = self._prefill_tokens_per_s()
        lost_s = report.missed_tokens / rate if rate else None
        dropped = NOTHING_DROPPED if self._shape is None else self._shape.dropped
        return _told(report, num_cached, num_host_cached, lost_s, dropped)


def _told(
    report: CacheReport,
    num_cached: int,
    num_host_cached: int,
    lost_s: float | None,
    dropped: Mapping[str, int] = NOTHING_DROPPED,
) -> dict[str, Any]:
    return {
        "predecessor": report.predecessor,
        "reason": report.reason,
        "cached_tokens": {"device": num_cached - num_host_cached, "host": num_host_cached},
        "reusable_tokens": report.reusable_tokens,
        "missed_tokens": report.missed_tokens,
        "message": report.message,
        "field": report.field,
        "seconds_lost": None if lost_s is None else round(lost_s, 4),
        "dropped": dict(dropped),
    }


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    num = min(len(one), len(other))
    if one[:num] == other[:num]:
        return num
    return next(at for at in range(num) if one[at] != other[at])


_Difference = tuple[str, int | None, str | None]


def _reason(before: Entry, now: Entry, *, is_same: bool) -> _Difference:
    """The reason, and what is different.

    Args:
        is_same: the prompt begins with all of the prompt before.
    """
    if before.adapter != now.adapter:
        return "adapter", None, "model"
    for name, value in now.keyed.items():
        if before.keyed[name] != value and (is_same or name != "images"):
            return "parameter", None, name
    if is_same:
        is_elsewhere = before.engine != now.engine
        return ("other_engine" if is_elsewhere else "evicted"), None, None
    if before.shape is None or now.shape is None:
        return "messages", None, None
    return _difference(before.shape, now.shape)


def _difference(before: PromptShape, now: PromptShape) -> _Difference:
    if before.template != now.template:
        return "template", None, "chat_template"
    if before.tools != now.tools:
        return "tools", None, "tools"
    for name in sorted({*before.parameters, *now.parameters}):
        if before.parameters.get(name) != now.parameters.get(name):
            return "parameter", None, name
    if before.system != now.system:
        place = _num_common(before.system, now.system)
        is_dated = before.undated == now.undated
        return ("date" if is_dated else "system"), place, "content"
    for place, (one, other) in enumerate(zip(before.messages, now.messages, strict=False)):
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                return "messages", place, name
    if len(now.messages) < len(before.messages):
        return "messages", len(now.messages), None
    if before.head != now.head and before.undated_head == now.undated_head:
        return "date", None, "chat_template"
    # The messages are the same and their rendering is not: the template rewrites earlier turns.
    return "template", None, "chat_template"
