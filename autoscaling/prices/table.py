"""Reads the table of list prices, lets an operator's file override it, and looks prices up.

Owns the file's form and the rule by which an entry is found. Knows no slice and no discount; a
price that is missing is an error that names it, never 0.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class PriceError(ValueError):
    """Reports a missing price or an unusable price file; the message names which."""


class PricedMarket(StrEnum):
    """The terms on which a chip is paid for."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    FLEX_START = "flex_start"
    COMMITTED_1Y = "committed_1y"  # what reserved capacity costs under a one-year commitment
    COMMITTED_3Y = "committed_3y"


_Usd = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class PriceList(BaseModel):
    """The prices of one market from one source. `unverified`: not yet checked on a price list."""

    model_config = _STRICT

    market: Annotated[PricedMarket, Field(strict=False)]
    read: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """The day on which they were read, as YYYY-MM-DD."""
    source: _Name
    unverified: bool = False
    usd_per_chip_hour: dict[_Name, dict[_Name, _Usd]]
    """By generation, then by region; `us` is any US region, `any` is any region."""


class PriceFile(BaseModel):
    """The file of price lists; where two lists name the same price, the first counts."""

    model_config = _STRICT

    tables: Annotated[list[PriceList], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Price:
    """The list price in USD per chip-hour. `region` is the entry that was found."""

    usd_per_chip_hour: float
    market: PricedMarket
    generation: str
    region: str
    source: str
    read: str
    is_verified: bool


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The price files in the order of precedence. An earlier one counts for all that it names."""

    files: tuple[PriceFile, ...]

    def lookup(self, market: PricedMarket, generation: str, region: str) -> Price:
        """The price for `region`: its own entry, else that of `us`, else that of `any`.

        Raises:
            PriceError: no file has it. Give one that does.
        """
        wider = ("us", "any") if region.startswith("us-") else ("any",)
        for file in self.files:
            for entry in (region, *wider):
                for prices in file.tables:
                    if prices.market != market:
                        continue
                    usd = prices.usd_per_chip_hour.get(generation, {}).get(entry)
                    if usd is not None:
                        return Price(
                            usd, market, generation, entry, prices.source, prices.read,
                            not prices.unverified,
                        )  # fmt: skip
        raise PriceError(
            f"no price for market={market} generation={generation} region={region}; "
            f"known regions: {', '.join(self._regions(market, generation)) or 'none'}"
        )

    def _regions(self, market: PricedMarket, generation: str) -> list[str]:
        return sorted(
            {
                region
                for file in self.files
                for prices in file.tables
                if prices.market == market
                for region in prices.usd_per_chip_hour.get(generation, {})
            }
        )


def price_table(overrides: Path | None = None) -> PriceTable:
    """The prices that ship with us, after those of the file `overrides` where there is one.

    Raises:
        PriceError: `overrides` cannot be read, or lists every field that is wrong.
    """
    shipped = _parsed(files("autoscaling.prices").joinpath("prices.yaml").read_text("utf-8"), "")
    if overrides is None:
        return PriceTable((shipped,))
    try:
        text = overrides.read_text(encoding="utf-8")
    except OSError as error:
        raise PriceError(f"{overrides} cannot be read: {error}") from error
    return PriceTable((_parsed(text, str(overrides)), shipped))


def _parsed(text: str, name: str) -> PriceFile:
    try:
        return PriceFile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise PriceError(f"{name} is no YAML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'file'} is {each['input']!r}: {each['msg']}"
            for each in error.errors()
        )
        raise PriceError(f"{name}: {problems}") from error
