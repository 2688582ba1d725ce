"""Decides which slices other classes have to bring, because their own class cannot in time. Pure.

What ends at a known time keeps its place in its class's quota until then, so a full class replaces
it only afterwards; and one that backs off, or whose order is overdue, may not replace it at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.mix.portfolio import ClassOption, Portfolio
from autoscaling.records import Fleet


def bridged(
    now_s: float,
    fleet: Fleet,
    classes: Mapping[str, ClassHistory],
    safe: Sequence[ClassOption],
    ideal: Portfolio,
) -> tuple[list[ClassOption], Mapping[str, int]]:
    """Returns `safe` without what ends before its class replaces it, and how many that are.

    `ideal` tells how many of its slices a class is to have.
    """
    options, missing = [], {}
    for option in safe:
        history = classes[option.name]
        bridge = _bridge(now_s, option.name, fleet, classes)
        num_ends = history.num_ends(now_s, bridge.lead_s) if bridge is not None else 0
        if bridge is not None and num_ends:
            there = history.num_there(fleet.of_class(option.name), now_s, bridge.lead_s)
            relied_on = min(option.at_most, ideal.slices[option.name])
            short = min(num_ends, relied_on - there)
            if short > 0:
                missing[option.name] = short
                option = replace(option, at_most=max(relied_on - short, option.at_least))
        options.append(option)
    return options, missing


def _bridge(
    now_s: float, name: str, fleet: Fleet, classes: Mapping[str, ClassHistory]
) -> ClassHistory | None:
    """The class that would replace slices of another: the cheapest healthy one with room."""
    with_room = [
        each
        for other, each in classes.items()
        if other != name
        and each.is_healthy(now_s)
        and len(fleet.of_class(other)) < each.most_slices
    ]
    return min(with_room, key=lambda each: each.usd_per_useful_hour, default=None)
