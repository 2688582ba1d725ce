"""The compute classes: how their slices are bought, what they cost, how they come and go. Pure.

Owns what follows from the market of a class, and the one record of its terms. `serve_config.yaml`,
the policy's settings, values files and scenarios each have keys of their own for a class; each of
them is read into that record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

DAY_S = 24 * 60 * 60
MAX_FLEX_START_RUN_S = 7 * DAY_S


class Market(StrEnum):
    """The market on which the slices of a compute class are bought."""

    RESERVED = "reserved"  # paid for ahead; nobody else may have them
    FLEX_START = "flex-start"  # queued for, then kept for a time known at its start
    SPOT = "spot"  # cheap, and taken away at any time
    ON_DEMAND = "on-demand"  # at list price, for as long as they are kept


@dataclass(frozen=True, slots=True)
class MarketTerms:
    """The terms of a market, in seconds.

    `max_run_s` is the longest run of a slice, `None` without an end. `drain_notice_s` is the notice
    that an ordinary pod gets before its end, `max_drain_notice_s` the longest that settings allow;
    `None` where the end is known from the start.
    """

    is_prepaid: bool = False
    is_revocable: bool = False
    max_run_s: int | None = None
    drain_notice_s: int | None = None
    max_drain_notice_s: int | None = None


# Sources, read 2026-11-20. The run of flex-start: GKE's page on flex-start. Notices of spot: GKE's
# spot VM page, as far as a node setting extends it, unproven for TPU hosts; of the others: GKE's
# page on TPU disruption, as far as a pod's grace period lasts in maintenance.
MARKETS: Mapping[Market, MarketTerms] = MappingProxyType(
    {
        Market.RESERVED: MarketTerms(is_prepaid=True, drain_notice_s=3600, max_drain_notice_s=3600),
        Market.FLEX_START: MarketTerms(max_run_s=MAX_FLEX_START_RUN_S),
        Market.SPOT: MarketTerms(is_revocable=True, drain_notice_s=15, max_drain_notice_s=120),
        Market.ON_DEMAND: MarketTerms(drain_notice_s=3600, max_drain_notice_s=3600),
    }
)


@dataclass(frozen=True, slots=True)
class ComputeClass:
    """The terms of one compute class for one model's slice shape.

    `usd_per_slice_hour` is the cost of a slice while it is held (`None`: not known, and nothing
    plans with it). `market` is where it is bought (`None`: in a way of its own). `is_prepaid`:
    capacity that is paid for whether used or not, up to `max_slices`. `is_revocable`: may be taken
    away at any time, and all of it at once. `correlation_group` names what is lost together (e.g. a
    zone); revocable classes of different groups are not lost together. `max_slices` is quota;
    `min_slices` are kept at any load. `provisioning_s` is the usual time until a slice comes, until
    experience corrects it; `load_s` is the time until an engine is ready after that.
    `losses_per_hour` is the usual rate at which a slice is taken away, until experience corrects
    it. `patience_s` is the longest time of an order before other classes are asked (`None`: as long
    as experience finds usual). `max_run_s` is the longest time that a slice is kept (`None`: no
    end), `drain_notice_s` the notice that it gets before its end (`None`: not known).
    """

    name: str
    usd_per_slice_hour: float | None
    is_prepaid: bool = False
    is_revocable: bool = False
    correlation_group: str = ""
    min_slices: int = 0
    max_slices: int = 1000
    provisioning_s: float = 120.0
    load_s: float = 120.0
    losses_per_hour: float = 0.0
    patience_s: float | None = None
    max_run_s: float | None = None
    market: Market | None = None
    drain_notice_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_slices <= self.max_slices:
            msg = f"{self.name}: min_slices={self.min_slices} must lie in 0..{self.max_slices}"
            raise ValueError(msg)

    @property
    def lost_with(self) -> str | None:
        """What is lost together with it, itself if nothing else; `None`: it is not revocable."""
        return (self.correlation_group or self.name) if self.is_revocable else None

    @property
    def price(self) -> float:
        """The cost of a slice in USD per hour.

        Raises:
            ValueError: the price is not known. Plan only with classes that have one.
        """
        if self.usd_per_slice_hour is None:
            raise ValueError(f"{self.name}: usd_per_slice_hour is not known")
        return self.usd_per_slice_hour
