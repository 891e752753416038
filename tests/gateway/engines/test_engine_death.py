"""The engine dies at every point of a stream, and the stream goes on as if it had not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.chat_formats import Piece
from penstock.engine.errors import EngineDeadError
from penstock.engine.request import BeamSearch, FinishReason, Request, SamplingParams
from penstock.engine.text import OutputText, Tokenizer
from penstock.gateway.engines import engine_link
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.generation.generation import Generation, Output, collected
from penstock.gateway.sources import next_of
from penstock.gateway.telemetry.metrics import Metrics, StreamMeter

from ..conftest import ANSWER, PATIENCE_S, until
from ..fake_engine import NUM_CACHED, FakeEngine

OTHER = "Ein zweiter Text, schöner noch: 漢字."


class Link:
    """A gateway's client and a mortal engine; somebody restarts it, unless told not to."""

    def __init__(self, client: EnginePool, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.client = client
        self.engine = engine
        self.tokenizer = tokenizer
        self.restarts = True
        self._metrics = Metrics(client, "fake")

    def generation(
        self, request_id: str = "r", *, shown_text: str = "", **options: Any
    ) -> Generation:
        output_token_ids = options.pop("output_token_ids", ())
        params = SamplingParams(**{"max_tokens": 500, **options})
        return Generation(
            self.client,
            Request(
                request_id=request_id,
                prompt_token_ids=(5, 6, 7),
                output_token_ids=tuple(output_token_ids),
                sampling_params=params,
            ),
            texts=[OutputText(self.tokenizer, params) for _ in range(params.num_branches)],
            meter=StreamMeter(self._metrics),
            shown=[Piece("message", shown_text)] if shown_text else (),
        )

    async def outputs(self, request_id: str = "r", **options: Any) -> list[Output]:
        async with asyncio.timeout(PATIENCE_S):
            return (await collected([self.generation(request_id, **options)]))[0]

    async def keep_alive(self) -> None:
        num_restarts = 0
        while True:
            await asyncio.sleep(0.005)
            if self.restarts and self.engine.num_deaths > num_restarts:
                num_restarts += 1
                self.engine.restart()


Connect = Callable[..., contextlib.AbstractAsyncContextManager[Link]]


@pytest.fixture
def connect(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 1000)

    @contextlib.asynccontextmanager
    async def start(*, step_s: float = 0.0, **options: Any) -> AsyncIterator[Link]:
        address = f"{tmp_path}/engine.sock"
        client = EnginePool(address, **options)
        client.start()
        try:
            async with FakeEngine(address, tokenizer.encode(ANSWER), step_s=step_s) as engine:
                engine.scripts[1] = tokenizer.encode(OTHER)
                link = Link(client, engine, tokenizer)
                async with asyncio.timeout(PATIENCE_S):
                    await client.wait_ready()
                keeper = asyncio.create_task(link.keep_alive())
                try:
                    yield link
                finally:
                    keeper.cancel()
        finally:
            await client.close()

    return start


def facts(outputs: Sequence[Output]) -> list[tuple[str, tuple[int, ...], FinishReason]]:
    return [
        (each.text, tuple(entry.token_id for entry in each.logprobs), each.finish_reason)
        for each in outputs
    ]


async def test_one_output_goes_on_wherever_it_was_cut(connect: Connect) -> None:
    async with connect() as link:
        expected = facts(await link.outputs("whole", logprobs=0, prompt_logprobs=0))
        assert expected[0][0] == ANSWER
        for cut in range(1, len(link.engine.script) + 1):
            link.engine.dies_in = cut
            generation = link.generation(f"r{cut}", logprobs=0, prompt_logprobs=0)
            async with asyncio.timeout(PATIENCE_S):
                outputs = (await collected([generation]))[0]
            assert facts(outputs) == expected, f"cut after {cut} steps"
            assert generation.usage.output_tokens == len(link.engine.script) + 1
            assert generation.usage.cached_tokens == NUM_CACHED
            assert [entry.token_id for entry in generation.prompt_logprobs] == [6, 7]
            resumed = link.engine.submitted[f"r{cut}~1"]
            # The prompt's log-probabilities take a step of their own.
            assert resumed.output_token_ids == tuple(link.engine.script[: cut - 1])
        assert link.engine.num_deaths == len(link.engine.script)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"n": 2, "logprobs": 0}, id="n"),
        pytest.param({"n": 1, "best_of": 2, "logprobs": 0}, id="best_of"),
    ],
)
async def test_several_outputs_begin_anew_and_repeat_nothing(
    connect: Connect, options: dict[str, Any]
) -> None:
    async with connect() as link:
        link.engine.mean_logprobs[1] = -0.1
        expected = facts(await link.outputs("whole", **options))
        for cut in range(1, len(link.engine.script), 3):
            link.engine.dies_in = cut
            assert facts(await link.outputs(f"r{cut}", **options)) == expected, f"cut at {cut}"
            assert link.engine.submitted[f"r{cut}~1"].output_token_ids == ()


