"""The end of a host whose run is limited, told from its start."""

from pathlib import Path

import pytest

from serving.domain.slice_lifecycle import EndCause
from serving.slices.expiry import (
    CREATION_TO_BOOT_S,
    STARTED_AT_VARIABLE,
    BootTimeError,
    expiry_notice,
    started_at_s,
)
from serving.slices.notices import plan_drain

DAY_S = 86_400.0


def test_slice_drains_shortly_before_its_run_is_over_and_has_expired_then() -> None:
    notice = expiry_notice(2, started_s=1000.0, max_run_duration_s=7 * DAY_S)
    assert notice.deadline_s == 1000.0 + 7 * DAY_S
    assert plan_drain([notice], 120.0, notice.deadline_s - 121.0) is None
    order = plan_drain([notice], 120.0, notice.deadline_s - 119.0)
    assert order is not None
    assert (order.cause, order.deadline_s) == (EndCause.EXPIRED, notice.deadline_s)
    assert "host 2: its run of 604800 s is over at 1970-01-08 00:16:40 UTC" in order.reason


def test_start_is_before_the_boot_that_the_kernel_tells(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3\nbtime 5000\nprocesses 7\n")
    assert started_at_s({}, stat) == 5000.0 - CREATION_TO_BOOT_S


def test_this_machine_tells_its_boot() -> None:
    assert started_at_s({}) > 0


def test_simulated_host_says_itself_when_it_was_started(tmp_path: Path) -> None:
    assert started_at_s({STARTED_AT_VARIABLE: "1234.5"}, tmp_path / "nothing") == 1234.5


@pytest.mark.parametrize("text", ["", "btime\n", "btime soon\n"])
def test_host_that_does_not_tell_is_an_error(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    with pytest.raises(BootTimeError, match="tells no boot time"):
        started_at_s({}, stat)
