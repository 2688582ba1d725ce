"""The slices in `serve_config.yaml`: those of a deployment, and their sources.

Owns the fields of slices and compute classes, and what a market sets in a class. Rules between
fields are in `serving.config.slice_rules`. Prices are configuration: none stands here. Pure.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from serving.config.sections import STRICT_SECTION
from serving.domain.compute_class import (
    DAY_S,
    MARKETS,
    MAX_FLEX_START_RUN_S,
    ComputeClass,
    Market,
)
from serving.domain.topology import Generation, SliceShape, engine_shape, slice_shape

# The label by which Ray's nodes report their market. Source: Ray 2.60 `_raylet`, read 2026-11-21.
MARKET_LABEL = "ray.io/market-type"


# The most slices of a multislice: it is lost whole, so more slices would cost more than they give.
MAX_SLICES_OF_ENGINE = 16

ComputeClassName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        json_schema_extra={
            "allowed": "a DNS-1123 label: lower-case letters, digits and inner `-`, "
            "up to 63 characters"
        },
    ),
]
# Ray's syntax of a label, exact values only. Source: Ray 2.60 `label_utils.py`, read 2026-11-21.
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LabelName = Annotated[str, Field(pattern=rf"^([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL}$")]
_LABEL_WORDS = "letters, digits and inner `-`, `_` and `.`, up to 63 characters"
LabelValue = Annotated[
    str, Field(pattern=rf"^{_LABEL}$", json_schema_extra={"allowed": _LABEL_WORDS})
]
# What the reference shows for a default that depends on the market.
_BY_MARKET = {"default": "by market"}


class _Section(BaseModel):
    model_config = STRICT_SECTION


class SliceConfig(_Section):
    """The slice, or the multislice, of each replica: one engine has it, or several have parts."""

    generation: Annotated[Generation, Field(strict=False)]
    """Generation of TPU."""
    topology: Annotated[
        str,
        Field(json_schema_extra={"allowed": "chips along each axis, such as `4x4` or `2x2x2`"}),
    ]
    """Chips along each axis, of those that exist in the generation."""
    chips_per_host: Annotated[
        int | None, Field(json_schema_extra={"allowed": "1, 4 or 8, as the topology has it"})
    ] = None
    """Chips of each host where there is a choice: 8 or 4 for v5e and v6e `2x4`. Left out: 8 there,
    one host that cannot be lost in part."""
    zone: Annotated[
        str | None,
        Field(
            pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)+$",
            json_schema_extra={"allowed": "a zone of Google Cloud, such as `us-east5-b`"},
        ),
    ] = None
    """Zone its hosts are in; any, when left out."""
    num_slices: Annotated[int, Field(ge=1, le=MAX_SLICES_OF_ENGINE)] = 1
    """Slices of this kind that each engine owns, all of them in one zone and joined over the
    data-centre network. Each holds the whole model; requests are spread over them."""
    num_engines: Annotated[int, Field(ge=1, le=256)] = 1
    """Engines on each slice. Each has an equal part of it, whole chips of one host: on one host of
    8 chips 8 engines of one chip, or 2 of four. They come and go together. Not with
    `num_slices`."""

    @property
    def shape(self) -> SliceShape:
        """The shape of one such slice in chips, hosts and devices."""
        return slice_shape(self.generation, self.topology, self.chips_per_host)

    @property
    def engine_shape(self) -> SliceShape:
        """The shape of what one engine has of a slice: all of it, or its part."""
        return engine_shape(self.shape, self.num_engines)

    @property
    def engines_per_host(self) -> int:
        """The number of engines on each host, 1 where an engine has several hosts."""
        return max(1, self.num_engines // self.shape.num_hosts)

    @property
    def num_hosts(self) -> int:
        """The number of hosts of all slices of one replica."""
        return self.num_slices * self.shape.num_hosts

    @property
    def num_chips(self) -> int:
        """The number of chips of all slices of one replica."""
        return self.num_slices * self.shape.num_chips


class ComputeClassConfig(_Section):
    """A source of slices. `reserved`, `flex-start`, `spot` and `on-demand` need no declaration."""

    name: ComputeClassName
    """As the deployments give it in `compute_class`; once."""
    market: Annotated[Market, Field(strict=False)]
    """How its slices are bought."""
    node_labels: Annotated[
        dict[LabelName, LabelValue],
        Field(json_schema_extra=_BY_MARKET | {"allowed": _LABEL_WORDS}),
    ] = {}
    """Labels of its hosts in Ray, all of them needed; by default `ray.io/market-type` with the
    market as its value."""
    patience_s: Annotated[float | None, Field(gt=0, le=7 * DAY_S)] = None
    """After how long a replica's wait for a slice of it is called too long, by `slicewise status`
    and the alert SliceStuck; the replica goes on waiting. When other classes are asked is the
    policy's own `patience_s`."""
    drain_notice_s: Annotated[float, Field(ge=0, le=7 * DAY_S, json_schema_extra=_BY_MARKET)] = 0.0
    """How long before its end a slice is told: by default 15 for spot, the whole run for
    flex-start, 3600 for others. A host that fails tells nothing."""
    max_run_duration_s: Annotated[
        float | None, Field(ge=1, le=365 * DAY_S, json_schema_extra=_BY_MARKET)
    ] = None
    """How long a slice is kept at most: by default 604800 for flex-start, no end for others."""
    usd_per_chip_hour: Annotated[float | None, Field(ge=0, le=1000)] = None
    """Price of a chip for an hour, in USD; unpriced, when left out."""

    def terms(self, num_chips: int, min_slices: int, max_slices: int) -> ComputeClass:
        """Returns the terms of the class for `min_slices` to `max_slices` of `num_chips` each."""
        market = MARKETS[self.market]
        price = self.usd_per_chip_hour
        return ComputeClass(
            self.name,
            None if price is None else price * num_chips,
            is_prepaid=market.is_prepaid,
            is_revocable=market.is_revocable,
            min_slices=min_slices,
            max_slices=max_slices,
            patience_s=self.patience_s,
            max_run_s=self.max_run_duration_s,
            market=self.market,
            drain_notice_s=self.drain_notice_s,
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_by_market(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("market") not in tuple(Market):
            return given
        return _set_by_market(Market(given["market"]), given) | given


def built_in_classes() -> dict[str, ComputeClassConfig]:
    """Returns the compute classes that need no declaration, by name: one for each market."""
    return {market.value: ComputeClassConfig(name=market.value, market=market) for market in Market}


def _set_by_market(market: Market, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the market's settings of a class; a shorter run in `given` shortens the notice."""
    terms = MARKETS[market]
    # A flex-start slice knows its end from its start.
    notice_s: float = terms.drain_notice_s or MAX_FLEX_START_RUN_S
    run_s = given.get("max_run_duration_s", terms.max_run_s)
    if isinstance(run_s, (int, float)) and 0 < run_s < notice_s:
        notice_s = run_s
    return {
        "node_labels": {MARKET_LABEL: market.value},
        "drain_notice_s": notice_s,
        "max_run_duration_s": terms.max_run_s,
    }
