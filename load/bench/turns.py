"""`penstock bench turns`: how much a conversation's history slows down its next turn.

Conversations share one system prompt and run one at a time. After each, a request without history
is sent that has as many new tokens as the last turn. If the history is cached and found quickly,
both take nearly as long to their first token: only attention over the history remains.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path

import uvloop

from penstock.engine.config import DEMO_MODEL, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.model_files import resolve_model
from penstock.load.client.records import Dialogue, StreamRecord, Turn
from penstock.load.launch import server
from penstock.load.report.options import add_out, settings_of
from penstock.load.report.summary import ttft_ms
from penstock.load.report.tables import publish, table_of
from penstock.load.workloads.datasets import (
    Conversations,
    Lengths,
    PromptMaker,
    Words,
    load_tokenizer,
)
from penstock.load.workloads.driver import ClosedLoop
from penstock.load.workloads.driver import run as drive
from penstock.load.workloads.measure import ServerPages
from penstock.load.workloads.options import WARM_UP_SEED, Wire

_BAR = 1.2
_NUM_WARM_UPS = 4
_NOTES = """\
Medians over all conversations. New: tokens of the prompt that were not cached, as the server counts
them. The request without a past comes after each conversation; the ratio is of neighbours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", help="a running server; default: start one")
    add("--model", help=f"default: {DEMO_MODEL}, or the first that the server lists")
    add("--tokenizer", type=Path, help="model directory; default: the started server's")
    add("--endpoint", choices=("chat", "responses"), default="chat", help="API to use")
    add(
        "--history",
        choices=("full", "previous_response_id"),
        default="full",
        help="how later turns refer to earlier ones",
    )
    add("--conversations", type=int, default=16, help="number of measured conversations")
    add("--turns", type=int, default=4, help="turns per conversation")
    add("--prefix-len", type=int, default=512, help="tokens of the system prompt")
    add("--input-len", type=int, default=32, help="tokens of a user's message")
    add("--output-len", type=int, default=32, help="tokens of an answer")
    add("--seed", type=int, default=0, help="seed of everything random")
    add("flags", nargs="*", help="flags for the started server, after --")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the table; return 1 if a stream had a fault."""
    if min(parsed.conversations, parsed.prefix_len, parsed.input_len, parsed.output_len) < 1:
        raise ConfigError("--conversations and all lengths must be at least 1")
    if parsed.turns < 2:
        raise ConfigError("--turns must be at least 2: the first turn has no history")
    wire = Wire(endpoint=parsed.endpoint, history=parsed.history, extra={"temperature": 0})
    with _server(parsed) as target:
        records = uvloop.run(_measure(target, wire, parsed))
    for record in records:
        for fault in record.faults:
            print(f"turn {record.turn + 1} was {fault}: {record.detail}")
    if not all(record.is_clean for record in records):
        return 1
    turns = _sort(records, parsed.turns)
    title = f"{target.model}, {wire.endpoint}, history: {wire.history}"
    data = {
        "settings": settings_of(parsed),
        "model": target.model,
        "ratio": ratio(turns),
        "turns": [asdict(turn) for turn in turns],
    }
    report = f"{title}\n\n{markdown(turns)}"
    publish(parsed.out, "turns", "Turns of a conversation", report, data)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The measured server; `prompts` use its tokenizer if it is known."""

    base_url: str
    model: str
    prompts: PromptMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """The same turn of all conversations, or the requests without history."""

    name: str
    prompt_tokens: Sequence[int]
    new_tokens: Sequence[int]  # of the prompt, those that were not cached
    ttft_ms: Sequence[float]


@contextmanager
def _server(parsed: argparse.Namespace) -> Iterator[Target]:
    """The named server, or one that runs until the end of the block."""
    directory = parsed.tokenizer
    if parsed.base_url is not None:
        model = parsed.model or ServerPages(parsed.base_url).first_model()
        yield _target(parsed.base_url, model, directory)
        return
    model = parsed.model or DEMO_MODEL
    directory = directory or resolve_model(ModelConfig(model=model), weights=False)
    with server(model, parsed.flags) as started:
        yield _target(started.base_url, model, directory)


