"""`penstock bench soak`: minutes of mixed and hostile traffic, and a verdict.

Streams of every kind, conversations, clients that leave, cancel, read slowly or not at all, crowds,
nonsense, garbage and broken frames, all drawn from one seed. The exit code is 1 unless the verdict
is clean.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Iterator

from penstock.engine.errors import ConfigError
from penstock.load.arguments import add_out
from penstock.load.soak.course import Plan, soak
from penstock.load.soak.report import draw_soak, report_figures, report_text
from penstock.load.soak.target import Target, given_server, own_server, synthetic_server
from penstock.load.soak.verdict import Bounds, findings
from penstock.load.tables import write_report

_REDIS_CONNECTIONS = 128  # that a gateway keeps open once it had to open them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("server", "one of these; by default the demo model")
    which = servers.add_mutually_exclusive_group()
    which.add_argument("--base-url", help="a server that runs already")
    which.add_argument("--model", help="start a penstock server of this model")
    which.add_argument(
        "--synthetic",
        nargs="?",
        const="",
        metavar="FLAGS",
        help="start the synthetic server, to try soak itself; FLAGS as '--fault lose:5'",
    )
    servers.add_argument("--serve-flags", default="", help="further flags of the server started")
    servers.add_argument("--api-key", help="sent with every request")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--minutes", type=float, default=10.0, help="how long")
    traffic.add_argument("--concurrency", type=int, default=8, help="clients at once, at least")
    traffic.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    switch = argparse.BooleanOptionalAction
    traffic.add_argument(
        "--resumes", action=switch, default=True, help="drop connections and resume"
    )
    traffic.add_argument("--cancels-by-id", action=switch, default=True, help="over HTTP")
    traffic.add_argument(
        "--kills",
        action=switch,
        help="kill the engine of the server started, and in turn with it a gateway where there are "
        "several (of the synthetic one: all), which must be back within a minute; by default so, "
        "but not with --base-url",
    )
    traffic.add_argument(
        "--attack",
        action="store_true",
        help="kills, freezes of gateways, engine and Redis, floods, silent handshakes, a log that "
        "is not read, and 4 MB prompts, one after the other; the server started has two gateways "
        "and a Redis of its own",
    )
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument(
        "--max-memory-growth",
        type=float,
        default=Bounds().memory_kib_per_min,
        metavar="KIB_PER_MIN",
        help="of one process after the warm-up, the first third",
    )
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Soak; print and write the report; 1 unless the verdict is clean.

    Raises:
        ConfigError: the settings make no sense, or the server did not start.
    """
    if parsed.minutes <= 0 or parsed.concurrency < 1:
        raise ConfigError("--minutes and --concurrency must be more than 0")
    if parsed.serve_flags and (parsed.base_url is not None or parsed.synthetic is not None):
        raise ConfigError("--serve-flags is for a penstock server that soak starts")
    if parsed.kills and parsed.base_url is not None:
        raise ConfigError("--kills is for a server that soak starts, not for --base-url")
    if parsed.attack and (parsed.base_url is not None or parsed.kills is False):
        raise ConfigError("--attack is for a server that soak starts, and has kills")
    plan = Plan(
        duration_s=parsed.minutes * 60,
        concurrency=parsed.concurrency,
        seed=parsed.seed,
        has_resumes=parsed.resumes,
        has_cancels_by_id=parsed.cancels_by_id,
        has_kills=parsed.base_url is None if parsed.kills is None else parsed.kills,
        is_attack=parsed.attack,
        api_key=parsed.api_key,
    )
    has_redis = parsed.attack or "--redis-url" in parsed.serve_flags
    spare = _REDIS_CONNECTIONS if has_redis else 0
    bounds = Bounds(
        memory_kib_per_min=parsed.max_memory_growth,
        spare_descriptors=Bounds().spare_descriptors + spare,
    )
    # So that a soak that is terminated ends what it started, and wakes what it froze: asyncio
    # cancels the main task at SIGINT, if its handler is this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with _target(parsed) as target:
        attack = " under attack" if plan.is_attack else ""
        clients = f"{plan.concurrency} clients at once{attack}"
        title = f"{parsed.minutes:g} minutes of {clients}: {target.name}"
        print(title, flush=True)
        evidence = asyncio.run(soak(target, plan, bounds))
    found = findings(evidence, bounds)
    report = report_text(evidence, bounds, found)
    print(f"\n{report}")
    figures = {"title": title, "seed": plan.seed, **report_figures(evidence, bounds, found)}
    paths = write_report(
        parsed.out, "soak", markdown=f"# Soak\n\n{title}\n\n{report}", data=figures
    )
    if parsed.plot:
        paths.append(parsed.out / "soak.png")
        draw_soak(evidence, found, title=title, path=paths[-1])
    print("\nwrote", ", ".join(map(str, paths)))
    return int(bool(found))


@contextlib.contextmanager
def _target(parsed: argparse.Namespace) -> Iterator[Target]:
    if parsed.base_url is not None:
        yield given_server(parsed.base_url)
    elif parsed.synthetic is not None:
        with synthetic_server(parsed.synthetic) as target:
            yield target
    else:
        with own_server(parsed.model, parsed.serve_flags, is_attacked=parsed.attack) as target:
            yield target
