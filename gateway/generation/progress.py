"""What a request waits for until its first token, and for how long: `penstock.progress`.

An engine tells when a request's position, what is prepared for it, or the number of its computed
tokens changes. In between, at least once a second, the last of it is told again: tokens of a prompt
as they are at the measured rate, marked as interpolated.

What prompts took is kept on disk, so that the first one after a start has an estimate too; where
none was ever computed, it comes with the prompt's first step.

Predictions are of measured rates, and of what tokens took at their positions in earlier prompts. At
admission they are corrected by how far earlier ones were off, of prompts of about the size. While a
prompt is computed, it is known what its tokens so far took and, from it and from earlier prompts,
how much longer later tokens take, which attend to more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import Notice, RequestOutput
from penstock.kernels.cache_folder import NoCacheError, cache_dir, unfinished

INTERVAL_S = 0.9
_MIN_INTERVAL_S = 0.2  # between events about one stage
_WEIGHT = 0.3  # of the newest request in a correction
_KEPT = 0.97  # of the weight of steps, with each one
_PRIOR_S = 0.5  # of a prompt's steps, as much as which earlier prompts weigh
_MOST_OFF = math.log(8.0)  # of a correction, which one outlier must not turn around
_DOUBLED_AT = 8192.0  # tokens; of a model of half a billion weights
_SPREAD = 512.0  # tokens between steps, from which on the line is more theirs than assumed
_MIN_OBSERVED_S = 0.05  # shorter times are the event loop's
_KEPT_OVER_START = 0.25  # of the weight of steps: the machine may have changed
_KEEP_EVERY_S = 60.0
_NUM_SUMS = 5  # of `TokenCosts`


class TokenCosts:
    """What a prompt's token takes at its position: a line, fitted to the steps of prompts so far.
    Newer ones weigh more. As long as they were at about one position, it is assumed that a token
    takes twice as long at `_DOUBLED_AT` as at the start.

    Attributes:
        sums: all that is known, for `restore`: of tokens, of their positions and these squared, of
            seconds and these by position.
    """

    def __init__(self) -> None:
        self.sums: tuple[float, ...] = (0.0,) * _NUM_SUMS

    def note(self, start: int, stop: int, seconds: float) -> None:
        """The tokens from one position to another took so long."""
        num, x = float(stop - start), (start + stop) / 2
        new = (num, num * x, num * x * x, seconds, seconds * x)
        self.sums = tuple(kept * _KEPT + value for kept, value in zip(self.sums, new, strict=True))

    def restore(self, sums: Iterable[float]) -> None:
        """Begin with what an earlier process knew."""
        self.sums = tuple(each * _KEPT_OVER_START for each in sums)

    def seconds(self, start: float, stop: float, *, rate: float = 0.0) -> float:
        """What the tokens between two positions take; 0 if nothing is known.

        Args:
            rate: tokens in a second near the start, if no step of a prompt is known yet.
        """
        num, x, xx, y, xy = self.sums
        if not num:
            usual = (start + stop) / 2 / _DOUBLED_AT
            return (stop - start) * (1.0 + usual) / rate if rate > 0 else 0.0
        mean, at = y / num, x / num
        variance = max(0.0, xx / num - at**2)
        usual = mean / (_DOUBLED_AT + at)
        found = xy / num - mean * at
        slope = (found + usual * _SPREAD**2) / (variance + _SPREAD**2)
        # Later tokens never take less: where it seems so, others had a part of the time.
        slope = min(max(0.0, slope), mean / at if at else 0.0)  # the first one takes time too
        return (stop - start) * (mean + slope * ((start + stop) / 2 - at))


class Estimates:
    """Predicted times to first tokens, and how right they are.

    Args:
        rate: prompt tokens that an engine computes in a second; 0 if that was not measured.
        observe: told each prediction ÷ what it was.
    """

    def __init__(self, rate: Callable[[], float], observe: Callable[[float], None]) -> None:
        self._measured_rate = rate
        self._kept_rate = 0.0
        self._kept_in: Path | None = None
        self._kept_s = -math.inf  # when
        self._has_news = False  # that were not kept
        self._is_begun = False
        self._observe = observe
        self.costs = TokenCosts()
        self._logs: dict[int, float] = {}  # by size: of the factor

    def begin(self, engine: EngineInfo) -> None:
        """Know what prompts took before the start, in an engine like this one; once."""
        if self._is_begun:
            return
        self._is_begun = True
        self._kept_in = _file(engine)
        if self._kept_in is not None and (kept := _read(self._kept_in)) is not None:
            self._kept_rate, *sums = kept
            self.costs.restore(sums)

    def rate(self) -> float:
        """Prompt tokens in a second; 0 if that was never measured."""
        return self._measured_rate() or self._kept_rate

    def close(self) -> None:
        """Keep what is known for the next start."""
        if self._kept_in is not None and self._has_news:
            _write(self._kept_in, (self.rate(), *self.costs.sums))

    def _keep_sometimes(self) -> None:
        """The same in a thread, as the process may be killed."""
        self._has_news = True
        now_s = perf_counter()
        if self._kept_in is not None and now_s - self._kept_s >= _KEEP_EVERY_S:
            self._kept_s, self._has_news = now_s, False
            kept = (self.rate(), *self.costs.sums)
            asyncio.get_running_loop().run_in_executor(None, _write, self._kept_in, kept)

    def prompt_s(self, start: float, stop: float) -> float:
        """What the tokens between two positions of a prompt take; 0 if nothing was measured."""
        return self.costs.seconds(start, stop, rate=self.rate())

    def corrected(self, seconds: float, num_tokens: int) -> float:
        """A prediction from rates, for a prompt of so many tokens, as experience has it."""
        return seconds * math.exp(self._log(num_tokens.bit_length()))

    def learn(self, predicted_s: float, told_s: float, seconds: float, num_tokens: int) -> None:
        """
        Args:
            predicted_s: from rates.
            told_s: what the client was told; 0: nothing had been measured.
            seconds: what it was.
        """
        self._keep_sometimes()
        if predicted_s <= 0 or seconds < _MIN_OBSERVED_S:
            return
        if told_s > 0:
            self._observe(told_s / seconds)
        size = num_tokens.bit_length()
        found = max(-_MOST_OFF, min(_MOST_OFF, math.log(seconds / predicted_s)))
        known = self._logs.get(size)
        self._logs[size] = found if known is None else known + _WEIGHT * (found - known)

    def _log(self, size: int) -> float:
        if not self._logs:
            return 0.0
        return self._logs[min(self._logs, key=lambda known: abs(known - size))]


def _file(engine: EngineInfo) -> Path | None:
    """Where what the prompts of such engines took is kept; None: nowhere."""
    if not engine.cache_root:
        return None
    # What their speed depends on. The root names weights and number format.
    kind = (engine.cache_root.hex(), engine.device, engine.num_threads, engine.quantization)
    digest = hashlib.sha256(json.dumps(kind).encode()).hexdigest()
    with contextlib.suppress(NoCacheError):
        return cache_dir() / "prompts" / f"{digest}.json"
    return None


def _read(path: Path) -> list[float] | None:
    try:
        found = [float(each) for each in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        return None
    is_sound = all(0 <= each < 1e18 for each in found)
    return found if is_sound and len(found) == 1 + _NUM_SUMS else None


def _write(path: Path, numbers: Sequence[float]) -> None:
    with contextlib.suppress(OSError):  # where there is no place, it is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(path.parent) as own:
            fresh = own / path.name
            fresh.write_text(json.dumps(numbers), "utf-8")
            fresh.replace(path)


class Expectation:
    """The prediction of one request's first token, made when it was admitted.

    Args:
        wait_s: until it is begun, from rates.
        num_new: of its prompt's tokens, what probably has to be computed.
    """

    __slots__ = ("_began_s", "_estimates", "_num_new", "_num_tokens", "_wait_s", "told_s")

    def __init__(
        self, estimates: Estimates, *, wait_s: float, num_tokens: int, num_new: float
    ) -> None:
        self._estimates, self._num_tokens = estimates, num_tokens
        self._wait_s, self._num_new = wait_s, num_new
        self.told_s = estimates.corrected(self._predicted_s(), num_tokens)
        self._began_s = perf_counter()

    def left_s(self) -> float:
        return max(0.0, self.told_s - (perf_counter() - self._began_s))

    def met(self) -> None:
        """The first token is there. What is learned is how far off the prediction would be by now,
        when this prompt's steps are known too: else the next one would be corrected twice."""
        seconds = perf_counter() - self._began_s
        self._estimates.learn(self._predicted_s(), self.told_s, seconds, self._num_tokens)

    def _predicted_s(self) -> float:
        """From rates; 0: nothing has been measured."""
        start = self._num_tokens - self._num_new
        own_s = self._estimates.prompt_s(start, self._num_tokens)
        return self._wait_s + own_s if own_s else 0.0


