"""The provisioner's benchmark: its table, and a run of few slices."""

import os

import pytest

from benchmarks.provisioner import Phase, Run, measure
from benchmarks.provisioner_cluster import RECORDING
from benchmarks.provisioner_report import REPORT, table, updated
from tests.control_plane.assets import missing_binaries, missing_crds
from tests.needs import CRDS, do_without


def made(peak_mib: float, cpu_s: float, wish_s: list[float]) -> Run:
    phase = Phase(600.0, cpu_s, peak_mib)
    return Run(4000, 20_000, phase, phase, 100.0, 3.0, {}, phase, wish_s, phase, phase, 40, 9_000)


def test_table_has_the_median_and_the_range() -> None:
    runs = [made(150.0, 3.0, [0.5]), made(170.0, 6.0, [0.1, 0.9]), made(160.0, 9.0, [1.2])]
    lines = table(runs).splitlines()
    assert "| peak memory of the process, MiB | 160 (150 to 170) |" in lines
    assert "| CPU while idle, of one core | 1.00% (0.50% to 1.50%) |" in lines
    assert "| API calls per minute while idle | 3.0 |" in lines
    assert "| a wish to the changed count, s, 4 wishes | 0.70 (0.10 to 1.20) |" in lines


def test_page_keeps_what_is_written_by_hand() -> None:
    page = REPORT.read_text(encoding="utf-8")
    anew = updated(page, "Measured somewhere.", [made(150.0, 3.0, [0.5])])
    assert anew.split("<!-- begin")[0] == page.split("<!-- begin")[0]
    assert anew.split("end: measured -->")[1] == page.split("end: measured -->")[1]
    assert "Measured somewhere." in anew
    with pytest.raises(ValueError, match="begin: measured"):
        updated("no table", "somewhere", [])


@pytest.mark.process
@pytest.mark.long
async def test_small_run_has_every_figure() -> None:
    reason = missing_binaries(os.environ) or missing_crds(CRDS)
    if reason is not None:
        do_without(reason)
    if not RECORDING.is_file():
        pytest.skip(f"there is no {RECORDING}: recordings are reference data beside the repository")
    told: list[str] = []
    run = await measure(told.append, num_slices=6, idle_s=1.0, num_wishes=2)
    assert run.num_pods == 24
    # As large as those of a cluster, or the figures say nothing.
    assert run.pod_bytes > 15_000
    assert len(run.wish_s) == 2
    assert run.start.peak_mib > 0
    # Of every part that it shows beside its own work something was read.
    assert run.num_scrapes >= 1
    assert run.page_bytes > 1_000
    assert [line.split(":")[0] for line in told[1:]] == [
        "start",
        "idle",
        "wishes",
        "relist",
        "touched",
    ]
