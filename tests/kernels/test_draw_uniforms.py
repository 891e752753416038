"""The draw: known answers, and that it depends on nothing but its three arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.kernels.draw_uniforms import draw_uniforms as draw
from penstock.kernels.reference.draw_uniforms import as_draws, philox

# From Random123's known-answer tests (kat_vectors, philox4x32, 10 rounds).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def draw_uniforms(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    return draw(as_draws(seeds, indices, positions)).numpy()


def draw_uniform(seed: int, index: int, position: int) -> float:
    return float(draw_uniforms([seed], [index], [position])[0])


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    assert philox(words(counter), words(key)) == words(answer)


@pytest.mark.parametrize(
    ("arguments", "uniform"),
    [
        ((0, 0, 0), 0xE169C58D6627E8D5 / 2**64),
        ((1, 0, 0), 0.8946847163350924),
        ((2**64 - 1, 3, 12345), 0.3066777163941772),
    ],
)
def test_draw_known_answers(arguments, uniform):
    """Changing these numbers changes every seeded output: a new major version."""
    assert draw_uniform(*arguments) == pytest.approx(uniform, abs=1e-15)


def test_each_argument_counts():
    arguments = [(7, 0, 5), (8, 0, 5), (7, 1, 5), (7, 0, 6), (7 + (1 << 32), 0, 5)]
    assert len({draw_uniform(*each) for each in arguments}) == len(arguments)


def test_rows_are_independent():
    rows = [(seed, index, position) for seed in (0, 9) for index in (0, 1) for position in (3, 4)]
    together = draw_uniforms(*zip(*rows, strict=True))
    assert together.tolist() == [draw_uniform(*row) for row in rows]


def test_uniform_over_seeds_and_positions():
    for draws in (
        draw_uniforms(range(20_000), [0] * 20_000, [11] * 20_000),
        draw_uniforms([3] * 20_000, [0] * 20_000, range(20_000)),
    ):
        assert draws.min() >= 0
        assert draws.max() < 1
        assert draws.mean() == pytest.approx(0.5, abs=0.01)
        assert draws.std() == pytest.approx(12**-0.5, abs=0.005)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