class Waits(Protocol):
    def wait_s(self, num_tokens_ahead: int) -> float: ...


class Progress:
    """Of one request.

    Args:
        num_tokens: of its prompt.
        queue: predicts waits.
    """

    def __init__(
        self,
        num_tokens: int,
        estimates: Estimates,
        expectation: Expectation,
        queue: Waits,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._num_tokens, self._estimates, self._queue = num_tokens, estimates, queue
        self._expectation, self._clock = expectation, clock
        self._stage = "queued"
        self._position: int | None = None
        self._expected_at_s = 0.0  # the first token, with a position
        self._resource = ""
        self._num_cached = self._num_from_host = 0
        self._first: tuple[float, int] | None = None  # when how many tokens were computed
        self._last = (0.0, 0)
        self._num_told = 0  # tokens of the prompt: the number does not go back
        self._has_news = True
        self._told_s = -math.inf

    def hear(self, output: RequestOutput) -> None:
        """An output of the engine before the first token."""
        stage = self._stage
        if output.notice is Notice.PREPARING:
            stage, self._resource = "preparing", output.param or self._resource
        elif output.queue_position is not None:
            stage = "queued"
            self._position = output.queue_position
            num_tokens = self._num_tokens
            wait_s = self._queue.wait_s(output.num_tokens_ahead)
            wait_s += self._estimates.prompt_s(0, num_tokens)
            self._expected_at_s = self._clock() + self._estimates.corrected(wait_s, num_tokens)
        elif output.num_tokens_ahead:
            stage = "prefilling"
            if output.num_cached_tokens > self._num_cached:
                self._num_cached = output.num_cached_tokens
                self._num_from_host = output.num_host_cached_tokens
            self._hear_step(self._num_tokens - output.num_tokens_ahead)
        else:
            return
        self._has_news = True
        if stage != self._stage:
            self._stage, self._told_s = stage, -math.inf

    def _hear_step(self, num_computed: int) -> None:
        before_s, before = self._last
        self._last = self._clock(), max(0, num_computed)
        if self._first is None or num_computed < before:  # of a prompt that is computed again
            self._first, self._num_told = self._last, 0
        elif num_computed > before:
            self._estimates.costs.note(before, num_computed, self._last[0] - before_s)

    def due_in_s(self) -> float:
        """Seconds until `take` has something."""
        interval_s = _MIN_INTERVAL_S if self._has_news else INTERVAL_S
        return max(0.0, self._told_s + interval_s - self._clock())

    def take(self) -> dict[str, Any] | None:
        """The fields of the next event; None: it is not due."""
        if self.due_in_s() > 0:
            return None
        self._told_s = self._clock()
        is_new, self._has_news = self._has_news, False
        if self._stage == "preparing":
            return {"stage": "preparing", "resource": self._resource}
        if self._stage == "prefilling":
            return self._of_prompt(is_new=is_new)
        return self._of_queue()

    def _of_queue(self) -> dict[str, Any]:
        if self._position is None:
            left_s = self._expectation.left_s()
            return {"stage": "queued", "estimated_ms": round(left_s * 1e3)}
        left_s = max(0.0, self._expected_at_s - self._clock())
        return {
            "stage": "queued",
            "position": self._position,
            "estimated_ms": round(left_s * 1e3),
        }

    def _of_prompt(self, *, is_new: bool) -> dict[str, Any]:
        at_s, num_computed = self._last
        passed_s = self._clock() - at_s
        left_s = max(0.0, self._seconds(num_computed, self._num_tokens) - passed_s)
        if not is_new:
            each_s = self._seconds(num_computed, num_computed + 1)
            since = int(passed_s / each_s) if each_s > 0 else 0
            num_computed = min(self._num_tokens - 1, num_computed + since)
        self._num_told = max(self._num_told, num_computed)
        return {
            "stage": "prefilling",
            "computed_tokens": self._num_told,
            "cached_tokens": {
                "device": self._num_cached - self._num_from_host,
                "host": self._num_from_host,
            },
            "prompt_tokens": self._num_tokens,
            "tokens_per_second": round(self._rate(), 1),
            "estimated_ms": round(1e3 * left_s),
            "interpolated": self._num_told > self._last[1],
        }

    def _seconds(self, start: int, stop: int) -> float:
        """What tokens of this prompt take, by what earlier ones took; 0 if nothing is known."""
        estimates = self._estimates
        usual_s = estimates.prompt_s(start, stop)
        if self._first is None:
            return usual_s
        taken_s = self._last[0] - self._first[0]
        expected_s = estimates.prompt_s(self._first[1], self._last[1])
        return usual_s * (taken_s + _PRIOR_S) / (expected_s + _PRIOR_S)

    def _rate(self) -> float:
        """Tokens in a second: of this prompt, once two of its steps are known."""
        if self._first is not None and self._last[0] > self._first[0]:
            return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return self._estimates.rate()
