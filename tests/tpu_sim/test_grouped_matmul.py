"""The stand-in for tokamax's kernel, held against the same products row by row in numpy.

It runs in a process of its own: where JAX has computed, the engine cores that later tests fork may
stand still for ever.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.quick,
    pytest.mark.filterwarnings("default"),
]

NUM_IN, NUM_OUT = 8, 6
# Rows of five groups; two of them have none.
SIZES = (3, 0, 4, 0, 2)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def row_by_row(lhs: np.ndarray, rhs: np.ndarray, first: int) -> list[np.ndarray | None]:
    """`None` for a row whose group has no matrix here."""
    groups = [group for group, size in enumerate(SIZES) for _ in range(size)]
    return [
        row @ rhs[group - first] if 0 <= group - first < len(rhs) else None
        for row, group in zip(lhs, groups, strict=False)
    ]


class Multiply:
    """The stand-in, in another process."""

    def __init__(self, processes: ProcessPoolExecutor) -> None:
        self._processes = processes

    def __call__(self, lhs: np.ndarray, rhs: np.ndarray, **options: Any) -> np.ndarray:
        return self._processes.submit(_multiplied, lhs, rhs, options).result()


def _multiplied(lhs: np.ndarray, rhs: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    from serving.engine.tpu_sim.grouped_matmul import grouped_matmul

    return np.asarray(grouped_matmul(lhs, rhs, np.array(SIZES, np.int32), **options))


@pytest.fixture(scope="module")
def multiplied() -> Iterator[Multiply]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        yield Multiply(processes)


def test_each_row_is_multiplied_by_the_matrix_of_its_group(multiplied: Multiply) -> None:
    lhs, rhs = drawn(sum(SIZES), NUM_IN), drawn(len(SIZES), NUM_IN, NUM_OUT)
    np.testing.assert_allclose(multiplied(lhs, rhs), row_by_row(lhs, rhs, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_rows_of_groups_that_are_elsewhere_are_nothing_that_can_be_read(
    multiplied: Multiply, first: int
) -> None:
    lhs, rhs = drawn(sum(SIZES), NUM_IN), drawn(2, NUM_IN, NUM_OUT)
    offset = np.array(first, np.int32)
    zeros = multiplied(lhs, rhs, group_offset=offset)
    unread = multiplied(lhs, rhs, group_offset=offset, zero_initialize=False)
    for number, expected in enumerate(row_by_row(lhs, rhs, first)):
        if expected is None:
            assert not zeros[number].any()
            assert np.isnan(unread[number]).all()
        else:
            np.testing.assert_allclose(zeros[number], expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(unread[number], expected, rtol=1e-5, atol=1e-5)


def test_rows_behind_all_groups_are_of_none(multiplied: Multiply) -> None:
    lhs, rhs = drawn(sum(SIZES) + 3, NUM_IN), drawn(len(SIZES), NUM_IN, NUM_OUT)
    assert np.isnan(multiplied(lhs, rhs, zero_initialize=False)[sum(SIZES) :]).all()


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_scales_are_of_blocks_of_the_inputs(multiplied: Multiply, num_blocks: int) -> None:
    lhs, rhs = drawn(sum(SIZES), NUM_IN), drawn(len(SIZES), NUM_IN, NUM_OUT)
    scale = np.abs(drawn(len(SIZES), num_blocks, 1, NUM_OUT)) + 0.1
    size = NUM_IN // num_blocks
    whole = np.stack(
        [
            [rhs[group, at] * scale[group, at // size, 0] for at in range(NUM_IN)]
            for group in range(len(SIZES))
        ]
    )
    np.testing.assert_allclose(
        multiplied(lhs, rhs, rhs_scale=scale), row_by_row(lhs, whole, 0), rtol=1e-4, atol=1e-5
    )


def test_bias_and_gate(multiplied: Multiply) -> None:
    lhs, rhs = drawn(sum(SIZES), NUM_IN), drawn(len(SIZES), NUM_IN, 2 * NUM_OUT)
    bias = drawn(len(SIZES), 1, 2 * NUM_OUT)
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    whole = np.stack(row_by_row(lhs, rhs, 0)) + bias[groups, 0]  # type: ignore[arg-type]
    gate, up = whole[:, :NUM_OUT], whole[:, NUM_OUT:]
    np.testing.assert_allclose(
        multiplied(lhs, rhs, rhs_bias=bias, fuse_act="silu"),
        gate / (1 + np.exp(-gate)) * up,
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [({"fuse_act": "swigluoai"}, "swigluoai"), ({"transpose_rhs": True}, "transpose_rhs")],
)
def test_what_it_does_not_know_is_refused(
    multiplied: Multiply, options: dict[str, Any], named: str
) -> None:
    lhs, rhs = drawn(sum(SIZES), NUM_IN), drawn(len(SIZES), NUM_IN, NUM_OUT)
    with pytest.raises(NotImplementedError, match=named):
        multiplied(lhs, rhs, **options)
