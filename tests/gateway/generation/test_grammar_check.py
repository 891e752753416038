"""Grammars that nobody vouches for: each is compiled once, within limits, and nobody else pays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock.engine.request import StructuredOutputs
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation import grammar_check
from penstock.gateway.generation.grammar_check import MAX_WAITING, GrammarCheck
from penstock.gateway.generation.sandbox import Sandbox, SandboxEndedError
from penstock.gateway.telemetry.metrics import Metrics

from ..conftest import PATIENCE_S, until
from ..fake_engine import INFO

# llguidance compiles it for more than five minutes.
BOMB = StructuredOutputs(
    "json_schema",
    json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]}),
)
_TOO_SLOW = "p: it takes too long to compile (more than 0.25 s)"


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(EnginePool(f"{tmp_path}/engine.sock"), "tiny")


async def count(metrics: Metrics, verdict: str) -> float:
    return sum(
        sample.value
        for family in await metrics.families()
        for sample in family.samples
        if sample.name == "penstock:grammar_checks_total" and sample.labels["verdict"] == verdict
    )


@pytest.fixture
async def check(model_path: Path, metrics: Metrics) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(model_path, metrics)
    yield check
    await check.close()


async def refusal(
    check: GrammarCheck, grammar: StructuredOutputs, tenant: str = ""
) -> RequestRefusedError | None:
    try:
        await check.check(grammar, param="p", info=INFO, tenant=tenant)
    except RequestRefusedError as error:
        return error
    return None


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs("regex", text)


REFUSED: list[tuple[StructuredOutputs, str, str]] = [
    (BOMB, "invalid_json_schema", _TOO_SLOW),
    (regex("("), "invalid_value", "p: "),
    (regex(r"[^\s\S]"), "invalid_value", "p: no output can match it"),
    (regex("(" * 100_000), "invalid_value", "p: "),
    (StructuredOutputs("lark", "start: start"), "invalid_value", "p: "),
    (StructuredOutputs("lark", "start: x"), "invalid_value", "p: "),
    (StructuredOutputs("json_schema", '{"type": "objct"}'), "invalid_json_schema", "p: "),
]


async def test_each_is_refused_by_name_and_the_next_is_served(
    check: GrammarCheck, metrics: Metrics
) -> None:
    for number, (grammar, code, message) in enumerate(REFUSED):
        error = await refusal(check, grammar)
        assert error is not None
        assert (error.status, error.code) == (400, code)
        assert error.param == ("p.type" if "objct" in grammar.text else "p")
        assert str(error).startswith(message)
        assert len(str(error)) < 500
        assert str(await refusal(check, grammar)) == str(error)
        assert await refusal(check, regex(f"a{number}")) is None
    assert len(check) == 2 * len(REFUSED)
    assert await count(metrics, "too_slow") == 2
    assert await count(metrics, "refused") == 2 * (len(REFUSED) - 1)
    assert await count(metrics, "accepted") == len(REFUSED)


@pytest.mark.process_kills
async def test_the_process_starts_when_needed_and_survives_a_bomb(check: GrammarCheck) -> None:
    assert check._sandbox is None
    assert await refusal(check, regex("a")) is None
    assert check._sandbox is not None
    process = check._sandbox._process
    assert str(await refusal(check, BOMB)) == _TOO_SLOW
    assert await refusal(check, regex("b")) is None
    assert check._sandbox._process is process
    assert process is not None
    process.kill()
    await process.wait()
    assert await refusal(check, regex("a")) is None  # known
    assert check._sandbox._process is process
    assert await refusal(check, regex("c")) is None
    assert check._sandbox._process is not process


async def test_equal_ones_are_compiled_once_for_all_who_ask(check: GrammarCheck) -> None:
    crowd = [asyncio.create_task(refusal(check, regex("a"))) for _ in range(3 * MAX_WAITING)]
    await asyncio.sleep(0)
    crowd[0].cancel()  # whoever asked first has left
    assert await asyncio.gather(*crowd[1:]) == [None] * (len(crowd) - 1)
    assert len(check) == 1


async def test_only_so_many_wait(check: GrammarCheck) -> None:
    waiting = [
        asyncio.create_task(refusal(check, regex(f"a{number}"))) for number in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)
    error = await refusal(check, regex("large"))
    assert error is not None
    assert (error.status, error.code, error.param) == (503, "server_overloaded", "p")
    assert await asyncio.gather(*waiting) == [None] * MAX_WAITING
    assert await refusal(check, regex("large")) is None


async def test_a_small_one_takes_the_place_of_a_large_one(check: GrammarCheck) -> None:
    texts = ["a" * number for number in range(1, MAX_WAITING + 1)]
    waiting = [asyncio.create_task(refusal(check, regex(text))) for text in texts]
    await asyncio.sleep(0)
    assert await refusal(check, regex("b")) is None
    *others, largest = await asyncio.gather(*waiting)
    assert others == [None] * (MAX_WAITING - 1)
    assert largest is not None
    assert largest.status == 503


async def test_a_tenant_that_fills_the_queue_locks_out_nobody_else(check: GrammarCheck) -> None:
    order = list[str]()

    async def ask(tenant: str, text: str) -> RequestRefusedError | None:
        error = await refusal(check, regex(text), tenant)
        if error is None:
            order.append(tenant)
        return error

    flood = [asyncio.create_task(ask("flood", f"a{number}")) for number in range(3 * MAX_WAITING)]
    await asyncio.sleep(0)
    large = [asyncio.create_task(ask("other", "b" * 500 + str(number))) for number in range(3)]
    assert await asyncio.gather(*large) == [None] * 3
    assert order.index("other") <= 2  # in turn with the flood, not after it
    errors = await asyncio.gather(*flood)
    assert len([error for error in errors if error is None]) >= MAX_WAITING - 3
    assert {error.status for error in errors if error is not None} == {503}


@pytest.mark.process_kills
async def test_a_process_that_stands_still_is_ended_and_nothing_is_remembered(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await refusal(check, regex("a")) is None
    assert check._sandbox is not None
    assert check._sandbox._process is not None
    psutil.Process(check._sandbox._process.pid).suspend()
    monkeypatch.setattr(Sandbox, "max_wall_s", 0.1)
    error = await refusal(check, regex("b"))
    monkeypatch.undo()
    assert error is not None
    assert (error.status, error.code) == (503, "server_overloaded")
    assert str(error) == "p: it was not compiled within 0.1 s: the server is overloaded"
    assert await refusal(check, regex("b")) is None


async def test_old_verdicts_are_dropped(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_VERDICTS", 2)
    for text in ("a", "b", "a", "c"):
        assert await refusal(check, regex(text)) is None
    assert len(check) == 2
    assert check._sandbox is not None
    await check._sandbox.close()
    assert await refusal(check, regex("a")) is None
    assert check._sandbox._process is None  # it was known
    assert await refusal(check, regex("b")) is None
    assert check._sandbox._process is not None


@pytest.mark.process_kills
async def test_a_fork_ends_with_its_process(model_path: Path) -> None:
    module, vocab_size = grammar_check.MODULE, str(INFO.vocab_size)
    sandbox = Sandbox(module, str(model_path), vocab_size, "0", "1000")
    answer = asyncio.create_task(sandbox.answer(msgspec.structs.asdict(BOMB)))
    await until(lambda: sandbox._process is not None)
    assert sandbox._process is not None
    process = psutil.Process(sandbox._process.pid)
    await until(lambda: bool(process.children()))
    (fork,) = process.children()
    process.kill()
    with pytest.raises(SandboxEndedError) as caught:
        await answer
    assert caught.value.how == "SIGKILL"
    await asyncio.to_thread(fork.wait, PATIENCE_S)
    await sandbox.close()


async def test_a_tokenizer_that_llguidance_cannot_read(tmp_path: Path, metrics: Metrics) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    check = GrammarCheck(tmp_path, metrics)
    error = await refusal(check, regex("a"))
    await check.close()
    assert error is not None
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "p")
    assert str(error).startswith("p: this model's tokenizer does not work with structured outputs")