def _target(base_url: str, model: str, directory: Path | None) -> Target:
    prompts = Words(load_tokenizer(directory) if directory else None)
    return Target(base_url=base_url, model=model, prompts=prompts)


async def _measure(target: Target, wire: Wire, parsed: argparse.Namespace) -> list[StreamRecord]:
    """Run conversations (even dialogues), each followed by its request without history.

    A warm-up first finds how much longer that request must be than a user's text: the chat template
    and the answer before add tokens to a turn, and a beginning shared with others is cached.
    """
    async with wire.open(target.base_url) as transport:

        async def hold(dialogues: Sequence[Dialogue]) -> list[StreamRecord]:
            result = await drive(
                transport,
                dialogues,
                arrivals=ClosedLoop(1),
                model=target.model,
                history=wire.history,
                extra=wire.extra,
            )
            return result.records

        warm_up = _dialogues(target, parsed, num=_NUM_WARM_UPS, seed=WARM_UP_SEED)
        warmed = await hold(warm_up)
        if not all(record.is_clean for record in warmed):
            return warmed
        *_, last, alone = _sort(warmed, parsed.turns)
        num_more = max(map(sub, last.new_tokens, alone.new_tokens))
        return await hold(
            _dialogues(
                target, parsed, num=parsed.conversations, seed=parsed.seed, num_more=num_more
            )
        )


def _dialogues(
    target: Target, parsed: argparse.Namespace, *, num: int, seed: int, num_more: int = 0
) -> list[Dialogue]:
    """Conversations, each followed by a request with `num_more` more tokens than a turn."""
    conversations = Conversations(
        num_dialogues=num,
        num_turns=parsed.turns,
        system_len=parsed.prefix_len,
        input_len=Lengths.fixed(parsed.input_len),
        output_len=Lengths.fixed(parsed.output_len),
        seed=seed,
    ).make(target.prompts)
    rng = random.Random(f"turns {seed}")
    found = []
    for conversation in conversations:
        text = target.prompts.draw(rng, max(1, parsed.input_len + num_more))
        alone = Dialogue(turns=(Turn(text=text, max_tokens=parsed.output_len),))
        found += [conversation, alone]
    return found


def _num_new(record: StreamRecord) -> int:
    """Prompt tokens that had to be computed; all of them where the server does not report cached
    ones."""
    return record.prompt_tokens - max(record.cached_tokens, 0)


def _sort(records: Sequence[StreamRecord], num_turns: int) -> list[TurnTimes]:
    """The times by turn; the requests without history come last."""
    groups = {
        f"turn {number + 1}": [
            record for record in records if record.dialogue % 2 == 0 and record.turn == number
        ]
        for number in range(num_turns)
    }
    groups["new tokens alone"] = [record for record in records if record.dialogue % 2]
    return [
        TurnTimes(
            name=name,
            prompt_tokens=[record.prompt_tokens for record in group],
            new_tokens=[_num_new(record) for record in group],
            ttft_ms=[ttft_ms(record) for record in group],
        )
        for name, group in groups.items()
    ]


# -- what is said of it -----------------------------------------------------------------------


def ratio(turns: Sequence[TurnTimes]) -> float:
    """TTFT of the last turn ÷ TTFT without history: the median over neighbouring pairs."""
    *_, last, alone = turns
    pairs = zip(last.ttft_ms, alone.ttft_ms, strict=True)
    return statistics.median(with_past / without for with_past, without in pairs)


def markdown(turns: Sequence[TurnTimes]) -> str:
    shown = table_of(
        turns,
        {
            "": lambda turn: turn.name,
            "prompt tokens": lambda turn: f"{statistics.median(turn.prompt_tokens):,.0f}",
            "new": lambda turn: f"{statistics.median(turn.new_tokens):,.0f}",
            "TTFT ms": lambda turn: f"{statistics.median(turn.ttft_ms):.1f}",
            "min–max": lambda turn: f"{min(turn.ttft_ms):.1f}–{max(turn.ttft_ms):.1f}",
        },
    )
    verdict = (
        f"To its first token, {turns[-2].name} takes {ratio(turns):.2f} times as long as its new "
        f"tokens alone (bar: at most {_BAR})."
    )
    return "\n\n".join([shown, verdict, _NOTES])
