"""The rules that an operator gives the policy: objectives, safety, patience. Pure data."""

from dataclasses import dataclass

from serving.domain.capacity.objectives import Objectives

LATE_RATIO = 0.002


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which the policy plans; times in seconds.

    `min_slices` and `max_slices` bound the slices of all classes together, of whatever shape; with
    `min_slices` 0 the model goes to zero after `idle_s` without a request. Orders that wait count
    for `max_slices`, so that there are never more slices at once. `floor_ratio` is the share of the
    demand that must be left when any one group of revocable classes is lost at once, as far as
    slices for that cost no more than `floor_price_ratio` times the cheapest. `shortage_ratio` is
    what it is worth not to miss a slice for an hour, in hourly prices of the most expensive class:
    beyond the floor, safety is bought as long as it is cheaper than that. `tpot_margin` is the
    share of the TPOT objective that is planned for. `spread` is how many standard deviations of the
    number of requests in flight are kept free. `forecast_share` is the share of past forecasts of
    the rate that must have been no higher than what is planned for. `late_ratio` is the share of
    requests that may miss an objective: as far as fewer do, less is kept free for chance and for
    forecasts; with 0 that is not looked at. `drain_delay_s` is how long a slice must have been
    surplus before it is given up. A load older than `max_load_age_s` is no load.
    """

    objectives: Objectives
    min_slices: int = 0
    max_slices: int = 10_000
    idle_s: float = 300.0
    floor_ratio: float = 0.25
    floor_price_ratio: float = 1.5
    shortage_ratio: float = 60.0
    tpot_margin: float = 0.95
    spread: float = 2.8
    late_ratio: float = LATE_RATIO
    forecast_share: float = 0.92
    drain_delay_s: float = 300.0
    max_load_age_s: float = 60.0
    backoff_s: float = 120.0
    max_backoff_s: float = 1800.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_slices <= self.max_slices:
            raise ValueError(f"min_slices is {self.min_slices}; allowed: 0..{self.max_slices}")
        for name in ("floor_ratio", "forecast_share", "late_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 0 to 1")
        if not 0 < self.tpot_margin <= 1:
            raise ValueError(f"tpot_margin is {self.tpot_margin!r}; allowed: above 0, up to 1")
        for name in (
            "idle_s",
            "floor_price_ratio",
            "spread",
            "shortage_ratio",
            "drain_delay_s",
            "max_load_age_s",
            "backoff_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 0 or more")

    @property
    def planned_tpot_s(self) -> float:
        """Returns how long a step may take by plan, in seconds."""
        return self.objectives.tpot_s * self.tpot_margin