async def test_a_search_begins_anew(connect: Connect) -> None:
    async with connect() as link:
        options = {"n": 2, "beam_search": BeamSearch(width=2), "logprobs": 0}
        expected = facts(await link.outputs("whole", **options))
        link.engine.poison = lambda request: request.request_id == "r"
        assert facts(await link.outputs(**options)) == expected
        assert link.engine.num_deaths == 1


async def test_branches_that_are_over_are_stopped_again(connect: Connect) -> None:
    async with connect(step_s=0.002) as link:
        link.engine.scripts[1] = link.tokenizer.encode("Hm.")
        link.engine.scripts[2] = link.tokenizer.encode("So: not.")
        link.engine.dies_in = 12
        outputs = await link.outputs(n=3, stop=(": n",))
        assert [output.text for output in outputs] == [ANSWER, "Hm.", "So"]
        assert {("r~1", 1), ("r~1", 2)} <= link.engine.aborted_branches


async def test_another_answer_is_a_failure_not_a_mixture(connect: Connect) -> None:
    async with connect() as link:
        link.engine.dies_in = 8
        link.restarts = False
        task = asyncio.create_task(link.outputs(n=2))
        await until(lambda: link.engine.num_deaths == 1)
        link.engine.script = link.engine.script[3:]
        link.restarts = True
        with pytest.raises(GenerationFailedError, match="answers this request differently"):
            await task
        await until(lambda: "r~1" in link.engine.aborted)


async def test_several_deaths_are_survived(connect: Connect) -> None:
    async with connect(step_s=0.01) as link:
        link.engine.script *= 4  # so that it cannot end between two deaths
        task = asyncio.create_task(link.outputs())
        for num in range(1, 5):
            await until(lambda: sum(link.engine.num_steps.values()) >= 2)
            link.engine.kill()
            await until(lambda num=num: f"r~{num}" in link.engine.submitted)  # type: ignore[misc]
        assert (await task)[0].text == ANSWER * 4


async def test_too_many_deaths_end_it(connect: Connect) -> None:
    async with connect(step_s=0.002, max_engine_deaths=2) as link:
        task = asyncio.create_task(link.outputs(ignore_eos=True))
        for num in range(2):
            await until(lambda num=num: link.engine.num_deaths == num)  # type: ignore[misc]
            await until(lambda: sum(link.engine.num_steps.values()) >= 3)
            link.engine.kill()
        with pytest.raises(EngineDeadError, match="its connection closed"):
            await task


async def test_the_wait_for_an_engine_is_bounded(connect: Connect) -> None:
    async with connect(step_s=0.002, engine_wait_s=0.2) as link:
        link.restarts = False
        link.engine.dies_in = 3
        with pytest.raises(EngineDeadError, match="its connection closed"):
            await link.outputs()


async def test_a_cancel_while_no_engine_is_there_ends_it_at_once(connect: Connect) -> None:
    async with connect(step_s=0.002) as link:
        link.restarts = False
        link.engine.dies_in = 4
        generation = link.generation(n=2)
        task = asyncio.create_task(collected([generation]))
        await until(lambda: link.client.is_lost)
        generation.cancel()
        async with asyncio.timeout(PATIENCE_S):
            [outputs] = await task
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * 2
        assert outputs[0].text
        assert ANSWER.startswith(outputs[0].text)
        link.restarts = True
        await _has_come_back(link)
        assert list(link.engine.submitted) == ["r", "later"]


async def test_who_leaves_while_no_engine_is_there_is_not_resubmitted(connect: Connect) -> None:
    async with connect(step_s=0.002) as link:
        link.restarts = False
        link.engine.dies_in = 4
        task = asyncio.create_task(link.outputs())
        await until(lambda: link.client.is_lost)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        link.restarts = True
        await _has_come_back(link)
        assert list(link.engine.submitted) == ["r", "later"]


async def _has_come_back(link: Link) -> None:
    await until(lambda: link.client.is_alive)
    assert (await link.outputs("later"))[0].text == ANSWER


async def test_a_drain_ends_those_who_wait(connect: Connect) -> None:
    async with connect(step_s=0.002) as link:
        link.restarts = False
        link.engine.dies_in = 4
        task = asyncio.create_task(link.outputs())
        await until(lambda: link.client.is_lost)
        await link.client.drain(0.1)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await task


