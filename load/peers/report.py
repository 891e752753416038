"""The results of a comparison as data, and the tables made from it.

The data hold every observation and the cells made of them: one system's results for one workload,
with the best of its settings. A pair is a run of ours and one of a rival right after it. Machines
drift, so a ratio is taken of each pair, and then the median of the ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.load.peers.environments import OURS
from penstock.load.report.tables import table, table_of, write_report

Row: TypeAlias = dict[str, Any]

_MEDIANS = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99",
            "ready_s", "idle_memory_bytes", "client_cpu_share")  # fmt: skip
_WORKLOADS = {
    "single": "single stream",
    "c8": "8 in flight",
    "c32": "32 in flight",
    "prefill": "prompts of 2,000",
    "front128": "128 in flight",
}
_NOTES = """\
tokens/s: output tokens by wall time, median of the rounds. ratio: the system's tokens/s by those of
the penstock run right before it, median of these pairs; more than 1 means that the rival is faster.
spread: smallest and largest pair. Only ratios are worth comparing between machines, or days. CPU s:
of all processes, for 1,000 output tokens. Of several settings the one that was fastest in the first
round counts; all are in the JSON. OpenVINO runs in process: there is no HTTP, no tokenizer
and no client in its figures, in its favour. Latencies count from when a request was due."""


def counts(seen: Row) -> bool:
    return not seen["faults"] and seen["output_tokens_per_s"] > 0


def chosen_setting(observations: Iterable[Row], key: tuple[str, str, str]) -> str | None:
    """The setting that was fastest when each was first measured; it stays so for the run. `key`
    is model, workload and system."""
    first: dict[str, float] = {}
    for each in observations:
        if _key(each) == key and counts(each):
            first.setdefault(each["setting"], each["output_tokens_per_s"])
    return max(first, key=first.__getitem__, default=None)


def cells(observations: Sequence[Row]) -> list[Row]:
    """In the order of the observations, ours before rivals."""
    keys = dict.fromkeys(_key(each) for each in observations if counts(each))
    return [_cell(observations, key) for key in sorted(keys, key=lambda key: key[2] != OURS)]


def _cell(observations: Sequence[Row], key: tuple[str, str, str]) -> Row:
    model, workload, system = key
    best = _best(observations, key)
    ours = {
        each["round"]: each["output_tokens_per_s"]
        for each in _best(observations, (model, workload, OURS))
        if each["pair"] == system
    }
    ratios = [
        each["output_tokens_per_s"] / ours[each["round"]] for each in best if each["round"] in ours
    ]
    ratio = 1.0 if system == OURS else statistics.median(ratios) if ratios else None
    names = sorted({name for each in best for name in each["cpu_s_per_1k_tokens"]})
    return {
        "model": model,
        "workload": workload,
        "system": system,
        "setting": best[0]["setting"],
        "settings": best[0]["flags"],
        "repeats": len(best),
        "ratio_to_penstock": ratio,
        "ratio_min": min(ratios, default=ratio),
        "ratio_max": max(ratios, default=ratio),
        "cpu_s_per_1k_tokens": {
            name: statistics.median(each["cpu_s_per_1k_tokens"].get(name, 0.0) for each in best)
            for name in names
        },
        **{name: statistics.median(each[name] for each in best) for name in _MEDIANS},
    }


def _best(observations: Sequence[Row], key: tuple[str, str, str]) -> list[Row]:
    setting = chosen_setting(observations, key)
    return [
        each
        for each in observations
        if _key(each) == key and each["setting"] == setting and counts(each)
    ]


def _key(row: Row) -> tuple[str, str, str]:
    return row["model"], row["workload"], row["system"]


# -- the files and their tables -------------------------------------------------------------------


def write(data: Row, out: Path) -> list[Path]:
    """Write or rewrite the files; return their paths."""
    data["cells"] = cells(data["observations"])
    kind = "" if data["comparison"] == "bf16" else f"-{data['comparison']}"
    return write_report(out, f"{data['date']}-peers{kind}", markdown=markdown(data), data=data)


def markdown(data: Row) -> str:
    where, found = data["machine"], data["cells"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    parts = [
        "# Rivals side by side",
        f"{data['date']}, commit {data['commit']}. {where['cpu']}, {where['cores']} cores, "
        f"{where['memory_gib']} GiB. Client: {where['client_scheduling']}.\n\n{versions}.",
        summary(found),
        _NOTES,
    ]
    for model in dict.fromkeys(cell["model"] for cell in found):
        parts += [f"## Model {model}", _figures([each for each in found if each["model"] == model])]
    lines = [f"- {name}: {reason}" for name, reason in data["unavailable"].items()]
    parts += ["## Not available", "\n".join(lines) or "Nothing: every rival was installed."]
    if failed := list(_failed(data)):
        parts += ["## Failed, and in no figure above", "\n".join(failed)]
    return "\n\n".join(parts)


def summary(found: Sequence[Row]) -> str:
    """Tokens per second of ours, and ours by each rival's: the table in RESULTS.md."""
    systems = [name for name in dict.fromkeys(each["system"] for each in found) if name != OURS]
    by_place = {_key(each): each for each in found}
    rows = []
    for model, workload in dict.fromkeys((each["model"], each["workload"]) for each in found):
        ours = by_place.get((model, workload, OURS))
        if workload not in _WORKLOADS or ours is None:
            continue
        rivals = (by_place.get((model, workload, name), {}) for name in systems)
        ratios = [each.get("ratio_to_penstock") for each in rivals]
        row = [f"{model}, {_WORKLOADS[workload]}", f"{ours['output_tokens_per_s']:,.0f}"]
        rows.append(row + [f"{1 / ratio:.2f}×" if ratio else "–" for ratio in ratios])
    return table(["", "our tokens/s", *(f"by {name}" for name in systems)], rows)


