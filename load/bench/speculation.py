"""`penstock bench speculation`: tokens per second with drafts beside those without, on the CPU.

The text decides how many drafts are right, so the models' text is known (`load.peers.cycles`). In
turns, the same requests run without and with drafts, and must get the same tokens; which is first
alternates. A figure is the median of the ratios of neighbouring runs. Prefixes are not cached.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

import msgspec
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.startup import build_core
from penstock.load.engine_runs import Lengths, Run, greedy_request, run_requests
from penstock.load.machine import commit, frozen_garbage
from penstock.load.peers import cycles, models
from penstock.load.peers.report import machine
from penstock.load.report.options import add_out, positive, settings_of
from penstock.load.report.tables import publish, table_of

Text = Literal["echo", "novel", "misled"]
# A prompt, and what the model writes after it.
KnownText: TypeAlias = tuple[list[int], list[int]]

_AGREEMENT_TOKENS = 1_500
_EDITED_EVERY = 20  # tokens of an edited prediction, of which the last is another one
_KV_BYTES = 512 << 20
_NOTES = """\
Echo: the model copies its prompt. Novel: what it writes was not there before; 4-grams: the share of
those of the output that occurred earlier in the text. Misled: novel, but the prompt has threes of
its tokens, before another one than in the output. Prediction: the request's own earlier output;
edited, every 20th token of it is another. tok/s: output tokens of a whole run, without and with
drafts, medians. Times: the median of the ratios of neighbouring runs; the bar is for that of whole
runs, decode times are of the steps after the prompt. Tokens a step: of each sequence, after the
prompt. Right: drafts that were the next token, of all.
"""


def _edited(output: Sequence[int]) -> list[int]:
    """Every 20th token is that before it."""
    return [
        output[place - 1] if place % _EDITED_EVERY == _EDITED_EVERY - 1 else token_id
        for place, token_id in enumerate(output)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is compared: the same requests without and with drafts.

    Attributes:
        method: of `--speculative-config`; empty where only a request's prediction gives drafts.
        prediction: made of the request's output; None: it has none.
        bar: the ratio that is wanted, by model.
    """

    name: str
    text: Text
    method: str = ""
    prediction: Callable[[Sequence[int]], Sequence[int]] | None = None
    num_seqs: int = 1
    bar: Mapping[str, float] = field(default_factory=dict)


def _both(bar: float) -> Mapping[str, float]:
    return {"S": bar, "M": bar}


