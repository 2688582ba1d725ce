"""What the directory publishes of slices, and of which moment. Ray is stood in for."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kuberay.ray_by_hand import RayByHand, standing_in

from serving.directory import survey_loop
from serving.directory.allocator import SliceAllocator
from serving.directory.survey_loop import SurveyLoop, pause_s
from serving.domain.inventory import Slice
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import FaultCause
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.records import decode_supply
from tests.supply_builders import hosts_of, life

KEYS = SupplyKeys("slicewise")
HOSTS = hosts_of("s-0", num_free_chips=0)
LEAVING = life("r1", HOSTS, SliceState.DRAINING, drain_deadline_s=9.0)
HELD = life("r1", HOSTS)
WAITING = life("r1", at_s=10.0)


class RayThatTakesTime(RayByHand):
    """Something happens while the faults are stored."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.meanwhile: Callable[[], None] = lambda: None

    def internal_kv_put(self, key: bytes, *arguments: Any, **options: Any) -> int:
        if key == KEYS.faults:
            self.meanwhile()
        return super().internal_kv_put(key, *arguments, **options)


@pytest.fixture
def ray() -> Iterator[RayThatTakesTime]:
    found = RayThatTakesTime()
    with standing_in(found, "slicewise"):
        yield found


@pytest.mark.parametrize(
    ("before", "after", "published"),
    [
        pytest.param(LEAVING, WAITING, (1, 0), id="it would be counted twice"),
        pytest.param(WAITING, HELD, (0, 1), id="it would not be counted"),
    ],
)
async def test_report_is_of_one_moment(
    ray: RayThatTakesTime,
    monkeypatch: pytest.MonkeyPatch,
    before: SliceRecord,
    after: SliceRecord,
    published: tuple[int, int],
) -> None:
    """A slice was bought for a replica that had lost its own and was listed as leaving it too."""
    monkeypatch.setattr(survey_loop, "_SETTLING_S", 0.0)
    lives = [before]
    survey = SurveyLoop(
        "d", KEYS, SliceAllocator(), lambda: tuple(lives), lambda _: None, lambda _: None
    )
    await survey.look()
    survey.book.note_failure(Slice("s-0", tuple(HOSTS)), frozenset(), FaultCause.HOST, "gone", 1.0)

    def goes_on() -> None:
        lives[0] = after

    ray.meanwhile = goes_on
    await survey.look()
    assert lives == [after]
    text = ray.internal_kv_get(KEYS.supply)
    assert text is not None
    report = decode_supply(text)
    num_taken = sum(record.holder is not None for record in report.slices)
    assert (num_taken, len(report.waiting)) == published


@pytest.mark.parametrize(
    ("took_s", "worked_s", "is_waited_for", "paused_s"),
    [
        pytest.param(0.05, 0.01, False, 0.95, id="once a second"),
        pytest.param(0.05, 0.01, True, 0.45, id="twice where a replica waits"),
        pytest.param(2.0, 2.0, True, 18.0, id="never more than a tenth of its processor"),
        pytest.param(
            60.0, 0.02, False, 0.18, id="at once where it was the head that it waited for"
        ),
    ],
)
def test_next_look_comes_by_what_the_last_one_computed(
    took_s: float, worked_s: float, is_waited_for: bool, paused_s: float
) -> None:
    assert pause_s(took_s, worked_s, is_waited_for=is_waited_for) == pytest.approx(paused_s)