def _figures(found: Sequence[Row]) -> str:
    """The fastest of each workload is bold; without a complete pair, none is called so."""
    ranked = sorted(found, key=lambda each: each["ratio_to_penstock"] or 0.0)
    fastest = {each["workload"]: each["system"] for each in ranked}
    order = list(dict.fromkeys(each["workload"] for each in found))

    def system(each: Row) -> str:
        mark = "**" * (fastest[each["workload"]] == each["system"])
        return f"{mark}{each['system']}{mark}"

    def spread(each: Row) -> str:
        is_ours = each["system"] == OURS or each["ratio_to_penstock"] is None
        return "–" if is_ours else f"{each['ratio_min']:.2f}–{each['ratio_max']:.2f}"

    return table_of(
        sorted(found, key=lambda each: order.index(each["workload"])),
        {
            "workload": lambda each: each["workload"],
            "system": system,
            "tokens/s": lambda each: _number(each["output_tokens_per_s"]),
            "ratio": lambda each: _number(each["ratio_to_penstock"]),
            "spread": spread,
            "TTFT ms p50": lambda each: _number(each["ttft_ms_p50"]),
            "p99": lambda each: _number(each["ttft_ms_p99"]),
            "ITL ms p50": lambda each: _number(each["itl_ms_p50"]),
            "p99 ": lambda each: _number(each["itl_ms_p99"]),
            "CPU s": lambda each: _number(sum(each["cpu_s_per_1k_tokens"].values())),
            "ready s": lambda each: _number(each["ready_s"]),
            "idle MiB": lambda each: f"{each['idle_memory_bytes'] / (1 << 20):,.0f}",
            "setting": lambda each: each["setting"],
        },
    )


def _failed(data: Row) -> Iterator[str]:
    for each in data["failures"]:
        what = ", ".join(each["workloads"])
        yield f"- {_place(each)}, {what}: {each['reason']}"
    for each in data["observations"]:
        if each["faults"]:
            faults = ", ".join(f"{fault} ×{number}" for fault, number in each["faults"].items())
            yield f"- {_place(each)}, {each['workload']}: {faults}"


def _place(each: Row) -> str:
    return f"{each['model']} {each['system']} ({each['setting']}), round {each['round'] + 1}"


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
