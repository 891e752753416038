"""`penstock bench kv`: one trace of lengths through three ways to allocate KV memory.

Only counts: no model runs, and the same seed gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from penstock.engine.errors import ConfigError
from penstock.load.arguments import add_out, counts
from penstock.load.kv import report as pages
from penstock.load.kv.report import Workload
from penstock.load.kv.schemes import ContiguousScheme, PagedScheme
from penstock.load.kv.trace import TraceSpec, cut_outputs, make_trace
from penstock.load.tables import write_report

_SPEC = TraceSpec()
_SHORT_PROMPT, _SHORT_OUTPUT = 19.0, 58.0  # means of Alpaca instructions, as in the paper
_POOL_BLOCK_SIZE = 16  # --num-blocks counts these, whatever the block sizes compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=_SPEC.num_requests, help="in the trace")
    parser.add_argument("--seed", type=int, default=_SPEC.seed, help="of the trace")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per step; 0: all at once")
    parser.add_argument(
        "--prompt-mean", type=float, default=_SPEC.prompt_mean, help="tokens, before clipping"
    )
    parser.add_argument(
        "--output-mean", type=float, default=_SPEC.output_mean, help="tokens, before clipping"
    )
    parser.add_argument(
        "--sigma", type=float, default=_SPEC.sigma, help="of the logarithm of either length"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="declared by every request")
    parser.add_argument("--max-model-len", type=int, default=2048, help="context in tokens")
    parser.add_argument(
        "--block-size", type=counts, default="8,16,32,64", help="sizes to compare, with commas"
    )
    parser.add_argument(
        "--num-blocks", type=int, default=2048, help=f"the pool, in blocks of {_POOL_BLOCK_SIZE}"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="tokens computed in one step"
    )
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Replay, print the tables and write them; 0."""
    _check(parsed)
    spec = TraceSpec(
        num_requests=parsed.requests,
        seed=parsed.seed,
        prompt_mean=parsed.prompt_mean,
        output_mean=parsed.output_mean,
        sigma=parsed.sigma,
        rate=parsed.rate or None,
    )
    short = replace(spec, prompt_mean=_SHORT_PROMPT, output_mean=_SHORT_OUTPUT)
    cases = [(spec, parsed.max_tokens), (spec, parsed.max_tokens // 2), (short, parsed.max_tokens)]
    sections, workloads = [], []
    for case, max_tokens in cases:
        workloads.append(_replay(case, max_tokens, parsed))
        sections.append(pages.markdown(workloads[-1]))
        print(sections[-1], end="\n\n", flush=True)
    block_size: int = 16 if 16 in parsed.block_size else parsed.block_size[0]
    closing = [pages.verdict(workloads[0], block_size=block_size), pages.notes()]
    print("\n\n".join(closing))
    paths = write_report(
        parsed.out,
        "kv",
        markdown="\n\n".join(["# KV memory by allocation scheme", *sections, *closing]),
        data={"workloads": [pages.figures(workload) for workload in workloads]},
    )
    picture = parsed.out / "kv.png"
    try:
        pages.draw(workloads, block_size=block_size, path=picture)
        paths.append(picture)
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
    print("\nwrote", ", ".join(map(str, paths)))
    return 0


def _replay(spec: TraceSpec, max_tokens: int, parsed: argparse.Namespace) -> Workload:
    trace = cut_outputs(make_trace(spec), max_tokens)
    budget: int = parsed.max_num_batched_tokens
    context: int = parsed.max_model_len
    contiguous = (
        ContiguousScheme("max length", lambda _: context, max_batched_tokens=budget),
        ContiguousScheme(
            "prompt + max_tokens",
            lambda request: request.num_prompt_tokens + max_tokens,
            max_batched_tokens=budget,
        ),
        ContiguousScheme(
            "prompt + exact output", lambda request: request.num_tokens, max_batched_tokens=budget
        ),
    )
    paged = [
        PagedScheme(
            block_size=block_size,
            max_tokens=max_tokens,
            max_model_len=context,
            max_batched_tokens=budget,
        )
        for block_size in parsed.block_size
    ]
    num_slots = parsed.num_blocks * _POOL_BLOCK_SIZE
    prompt = sum(request.num_prompt_tokens for request in trace) / len(trace)
    output = sum(request.num_output_tokens for request in trace) / len(trace)
    label = f"{prompt:.0f} + {output:.0f} tokens, max_tokens {max_tokens:,}"
    return Workload(
        title=f"{len(trace):,} requests of {label}, context {context:,}, pool of {num_slots:,} "
        "token slots",
        label=label,
        # The last token of an output is sampled and never computed.
        num_tokens=sum(request.num_tokens - 1 for request in trace),
        contiguous=[scheme.replay(trace, num_slots=num_slots) for scheme in contiguous],
        paged=[scheme.replay(trace, num_slots=num_slots) for scheme in paged],
    )


def _check(parsed: argparse.Namespace) -> None:
    if parsed.max_tokens < 2 * _SPEC.shortest:
        raise ConfigError(f"--max-tokens must be at least {2 * _SPEC.shortest}")
    if parsed.max_model_len < _SPEC.longest + parsed.max_tokens:
        raise ConfigError(
            f"--max-model-len must hold the longest prompt ({_SPEC.longest}) and --max-tokens"
        )
