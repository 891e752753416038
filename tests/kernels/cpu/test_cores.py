"""Which cores a rank gets on a machine with several NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kernels.cpu.cores import cpus_of_rank, read_nodes


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [{0, 1, 2, 3, 4, 5}]),
        (2, [{0, 1, 2}, {3, 4, 5}]),
        (3, [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}]),
        (4, [{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {3, 4, 5}]),
    ],
)
def test_ranks_share_the_nodes(num_ranks: int, expected: list[set[int]]) -> None:
    nodes = [{0, 1, 2}, {3, 4, 5}]
    assert [cpus_of_rank(rank, num_ranks, nodes) for rank in range(num_ranks)] == expected


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name, cpus in {
        "node0": "0-2,8\n",
        "node2": "4\n",
        "node10": "5-6\n",
        "node1": "\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    (tmp_path / "possible").write_text("0-10")
    assert read_nodes(tmp_path) == [{0, 1, 2, 8}, set(), {4}, {5, 6}]