async def test_what_was_let_in_before_a_drain_still_enters_the_engine(connect: Connect) -> None:
    async with connect(step_s=0.002) as link:
        first = asyncio.create_task(link.outputs())
        await until(lambda: len(link.engine.submitted) == 1)
        draining = asyncio.create_task(link.client.drain(PATIENCE_S))
        await until(lambda: not link.client.is_alive)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await link.client.require_info()
        assert (await link.outputs("taken over"))[0].text == ANSWER
        await first
        await draining


async def test_a_request_that_kills_engines_is_found_among_many(connect: Connect) -> None:
    async with connect(step_s=0.005) as link:
        link.engine.poison = lambda request: request.request_id.startswith("poison")
        innocent = [asyncio.create_task(link.outputs(f"r{num}")) for num in range(6)]
        await until(lambda: len(link.engine.submitted) == 6)
        guilty = [asyncio.create_task(link.outputs(f"poison{num}")) for num in range(1)]
        later = asyncio.create_task(_later(link))
        for task in guilty:
            with pytest.raises(GenerationFailedError, match="died 3 times with this request"):
                await task
        assert [(await task)[0].text for task in innocent] == [ANSWER] * 6
        assert (await later)[0].text == ANSWER
        assert link.engine.num_deaths == 3


async def _later(link: Link) -> list[Output]:
    await until(lambda: link.engine.num_deaths >= 1)
    await until(lambda: link.client.is_alive)
    return await link.outputs("later")


# -- going on from outside -----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("speaking",), ("😀 T",), ("engine", "fake en")])
async def test_a_response_is_carried_on_from_any_cut(
    connect: Connect, stop: tuple[str, ...]
) -> None:
    async with connect() as link:
        [whole] = await link.outputs("whole", stop=stop)
        script = [*link.engine.script, 0]
        for cut in range(1, len(script)):
            params = SamplingParams(max_tokens=500, stop=stop)
            shown = OutputText(link.tokenizer, params).push(script[:cut])
            if shown.stop is not None:
                break
            generation = link.generation(
                f"r{cut}", stop=stop, output_token_ids=script[:cut], shown_text=shown.text
            )
            [[rest]] = await collected([generation])
            assert shown.text + rest.text == whole.text, f"cut at {cut}"
            assert rest.finish_reason is whole.finish_reason
            assert link.engine.submitted[f"r{cut}"].output_token_ids == tuple(script[:cut])
            num_tokens = len(generation.branches[0].token_ids)
            assert generation.usage.output_tokens == num_tokens
            assert generation.branches[0].token_ids == script[:num_tokens]
        assert cut > 3


async def test_text_that_was_not_shown_before_the_cut_comes_first(connect: Connect) -> None:
    async with connect() as link:
        generation = link.generation(output_token_ids=link.engine.script[:20], shown_text="Hel")
        with generation:
            first = await next_of(generation)
        assert first is not None
        assert first[0].text == link.tokenizer.decode(link.engine.script[:20])[3:]


@pytest.mark.parametrize(
    ("token_ids", "options", "reason"),
    [
        (["ANSWER", 0], {}, FinishReason.STOP),
        (["ANSWER", 0], {"ignore_eos": True, "stop_token_ids": (0,)}, FinishReason.STOP),
        (["ANSWER"], {"max_tokens": "all"}, FinishReason.LENGTH),
        (["ANSWER"], {"stop": ("speaking.",)}, FinishReason.STOP),
    ],
)
async def test_what_had_ended_needs_no_engine(
    connect: Connect, token_ids: list[Any], options: dict[str, Any], reason: FinishReason
) -> None:
    """Its last tokens were kept, and the word that they were the last was not."""
    async with connect() as link:
        script = link.engine.script
        ids = [token for each in token_ids for token in (script if each == "ANSWER" else [each])]
        if options.get("max_tokens") == "all":
            options = {"max_tokens": len(ids)}
        generation = link.generation(output_token_ids=ids, shown_text="Hello,", **options)
        [[rest]] = await collected([generation])
        text = ANSWER.removesuffix("speaking.") if "stop" in options else ANSWER
        assert "Hello," + rest.text == text
        assert rest.finish_reason is reason
        assert link.engine.submitted == {}


async def test_text_that_its_tokens_do_not_say_is_refused(connect: Connect) -> None:
    async with connect() as link:
        generation = link.generation(output_token_ids=link.engine.script[:20], shown_text="Other")
        with pytest.raises(GenerationFailedError, match="does not match the output tokens"):
            await collected([generation])
        assert link.engine.submitted == {}
