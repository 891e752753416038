"""A model of `kernels/cpu/pool.c`, and a search through every interleaving of its threads.

The functions below have the names and the order of those in C. Each access to what threads share is
one `yield`, an indivisible step; between two of them any other thread may take any number of steps.
Reading and writing a job is two steps, as a struct has more words than one. `get` is a load too, of
what should not change meanwhile. A waiting thread may be impatient, and take an item over, or not:
the search follows both.

What is checked:
  - an item is written only by whom it belongs to, with its own arguments, while its run lasts,
  - every item is counted once, and the next job begins, and a run returns, when all are,
  - from every state that can be reached the caller's last run can still be finished: nothing hangs.

Left out are time, the memory order of single accesses (all are sequentially consistent here), and
what `pool_settle` waits for.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Value = Any  # what a step reads
Step = tuple[Any, ...]  # an operation and its operands
Code = Generator[Step, Value, Any]


class Slot(IntEnum):
    FREE, FIXED, OPEN, WRITING, LOST = range(5)


@dataclass(frozen=True)
class Job:
    num_items: int
    is_repeatable: bool = True
    opens: bool = False  # calls `pool_open` before its first write


@dataclass(frozen=True)
class Order:
    """How the pool stores what it stores; the other values are faults that it had.

    Attributes:
        ends_first: `is_running = 0` is stored before the ticket.
        numbers_by_epoch: a job's number is one more than `epoch`, which is then set to it.
        num_numbers: after so many jobs numbers begin anew.
    """

    ends_first: bool = False
    numbers_by_epoch: bool = False
    num_numbers: int = 1 << 32


class ProtocolError(Exception):
    """What must not happen happened; the text says what, and by which steps."""


# -- pool.c ---------------------------------------------------------------------------------------


class Pool:
    """The C code for `runs` of jobs; `me` is a thread's index, 0 the caller's."""

    def __init__(self, runs: Sequence[Sequence[Job]], num_threads: int, order: Order) -> None:
        self.runs = [tuple(run) for run in runs]
        self.num_threads = num_threads
        self.order = order

    def threads(self) -> list[Code]:
        return [self.caller(), *(self.work(me) for me in range(1, self.num_threads))]

    def caller(self) -> Code:
        for run in range(len(self.runs)):
            yield from self.pool_run(0, run)

    def pool_run(self, me: int, run: int) -> Code:
        yield "store", "call", (run, 0)
        yield "store", "is_running", 1
        yield from self.begin_next_job(me)
        while (yield "load", "is_running"):
            epoch = yield "load", "epoch"
            yield from self.take_items(me)
            yield from self.wait_for_job(me, epoch)
        yield "return", run

    def begin_next_job(self, me: int) -> Code:
        by_epoch = self.order.numbers_by_epoch
        number = ((yield "get", "epoch" if by_epoch else "number") + 1) % self.order.num_numbers
        args, count = yield from self.plan(me)
        yield "store", ("args", number & 1), args
        yield "store", ("num_items", number & 1), count
        yield "store", "num_done", 0
        if not by_epoch:
            yield "store", "number", number
        if self.order.ends_first and not count:
            yield "store", "is_running", 0
        yield "store", "ticket", (number, count, 0)
        if by_epoch:
            yield "store", "epoch", number
        else:
            yield "add", "epoch"
        if not count:
            if not self.order.ends_first:
                yield "store", "is_running", 0
        elif (yield "load", "num_sleeping"):
            yield ("wake",)

    def plan(self, me: int) -> Code:
        """Those with one item are done at once."""
        while True:
            args = yield "plan", me
            if args is None:
                return None, 0
            count = self.job(args).num_items
            if count > 1:
                return args, count
            yield "write", me, args, 0
            yield "count", args, 0

    def job(self, args: tuple[int, int] | None) -> Job:
        if args is None:
            raise ProtocolError("an item of no job is begun")
        run, call = args
        return self.runs[run][call]

    def do_item(self, me: int, args: Any, count: int, number: int, item: int) -> Code:
        """Whether it was the last; the next job is begun by who called, for whom fewer variables
        are then left to tell states apart."""
        is_open = self.job(args).is_repeatable
        yield "store", ("slot", me), (number, item, Slot.OPEN if is_open else Slot.FIXED)
        yield from self.fn(me, args, item)
        _, _, state = yield "exchange", ("slot", me), (0, 0, Slot.FREE)
        return state != Slot.LOST and (yield "count", args, item) + 1 == count

    def fn(self, me: int, args: Any, item: int) -> Code:
        if self.job(args).opens:
            yield from self.pool_open(me)
        if (yield from self.pool_claim(me)):
            yield "write", me, args, item
            yield from self.pool_release(me)

    def pool_open(self, me: int) -> Code:
        number, item, state = yield "get", ("slot", me)
        if state == Slot.FIXED:
            yield "store", ("slot", me), (number, item, Slot.OPEN)

    def pool_claim(self, me: int) -> Code:
        number, item, state = yield "get", ("slot", me)
        if state != Slot.OPEN:
            return state != Slot.LOST
        return (yield "cas", ("slot", me), (number, item, state), (number, item, Slot.WRITING))

    def pool_release(self, me: int) -> Code:
        number, item, state = yield "get", ("slot", me)
        if state == Slot.WRITING:
            yield "store", ("slot", me), (number, item, Slot.OPEN)

    def take_items(self, me: int) -> Code:
        while True:
            number, count, item = yield "take", "ticket"
            if item >= count:
                return
            if not self.order.numbers_by_epoch:
                number = yield "get", "number"
            args = yield "get", ("args", number & 1)
            count = yield "get", ("num_items", number & 1)
            is_last = yield from self.do_item(me, args, count, number, item)
            del number, count, item, args
            if is_last:
                yield from self.begin_next_job(me)
            del is_last

    def repeat_item(self, me: int, epoch: int) -> Code:
        number = epoch if self.order.numbers_by_epoch else (yield "load", "number")
        args = yield "load", ("args", number & 1)
        count = yield "get", ("num_items", number & 1)
        for thread in range(self.num_threads):
            if thread == me:
                continue
            word = yield "load", ("slot", thread)
            if (word[0], word[2]) != (number, Slot.OPEN):
                continue
            item = word[1]
            if (yield "cas", ("slot", thread), word, (number, item, Slot.LOST)):
                is_last = yield from self.do_item(me, args, count, number, item)
                del number, count, item, args, thread, word
                if is_last:
                    yield from self.begin_next_job(me)
                return

    def wait_for_job(self, me: int, epoch: int) -> Code:
        while (yield "load", "epoch") == epoch:
            if not (yield "load", "is_running"):
                return
            if (yield ("is_impatient",)):
                yield from self.repeat_item(me, epoch)

    def sleep_until_job(self, me: int, epoch: int) -> Code:
        yield "add", "num_sleeping"
        while (yield "load", "epoch") == epoch:
            if (yield "futex_wait", me, epoch):
                yield "wait_for_wake", me
        yield "subtract", "num_sleeping"

    def work(self, me: int) -> Code:
        while True:
            epoch = yield "load", "epoch"
            yield from self.take_items(me)
            yield from self.wait_for_job(me, epoch)
            if not (yield "load", "is_running"):
                yield from self.sleep_until_job(me, epoch)


# -- the search -----------------------------------------------------------------------------------


@dataclass
class Place:
    """Somewhere in a thread's code, with certain values in its variables.

    Attributes:
        step: the next one; None at the end of the code.
        values: that the steps before have read: by them the code can be brought here again.
        following: the place behind the next step, by what that reads.
    """

    step: Step | None
    values: tuple[Value, ...]
    following: dict[Value, int] = field(default_factory=dict)


class Search:
    """Every state that threads can reach, step by step.

    A state is what is shared (a tuple of values) and each thread's place (by number).

    Args:
        is_coarse: a step that reads or changes what only its thread can change then, and the second
            half of reading or writing a job, belong to the step before: fewer states.
    """

    def __init__(self, pool: Pool, *, is_coarse: bool = False) -> None:
        self.pool = pool
        self.is_coarse = is_coarse
        names: list[Any] = [
            "call", "is_running", "num_done", "number", "ticket", "epoch", "num_sleeping",
            *((word, parity) for word in ("args", "num_items") for parity in range(2)),
            *(("slot", me) for me in range(pool.num_threads)),
            *(("asleep", me) for me in range(pool.num_threads)),
            "job", "done",  # not of the pool: the job that runs, and its items that are counted
        ]  # fmt: skip
        self.index = {name: number for number, name in enumerate(names)}
        self.first = dict.fromkeys(names, 0) | {
            "call": (0, 0), "ticket": (0, 0, 0), "job": None, "done": frozenset(),
            **{name: (0, 0, Slot.FREE) for name in names if name[0] == "slot"},
            **{name: None for name in names if name[0] == "args"},
        }  # fmt: skip
        self.places: list[list[Place]] = [[] for _ in range(pool.num_threads)]
        self.known: list[dict[Any, int]] = [{} for _ in range(pool.num_threads)]

    def run(self) -> int:
        """Search; the number of states.

        Raises:
            ProtocolError: a check failed.
        """
        first = (
            tuple(self.first.values()),
            tuple(self._place(thread, ()) for thread in range(self.pool.num_threads)),
        )
        numbers = {first: 0}
        states: list[Any] = [first]
        origins: list[tuple[int, int]] = [(0, 0)]  # the state before, and whose step it was
        before: list[list[int]] = [[]]  # every state from which one leads here
        finished = []
        for number, state in enumerate(states):  # grows meanwhile
            shared, places = state
            if self.places[0][places[0]].step is None:
                finished.append(number)
                continue  # the caller is done; what workers still do was done in an earlier run too
            for thread, place in enumerate(places):
                try:
                    outcomes = self._outcomes(shared, thread, place)
                except ProtocolError as error:
                    trace = self._trace(states, origins, number)
                    raise ProtocolError(f"{error}, after:\n{trace}") from None
                for next_shared, next_place in outcomes:
                    following = (next_shared, (*places[:thread], next_place, *places[thread + 1 :]))
                    known = numbers.setdefault(following, len(states))
                    if known == len(states):
                        states.append(following)
                        origins.append((number, thread))
                        before.append([])
                    before[known].append(number)
        can_finish = set(finished)
        while finished:
            for number in before[finished.pop()]:
                if number not in can_finish:
                    can_finish.add(number)
                    finished.append(number)
        for number in range(len(states)):
            if number not in can_finish:
                trace = self._trace(states, origins, number)
                raise ProtocolError(f"the run hangs, after:\n{trace}")
        return len(states)

    def _outcomes(self, shared: Any, thread: int, place: int) -> list[tuple[Any, int]]:
        here = self.places[thread][place]
        assert here.step is not None
        results = []
        for value, changes in self._take(here.step, shared):
            following = here.following.get(value)
            if following is None:
                following = here.following[value] = self._place(thread, (*here.values, value))
            after = shared
            if changes:
                changed = list(shared)
                for name, new in changes:
                    changed[self.index[name]] = new
                after = tuple(changed)
            if self._is_joined(self.places[thread][following].step):
                results += self._outcomes(after, thread, following)
            else:
                results.append((after, following))
        return results

    def _is_joined(self, step: Step | None) -> bool:
        if not self.is_coarse or step is None:
            return False
        kind, name = (*step, None)[:2]
        is_second_half = isinstance(name, tuple) and name[0] == "num_items"
        is_own = kind in ("get", "plan", "write", "is_impatient") or name in ("call", "num_done")
        return is_own or is_second_half

    def _take(self, step: Step, shared: Any) -> list[tuple[Value, list[tuple[Any, Value]]]]:
        """What a step reads and what it changes; several where it may do one or the other."""
        kind, *operands = step
        if kind == "is_impatient":
            return [(False, []), (True, [])]
        name = operands[0] if operands else None
        old = shared[self.index[name]] if name in self.index else None
        match kind:
            case "load" | "get":
                return [(old, [])]
            case "store":
                return [(None, [(name, operands[1])])]
            case "exchange":
                return [(old, [(name, operands[1])])]
            case "add" | "subtract":
                return [(None, [(name, old + (1 if kind == "add" else -1))])]
            case "cas":
                is_equal = old == operands[1]
                return [(is_equal, [(name, operands[2])] if is_equal else [])]
            case "take":
                number, count, item = old
                return [(old, [(name, (number, count, min(item + 1, count)))])]
            case "plan":
                return [self._plan(shared)]
            case "write":
                self._check_item(shared, *operands[1:], "written")
                return [(None, [])]
            case "count":
                self._check_item(shared, *operands, "counted")
                num_done = shared[self.index["num_done"]]
                done = shared[self.index["done"]] | {operands[1]}
                return [(num_done, [("num_done", num_done + 1), ("done", done)])]
            case "wake":
                return [(None, [(("asleep", me), 0) for me in range(self.pool.num_threads)])]
            case "futex_wait":
                sleeps = shared[self.index["epoch"]] == operands[1]
                return [(sleeps, [(("asleep", operands[0]), 1)] if sleeps else [])]
            case "wait_for_wake":
                return [] if shared[self.index["asleep", operands[0]]] else [(None, [])]
            case "return":
                self._check_all_done(shared, "the run returns")
                if shared[self.index["call"]] != (operands[0], len(self.pool.runs[operands[0]])):
                    raise ProtocolError("the run returns before its last call")
                return [(None, [])]
        raise AssertionError(kind)

    def _plan(self, shared: Any) -> tuple[Value, list[tuple[Any, Value]]]:
        self._check_all_done(shared, "another job begins")
        run, call = shared[self.index["call"]]
        if call == len(self.pool.runs[run]):
            return None, [("job", None), ("done", frozenset())]
        return (run, call), [("call", (run, call + 1)), ("job", (run, call)), ("done", frozenset())]

    def _check_item(self, shared: Any, args: Any, item: int, what: str) -> None:
        if args != shared[self.index["job"]]:
            raise ProtocolError(f"an item is {what} as one of job {args}, which does not run")
        if item in shared[self.index["done"]]:
            raise ProtocolError(f"item {item} is {what} again")

    def _check_all_done(self, shared: Any, what: str) -> None:
        job = shared[self.index["job"]]
        if job is not None and len(shared[self.index["done"]]) != self.pool.job(job).num_items:
            raise ProtocolError(f"{what} before all items are done")

    def _place(self, thread: int, values: tuple[Value, ...]) -> int:
        """The number of the place to which code comes that reads these values."""
        code = self.pool.threads()[thread]
        try:
            step = code.send(None)
            for value in values:
                step = code.send(value)
        except StopIteration:
            step, key = None, None
        else:
            key = _position(code)
        known = self.known[thread].setdefault(key, len(self.places[thread]))
        if known == len(self.places[thread]):
            self.places[thread].append(Place(step, values))
        return known

    def _trace(self, states: Any, origins: Any, number: int) -> str:
        lines = []
        while number:
            number, thread = origins[number]
            place = states[number][1][thread]
            lines.append(f"  thread {thread}: {self.places[thread][place].step}")
        return "\n".join(reversed(lines))


def _position(code: Code) -> tuple[Any, ...]:
    """Where it stands and what its variables hold, in every function that it is inside of."""
    frames = []
    inner: Any = code
    while inner is not None:
        frame = inner.gi_frame
        variables = {key: value for key, value in frame.f_locals.items() if key != "self"}
        frames.append(
            (frame.f_code.co_name, frame.f_lasti, tuple(sorted(variables.items(), key=str)))
        )
        inner = inner.gi_yieldfrom
    return tuple(frames)