CASES = (
    Case(name="prediction", text="novel", prediction=tuple, bar={"S": 3.0, "M": 4.0}),
    Case(name="edited prediction", text="novel", prediction=_edited),
    Case(name="echo", text="echo", method="ngram", bar=_both(2.0)),
    Case(name="novel", text="novel", method="ngram", bar=_both(0.97)),
    Case(name="misled", text="misled", method="ngram"),
    Case(name="echo, 32", text="echo", method="ngram", num_seqs=32, bar=_both(0.95)),
    Case(name="draft model", text="novel", method="draft_model", bar={"M": 1.5}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results of a case. Ratios are those with drafts to those without."""

    case: str
    model: str
    num_seqs: int
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    ratios: Sequence[float]  # of each pair of runs
    decode_ratio: float
    tokens_per_step: float
    accepted_share: float | None  # None: there were no drafts
    repeat_rate: float
    bar: float | None

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return "–"
        return f"{self.bar:.2f} {'met' if self.ratio >= self.bar else 'missed'}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=("T", "S", "M"), default=["S", "M"], help="shapes of models")
    add(
        "--only",
        nargs="+",
        choices=[case.name for case in CASES],
        default=[case.name for case in CASES],
        help="some of the comparisons",
    )
    add("--num-speculative-tokens", type=positive, default=7, help="drafts of a sequence in a step")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--output-tokens", type=positive, default=128, help="output tokens per request")
    add("--repeats", type=positive, default=5, help="pairs of runs of each comparison")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure all; print and write the table."""
    found: list[Figures] = []
    notes: list[str] = []
    for name in parsed.models:
        with ExitStack() as stack:
            cores: dict[str, EngineCore] = {}
            for case in CASES:
                if case.name not in parsed.only:
                    continue
                if case.method == "draft_model":
                    notes.append(_agreement_note(name))
                plain, drafting = (
                    cores.get(method)
                    or cores.setdefault(method, stack.enter_context(_core(name, method, parsed)))
                    for method in ("", case.method)
                )
                found.append(_measure(case, name, plain, drafting, parsed))
    where, at_commit = machine(), commit()
    title = f"{where['cpu']}, {where['cores']} cores, commit {at_commit}"
    report = "\n\n".join([title, _table(found), *notes, _NOTES])
    data = {
        "machine": where,
        "commit": at_commit,
        "settings": settings_of(parsed),
        "cases": [asdict(figures) for figures in found],
        "notes": notes,
    }
    publish(parsed.out, "speculation", "Speculation", report, data)
    return 0


@contextmanager
def _core(name: str, method: str, parsed: argparse.Namespace) -> Iterator[EngineCore]:
    """An engine with the model of this shape."""
    speculation: dict[str, str | int] = {
        "method": method, "num_speculative_tokens": parsed.num_speculative_tokens
    }  # fmt: skip
    if method == "draft_model":
        speculation["model"] = str(models.make(models.draft_of(name)))
    config = EngineConfig(
        model=ModelConfig(model=str(models.make(f"{name}-cycles"))),
        cache=CacheConfig(
            kv_cache_memory_bytes=_KV_BYTES, enable_prefix_caching=False, swap_space=0
        ),
        scheduler=SchedulerConfig(speculative_config=speculation if method else None),
        device=DeviceConfig(device="cpu", num_threads=parsed.num_threads or None),
    )
    core, _ = build_core(config)
    with closing(core):
        yield core


def _measure(
    case: Case, name: str, plain: EngineCore, drafting: EngineCore, parsed: argparse.Namespace
) -> Figures:
    """Runs without and with drafts, in turns, of other requests in each round."""
    counters = drafting.scheduler.drafting.counters
    texts = _known(case, name, parsed.output_tokens, parsed.repeats + 1)
    *rounds, warm_up = (texts[n : n + case.num_seqs] for n in range(0, len(texts), case.num_seqs))
    _run_once(case, plain, warm_up, has_drafts=False)
    _run_once(case, drafting, warm_up, has_drafts=True)
    before = asdict(counters)
    pairs: list[tuple[Run, Run]] = []
    with frozen_garbage():
        for number, texts in enumerate(rounds):
            runs = {
                has_drafts: _run_once(
                    case, drafting if has_drafts else plain, texts, has_drafts=has_drafts
                )
                for has_drafts in ((False, True) if number % 2 else (True, False))
            }
            pairs.append((runs[False], runs[True]))
    ratios = [new.output_tokens_per_s / old.output_tokens_per_s for old, new in pairs]
    steps = [step for _, new in pairs for step in new.phase("decode")]
    num_drafts = counters.num_draft_tokens - before["num_draft_tokens"]
    num_right = counters.num_accepted_tokens - before["num_accepted_tokens"]
    return Figures(
        case=case.name,
        model=name,
        num_seqs=case.num_seqs,
        plain_tokens_per_s=statistics.median(old.output_tokens_per_s for old, _ in pairs),
        tokens_per_s=statistics.median(new.output_tokens_per_s for _, new in pairs),
        ratio=statistics.median(ratios),
        ratios=ratios,
        decode_ratio=statistics.median(
            new.decode_tokens_per_s / old.decode_tokens_per_s for old, new in pairs
        ),
        tokens_per_step=sum(step.num_tokens for step in steps) / len(steps) / case.num_seqs,
        accepted_share=num_right / num_drafts if num_drafts else None,
        repeat_rate=statistics.mean(
            cycles.repeat_rate(prompt + output, len(prompt))
            for texts in rounds
            for prompt, output in texts
        ),
        bar=case.bar.get(name),
    )


def _known(case: Case, name: str, num_outputs: int, num_rounds: int) -> list[KnownText]:
    """The prompts of all rounds, each with what the model writes after it."""
    word_ids, count = models.word_ids(f"{name}-cycles"), case.num_seqs * num_rounds
    prompts = cycles.prompts_of(word_ids, count, is_echo=case.text == "echo")
    following = cycles.next_words(word_ids)
    texts = [(prompt, cycles.continuation(prompt, following, num_outputs)) for prompt in prompts]
    if case.text == "misled":
        return [(cycles.misled(prompt, output), output) for prompt, output in texts]
    return texts


def _run_once(case: Case, core: EngineCore, texts: Sequence[KnownText], *, has_drafts: bool) -> Run:
    """Raises RuntimeError if an output is not the known one."""
    requests = [
        greedy_request(index, prompt, len(output)) for index, (prompt, output) in enumerate(texts)
    ]
    if has_drafts and case.prediction is not None:
        requests = [
            msgspec.structs.replace(request, prediction_token_ids=tuple(case.prediction(output)))
            for request, (_, output) in zip(requests, texts, strict=True)
        ]
    prompt, output = texts[0]
    done = run_requests(
        core, requests, Lengths(prompt_tokens=len(prompt), output_tokens=len(output))
    )
    if [list(tokens) for tokens in done.tokens] != [output for _, output in texts]:
        raise RuntimeError(f"{case.name}: the model wrote another text than the known one")
    return done


def _agreement_note(name: str) -> str:
    return (
        f"{name}-draft's likeliest token is the next one of {name}-cycles' text in "
        f"{draft_agreement(name):.1%} of {_AGREEMENT_TOKENS:,} places."
    )


@torch.inference_mode()
def draft_agreement(name: str) -> float:
    """The share of places in a novel text where the draft model's likeliest token comes next."""
    text = cycles.long_cycle(models.word_ids(f"{name}-cycles"))[: _AGREEMENT_TOKENS + 1]
    draft = AutoModelForCausalLM.from_pretrained(models.make(models.draft_of(name)))
    token_ids = torch.tensor(text)
    likeliest = draft(token_ids[None, :-1]).logits[0].argmax(-1)
    return float((likeliest == token_ids[1:]).float().mean())


def _table(found: Sequence[Figures]) -> str:
    columns: dict[str, Callable[[Figures], str]] = {
        "case": lambda each: f"{each.model} {each.case}",
        "streams": lambda each: f"{each.num_seqs}",
        "4-grams": lambda each: f"{each.repeat_rate:.1%}",
        "tok/s": lambda each: f"{each.plain_tokens_per_s:,.1f}",
        "with drafts": lambda each: f"{each.tokens_per_s:,.1f}",
        "times": lambda each: f"{each.ratio:.2f}",
        "spread": lambda each: f"{min(each.ratios):.2f}–{max(each.ratios):.2f}",
        "decode times": lambda each: f"{each.decode_ratio:.2f}",
        "tokens a step": lambda each: f"{each.tokens_per_step:.2f}",
        "right": lambda each: "–" if each.accepted_share is None else f"{each.accepted_share:.0%}",
        "bar": lambda each: each.verdict,
    }
    return table_of(found, columns)
