"""The table of how long streams stood still."""

import pytest

from benchmarks import pause_report
from benchmarks.pause import Pause

PAGE = "before\n<!-- begin: measured -->stale<!-- end: measured -->\nafter\n"
PAUSES = [Pause((0.2, 0.3), 0.04, 0.05), Pause((0.1, 0.1), 0.06, 0.07)]


def test_page_has_every_kill_and_the_medians() -> None:
    text = pause_report.updated(PAGE, PAUSES, "0123abc")
    assert text.startswith("before\n<!-- begin: measured -->\nMeasured on ")
    assert text.endswith("<!-- end: measured -->\nafter\n")
    assert " at 0123abc, " in text
    assert "| 1 | 250 / 300 | 40 | 50 |" in text
    assert "| 2 | 100 / 100 | 60 | 70 |" in text
    assert "| median | longest: 200 | | 60 |" in text
    assert "stale" not in text


def test_page_without_its_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        pause_report.updated("nothing here", PAUSES, "0123abc")
