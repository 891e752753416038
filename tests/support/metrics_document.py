"""Writes the tables of `gateway/METRICS.md` from the metrics' declarations (`make documents`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from prometheus_client.core import Metric

from penstock.engine.protocol.messages import EngineStats
from penstock.gateway import app, shared_state
from penstock.gateway.storage.redis.health import RedisHealth
from penstock.gateway.telemetry.metrics import Metrics
from penstock.gateway.telemetry.request_record import RequestRecord
from penstock.gateway.telemetry.worker_metrics import Workers

PAGE = Path(__file__).resolve().parents[2] / "gateway" / "METRICS.md"
_MARK = "<!-- `make documents` writes the rest of this page. -->\n"
_OF_ALL_SERIES = {"model_name", "le"}
_WITH_ALL_VALUES = {"tier", "state", "direction", "kind"}  # each value has a sample from the start


async def written() -> str:
    """The page as it should be: its own text as it is, and new tables."""
    text, mark, _ = PAGE.read_text("utf-8").partition(_MARK)
    assert mark, f"{PAGE} lacks the line {_MARK!r}"
    own, of_engine = await _declared()
    tables = f"## Of a gateway\n\n{_table(own)}\n\n## Of an engine\n\n{_table(of_engine)}\n"
    return f"{text}{mark}\n{tables}"


async def _declared() -> tuple[list[Metric], list[Metric]]:
    """The metrics of a gateway among several with Redis, and those of an engine. What has labels
    is observed once, since a family without a series does not tell its labels."""
    info = SimpleNamespace(quantization="", weight_bytes=0)
    stats = EngineStats(num_accepted_tokens_per_pos_total=(0,))
    link = SimpleNamespace(stats=stats, info=info, since_step_s=0, is_usable=True)
    client: Any = SimpleNamespace(links=[link], info=info)
    metrics = Metrics(client, "")
    app._watch(
        metrics, admission=MagicMock(), service=MagicMock(), grammars=MagicMock(), log=MagicMock()
    )
    shared_state.watch_redis(metrics, RedisHealth(), _yes)
    metrics.count_finished("")
    metrics.count_refused("")
    metrics.count_grammar("")
    metrics.count_request(MagicMock(spec=RequestRecord, method="", route="", status=0))
    metrics.tokens_of("")
    families = [each for each in await metrics.families() if each.name.startswith("penstock:")]
    of_engine = {each.name for each in metrics._engine.collect()}
    workers = await Workers("", index=0, num=1).join([])
    return (
        [*(each for each in families if each.name not in of_engine), *workers],
        [each for each in families if each.name in of_engine],
    )


async def _yes() -> bool:
    return True


def _table(families: Iterable[Metric]) -> str:
    rows = sorted(
        f"| `{each.name}{'_total' * (each.type == 'counter')}` | {each.type} |{_labels(each)}| "
        f"{each.documentation.removesuffix('.')} |"
        for each in families
    )
    return "\n".join(("| metric | type | labels | |", "|---|---|---|---|", *rows))


def _labels(family: Metric) -> str:
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label in sample.labels.keys() - _OF_ALL_SERIES:
            values.setdefault(label, {})[sample.labels[label]] = None
    text = "; ".join(_label(name, values[name]) for name in sorted(values))
    return f" {text} " if text else " "


def _label(name: str, values: Iterable[str]) -> str:
    known = [f"`{value}`" for value in values if name in _WITH_ALL_VALUES]
    return f"`{name}`: {', '.join(known)}" if known else f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(asyncio.run(written()), encoding="utf-8")
