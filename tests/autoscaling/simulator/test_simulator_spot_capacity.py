"""Series of capacity: reading, cutting, generating, and what was fitted."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import ks_2samp  # type: ignore[import-untyped]

from autoscaling.simulator.world.spot_capacity import (
    REGIMES,
    CapacitySeries,
    Regime,
    SpotTraceError,
    generate,
    read_spot_trace,
)

TRACES = (
    Path(__file__).parents[3]
    / "../shared/data/traces/spot-traces/availability/1-node/aws-02-15-2023"
)
FITTED_TO = {"calm": "us-west-2b", "flapping": "us-east-2a", "dry": "us-east-1a"}


def write_trace(path: Path, data: object, gap: object = 30) -> Path:
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap, "zone": "z"}, "data": data}))
    return path


def test_trace_becomes_steps_scaled_to_the_most(tmp_path: Path) -> None:
    series = read_spot_trace(write_trace(tmp_path / "t.json", [2, 2, 0, 1, 1, 2]), 10).capacity
    assert series.times_s == (0.0, 60.0, 90.0, 150.0)
    assert series.slices == (10, 0, 5, 10)


@pytest.mark.parametrize(
    ("data", "gap", "message"),
    [
        ([], 30, "data"),
        ([1, -1], 30, r"data\.1 is -1"),
        ([1], 0, r"metadata\.gap_seconds is 0"),
        ("up", 30, "data is 'up'"),
    ],
)
def test_trace_that_makes_no_sense_is_refused(
    tmp_path: Path, data: object, gap: object, message: str
) -> None:
    with pytest.raises(SpotTraceError, match=message):
        read_spot_trace(write_trace(tmp_path / "t.json", data, gap), 10)


def test_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("up up down")
    with pytest.raises(SpotTraceError, match="cannot be read"):
        read_spot_trace(tmp_path / "t.json", 10)


@pytest.mark.parametrize(
    ("times_s", "slices"), [((1.0,), (1,)), ((0.0, 0.0), (1, 2)), ((0.0,), (-1,)), ((), ())]
)
def test_series_out_of_order_is_refused(
    times_s: tuple[float, ...], slices: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="must"):
        CapacitySeries(times_s, slices)


def test_window_says_what_the_series_says_at_the_same_instants() -> None:
    series = CapacitySeries((0.0, 10.0, 20.0, 30.0), (4, 0, 2, 4))
    window = series.window(15.0, 15.0)
    assert [window.at(after_s) for after_s in (0.0, 4.9, 5.0, 14.9)] == [0, 0, 2, 2]
    assert [series.at(15.0 + after_s) for after_s in (0.0, 4.9, 5.0, 14.9)] == [0, 0, 2, 2]
    assert window.times_s[0] == 0


@pytest.mark.parametrize("name", sorted(REGIMES))
def test_generated_capacity_is_plenty_as_often_as_the_regime_says(name: str) -> None:
    regime = REGIMES[name]
    mean_s = regime.plenty.mean_s + regime.scarcity.mean_s
    span_s = 3000 * mean_s
    series = generate(regime, 40, seed=5, span_s=span_s)
    lengths_s = np.diff([*series.times_s, span_s])
    share = lengths_s[np.array(series.slices) == 40].sum() / span_s
    assert share == pytest.approx(regime.plenty.mean_s / mean_s, abs=0.05)
    drops = [slices for slices in series.slices if slices < 40]
    is_total = np.mean([slices == 0 for slices in drops])
    assert is_total == pytest.approx(regime.total_drop_share, abs=0.05)


def test_generated_capacity_depends_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (generate(REGIMES["dry"], 40, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def complete_runs(
    series: CapacitySeries,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lengths in seconds of the runs at full capacity, and of those below it."""
    is_full = np.array(series.slices) == max(series.slices)
    firsts = np.flatnonzero(np.diff(is_full, prepend=not is_full[0]))
    lengths_s = np.diff(np.array(series.times_s)[firsts])[1:]
    kinds = is_full[firsts][1:-1]
    return lengths_s[kinds], lengths_s[~kinds]


@pytest.mark.parametrize("name", sorted(FITTED_TO))
def test_generated_runs_last_as_long_as_those_of_the_trace_they_were_fitted_to(name: str) -> None:
    path = TRACES / f"{FITTED_TO[name]}_v100_1.json"
    if not path.exists():
        pytest.skip("the spot traces carry no licence and are read where they are present only")
    trace = complete_runs(read_spot_trace(path, 1).capacity)
    regime: Regime = REGIMES[name]
    rng = np.random.default_rng(0)
    for lengths_s, law in zip(trace, (regime.plenty, regime.scarcity), strict=True):
        drawn_s = law.draw(50_000, rng)
        assert drawn_s.mean() == pytest.approx(lengths_s.mean(), rel=0.15)
        # The largest distance of the two distributions. Runs of the trace are multiples of 195 s,
        # 585 at least, which alone keeps it above 0.1.
        assert ks_2samp(lengths_s, drawn_s).statistic < 0.18
