"""Where a request waits, outside the scheduler, until all that it needs is loaded.

Resources are loaded in threads, one for each kind, so the steps go on. Requests have one order for
all kinds: tenants get equal shares of what loading costs, or by their weights; within a tenant, who
came first is first. A request whose resources are loaded passes those that wait for theirs. But one
that waits for room (in memory, or among the adapters of a step) is passed by at most
`MAX_OVERTAKING` of those that keep that room in use.

The first request in this order never waits for another one that waits here, whatever either needs,
and those in the scheduler end: so nobody waits for ever.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.engine.errors import InvalidRequestError
from penstock.engine.preparation.loader import Claims, Loader
from penstock.engine.preparation.resources import Need, Resources
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    Requests,
    refusal,
)

MAX_OVERTAKING = 16  # later requests that go ahead of one that waits for room
_COST = 1.0  # of a request, beside its resources

_Needs = tuple[tuple[Loader, Need], ...]


@dataclass(slots=True)
class _Waiting:
    """
    Attributes:
        turn: in the order of all, with the number of its arrival.
        aborted: branches to abort once it runs.
        num_overtaking: later ones that went ahead while it waited for room.
        told: the kind of resource that its client was told it waits for.
    """

    request: Request
    needs: _Needs
    turn: tuple[float, int]
    aborted: list[int] = field(default_factory=list)
    num_overtaking: int = 0
    told: str = ""


@dataclass(slots=True)
class _Round:
    """Of one kind, in one round of those that wait.

    Attributes:
        claims: on its memory.
        live: that have, or will have, requests in the scheduler.
        blocked: who waits for room.
        is_closed: one of them may be passed no more.
        next: what to load, and for whom.
    """

    claims: Claims
    live: set[Hashable] = field(default_factory=set)
    blocked: list[_Waiting] = field(default_factory=list)
    is_closed: bool = False
    next: tuple[Need, _Waiting] | None = None


class PreparationQueue:
    """
    Args:
        requests: the scheduler.

    Attributes:
        wake: called in another thread when `admit` has something to do.
    """

    def __init__(self, kinds: Sequence[Resources], requests: Requests) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.has_news = False  # plain, as every step looks at it
        self._requests = requests
        self._loaders = [Loader(kind, self._notify) for kind in kinds]
        self._waiting: list[_Waiting] = []  # by their turns
        self._by_id: dict[str, _Waiting] = {}
        self._live: dict[str, tuple[Request, _Needs]] = {}  # in the scheduler as far as we know
        self._outputs: list[RequestOutput] = []
        self._turns: dict[str, float] = {}  # by tenant that waits: the last one's
        self._now = 0.0  # the turn of whoever was served last
        self._num_added = 0
        self._is_short = False  # somebody waits for room, or more is in memory than should be
        self._news = threading.Event()

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def loader(self, kind: Resources) -> Loader:
        """The resources of one kind."""
        return next(each for each in self._loaders if each.kind is kind)

    @property
    def has_work(self) -> bool:
        """Whether `admit` would do something."""
        if self.has_news:
            return True
        return self._is_short and not all(map(self._requests.has_request, self._live))

    def needs(self, request: Request) -> _Needs:
        """What a request needs. Raises `InvalidRequestError` as the kinds do."""
        return tuple((each, need) for each in self._loaders for need in each.kind.needs(request))

    def add(self, request: Request, needs: _Needs) -> None:
        """Have a request wait until it can be handed to the scheduler.

        Args:
            needs: from `needs`.
        """
        cost = _COST + sum(need.cost for loader, need in needs if need.key not in loader)
        last = max(self._now, self._turns.get(request.tenant, 0.0))
        turn = self._turns[request.tenant] = last + cost / request.weight
        self._num_added += 1
        waiting = _Waiting(request, needs, (turn, self._num_added))
        for loader, need in needs:
            loader.touch(need.key)
        insort(self._waiting, waiting, key=lambda each: each.turn)
        self._by_id[request.request_id] = waiting
        self.has_news = True

    def abort(self, request_id: str, *, index: int | None = None) -> bool:
        """Drop a waiting request, or one of its samples; whether it waits here."""
        if index is None:
            self._outputs = [each for each in self._outputs if each.request_id != request_id]
        waiting = self._by_id.get(request_id)
        if waiting is None:
            return False
        if index is not None:
            waiting.aborted.append(index)
        params = waiting.request.sampling_params
        is_whole = index is None or params.beam_search is not None
        if is_whole or len(set(waiting.aborted)) >= params.num_branches:
            self._remove(waiting)
            self.has_news = True  # others may have its place
        return True

    def has_request(self, request_id: str) -> bool:
        """Whether it waits here, or `admit` will say that it has ended."""
        return request_id in self._by_id or any(
            each.request_id == request_id for each in self._outputs
        )

    def end(self, is_meant: Callable[[Request], bool], error: InvalidRequestError) -> None:
        """End the requests that something was taken from, in the scheduler as well; those that need
        nothing of this place are not looked at."""
        for waiting in [each for each in self._waiting if is_meant(each.request)]:
            self._refuse(waiting, error)
        self._forget_ended()
        for request_id, (request, _) in self._live.items():
            if is_meant(request):
                self._requests.abort(request_id)
                self._outputs.append(_ended(request_id, str(error)))
        self.has_news = True

    def load(self, need: Need) -> None:
        """Load a resource and wait for it, as before there are requests.

        Raises:
            InvalidRequestError: it cannot be used.
        """
        loader = self.loader(need.kind)
        while loader.is_loading:
            self._news.wait()
            self._collect()
        self.has_news = True  # for those that wait for what was collected here
        if need.key in loader:
            loader.touch(need.key)
            return
        self._forget_ended()
        claimed = self._begin_round()[loader].claims.keys
        loader.fit(claimed, num_more=1)
        error = loader.start(need, "").result()
        self._collect()
        if error is not None:
            raise error
        loader.fit(claimed | {need.key})

    def wait(self) -> None:
        """Wait until something has been loaded."""
        self._news.wait()

    def admit(self) -> list[RequestOutput]:
        """Hand over the requests that may run, and have resources loaded for others; the outputs of
        those that cannot run, and what others wait for, as far as they asked."""
        self.has_news = False
        self._collect()
        self._forget_ended()
        kinds = self._begin_round()
        self._is_short = False
        for waiting in list(self._waiting):
            self._take_turn(waiting, kinds)
        for loader, of_kind in kinds.items():
            num_more = int(of_kind.next is not None)
            self._is_short |= not loader.fit(of_kind.claims.keys, num_more=num_more)
            if of_kind.next is not None:
                need, waiting = of_kind.next
                self._now = max(self._now, waiting.turn[0])
                loader.start(need, waiting.request.tenant)
        outputs, self._outputs = self._outputs, []
        return [*outputs, *self._told()]

    def _told(self) -> Iterator[RequestOutput]:
        for waiting in self._waiting:
            if waiting.request.wants_queue_position:
                missing = (each.kind.name for each, need in waiting.needs if need.key not in each)
                name = next(missing, waiting.told)
                if name != waiting.told:
                    waiting.told = name
                    yield RequestOutput(
                        request_id=waiting.request.request_id, notice=Notice.PREPARING, param=name
                    )

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()

    # -- parts of a round -----------------------------------------------------------------------

    def _collect(self) -> None:
        """Note what the threads have loaded; the requests for what could not be loaded end."""
        self._news.clear()
        for loader in self._loaders:
            while (done := loader.collect()) is not None:
                need, error = done
                if error is None:
                    continue
                for waiting in list(self._waiting):
                    if any(each is loader and one.key == need.key for each, one in waiting.needs):
                        self._refuse(waiting, error, param=loader.kind.param)

    def _forget_ended(self) -> None:
        has_request = self._requests.has_request
        self._live = {key: each for key, each in self._live.items() if has_request(key)}

    def _begin_round(self) -> dict[Loader, _Round]:
        """With what the scheduler's requests have."""
        kinds = {loader: _Round(Claims(loader)) for loader in self._loaders}
        for _, needs in self._live.values():
            for loader, need in needs:
                kinds[loader].claims.add(need.key)
                kinds[loader].live.add(need.key)
        return kinds

    def _take_turn(self, waiting: _Waiting, kinds: dict[Loader, _Round]) -> None:
        """Hand a request over; or claim what it needs, if there is room, and have it loaded."""
        if any(kinds[loader].is_closed for loader, _ in waiting.needs):
            self._is_short = True
            return
        missing = [(loader, need) for loader, need in waiting.needs if need.key not in loader]
        lacks_room = [each for each in waiting.needs if not self._claim(waiting, *each, kinds)]
        for loader, need in missing:
            of_kind = kinds[loader]
            if of_kind.next is None and not loader.is_loading and (loader, need) not in lacks_room:
                of_kind.next = need, waiting
        # Room in the scheduler is kept for one that lacks nothing else.
        for loader, need in waiting.needs:
            live, max_live = kinds[loader].live, loader.kind.bounds.max_live
            if max_live is None or need.key in live:
                continue
            if len(live) >= max_live:
                lacks_room.append((loader, need))
            elif all(each is loader for each, _ in missing):
                live.add(need.key)
        if not (missing or lacks_room):
            self._hand_over(waiting, kinds)
            return
        self._is_short |= bool(lacks_room)
        for loader in _loaders(lacks_room):
            kinds[loader].blocked.append(waiting)
        # Until it has what it waited for: it may turn out to be larger than the room for it.
        for loader in _loaders((*lacks_room, *missing)):
            kinds[loader].is_closed |= waiting.num_overtaking >= MAX_OVERTAKING

    def _claim(
        self, waiting: _Waiting, loader: Loader, need: Need, kinds: dict[Loader, _Round]
    ) -> bool:
        """Claim memory for a resource; whether there is room. A request that needs more than there
        is gets it while nobody else has any."""
        claims = kinds[loader].claims
        own = {each.key for other, each in waiting.needs if other is loader}
        if need.key in claims.keys or claims.has_room() or claims.keys <= own:
            claims.add(need.key)
            return True
        return False

    def _hand_over(self, waiting: _Waiting, kinds: dict[Loader, _Round]) -> None:
        request = waiting.request
        try:
            for loader in _loaders(waiting.needs):
                request = loader.kind.hand_over(request)
            self._requests.add(request)
        except InvalidRequestError as error:
            self._refuse(waiting, error)
            return
        self._now = max(self._now, waiting.turn[0])
        self._remove(waiting)
        # Without their sources, of which an image's is large.
        needs = tuple((loader, _bare(need)) for loader, need in waiting.needs)
        self._live[request.request_id] = request, needs
        for loader, need in needs:
            loader.touch(need.key)
        for index in waiting.aborted:
            self._requests.abort(request.request_id, index=index)
        passed = [each for loader in _loaders(waiting.needs) for each in kinds[loader].blocked]
        for each in {each.turn: each for each in passed}.values():
            each.num_overtaking += 1
        for loader in _loaders(waiting.needs):
            most = max((each.num_overtaking for each in kinds[loader].blocked), default=0)
            kinds[loader].is_closed = most >= MAX_OVERTAKING

    def _remove(self, waiting: _Waiting) -> None:
        """Let it wait no longer."""
        self._waiting.remove(waiting)
        del self._by_id[waiting.request.request_id]
        tenant = waiting.request.tenant
        left = [each.turn[0] for each in self._waiting if each.request.tenant == tenant]
        if left:
            self._turns[tenant] = left[-1]
        else:
            del self._turns[tenant]

    def _refuse(
        self, waiting: _Waiting, error: InvalidRequestError, *, param: str | None = None
    ) -> None:
        self._remove(waiting)
        self.has_news = True  # others may have its place
        self._outputs.append(refusal(waiting.request.request_id, error, param=param))

    def _notify(self) -> None:
        """In a loader's thread."""
        self.has_news = True
        self._news.set()
        self.wake()


def _loaders(needs: Iterable[tuple[Loader, Need]]) -> Iterable[Loader]:
    return dict.fromkeys(loader for loader, _ in needs)


def _bare(need: Need) -> Need:
    return Need(need.kind, need.key, None)


def _ended(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, finish_reason=FinishReason.ERROR, is_last=True, error=error
    )
