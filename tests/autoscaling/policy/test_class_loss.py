"""What is asked for when a whole compute class is lost: the table of docs/results/disasters.md.

Forty-eight requests per second take five slices. A class that is lost is dry until it is said to be
back.
"""

from dataclasses import dataclass, replace

import pytest
from policy_world import ALL, ANY_PRICE, ON_DEMAND, RESERVED, RULES, SPOT, World

from serving.domain.compute_class import ComputeClass

RATE = 48.0
NEED = 5
SPOT_A = replace(SPOT, name="spot-a", correlation_group="a")
SPOT_B = replace(SPOT, name="spot-b", correlation_group="b")


@dataclass(frozen=True)
class Row:
    """`asked` are the targets by the end of `within_s`, `ready_at_last` the slices while it is dry.

    Classes that are not named have the target 0.
    """

    terms: tuple[ComputeClass, ...]
    lost: str
    asked: dict[str, int]
    within_s: float
    ready_at_last: int
    floor_ratio: float = 0.0


TABLE = {
    "spot, bridged by the cheapest that is relied on": Row(
        ALL, "spot", {"reserved": 2, "spot": 3, "flex-start": 3}, 10, NEED
    ),
    "spot, without flex-start": Row(
        (RESERVED, SPOT, ON_DEMAND), "spot", {"reserved": 2, "spot": 3, "on-demand": 3}, 10, NEED
    ),
    "spot, where the floor has half of it elsewhere already": Row(
        ALL, "spot", {"reserved": 2, "spot": 2, "flex-start": 3}, 10, NEED, floor_ratio=0.6
    ),
    "spot of one zone of two": Row(
        (RESERVED, SPOT_A, SPOT_B, ON_DEMAND), "spot-a", {"reserved": 2, "spot-b": 3}, 10, NEED
    ),
    "spot, and the others have no room": Row(
        (RESERVED, SPOT, replace(ON_DEMAND, max_slices=1)),
        "spot",
        {"reserved": 2, "spot": 3, "on-demand": 1},
        10,
        3,
    ),
    "spot, and there is nothing else": Row((SPOT,), "spot", {"spot": 5}, 10, 0),
    # Nobody takes back what is not revocable: its loss is believed when its return is late.
    "reserved, which is waited for as long as it usually takes, and half as long again": Row(
        ALL, "reserved", {"reserved": 2, "spot": 5}, 110, NEED
    ),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_lost_class_is_replaced_by_the_cheapest_relied_on_and_its_wishes_stay_open(
    row: Row,
) -> None:
    world = World.of(
        *row.terms, rules=replace(RULES, floor_ratio=row.floor_ratio, floor_price_ratio=ANY_PRICE)
    )
    world.run(RATE, 900)
    before = dict(world.targets)
    assert world.ready() == NEED
    world.lose(row.lost)
    world.dry.add(row.lost)
    plan = world.run(RATE, row.within_s)
    assert {name: count for name, count in plan.targets.items() if count} == row.asked
    world.run(RATE, 900)
    assert world.ready(row.lost) == 0
    assert world.ready() == row.ready_at_last
    if row.ready_at_last < NEED:
        reasons = [each.reason for each in world.plans[-1].refusals]
        assert any("no class has room" in reason for reason in reasons)
    world.dry.clear()
    least = NEED
    for _ in range(250):
        world.step(RATE)
        least = min(least, world.ready())
    assert least == row.ready_at_last, "never fewer while the load moves back"
    assert world.ready() == NEED
    # Another zone of the same price is as good as the lost one: nothing is drained to move back.
    if row.lost != SPOT_A.name:
        assert dict(world.targets) == before
