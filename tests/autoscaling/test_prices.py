"""The price table: what it finds, what it refuses, what an operator's file changes."""

import json
from pathlib import Path

import pytest

from autoscaling.prices.table import PricedMarket, PriceError, price_table

_DATA = Path(__file__).parents[2] / "../shared/data/prices.json"


def test_own_entry_of_a_region_comes_before_that_of_the_country() -> None:
    table = price_table()

    assert table.lookup(PricedMarket.ON_DEMAND, "v5e", "us-south1").usd_per_chip_hour == 1.416
    fallback = table.lookup(PricedMarket.ON_DEMAND, "v5e", "us-east5")
    assert (fallback.usd_per_chip_hour, fallback.region) == (1.2, "us")


def test_price_carries_source_date_and_whether_it_was_verified() -> None:
    table = price_table()

    spot = table.lookup(PricedMarket.SPOT, "v6e", "us-east5")
    committed = table.lookup(PricedMarket.COMMITTED_1Y, "v6e", "us-east5")

    assert (spot.is_verified, spot.read) == (True, "2026-11-20")
    assert "skypilot-catalog" in spot.source
    assert not committed.is_verified


@pytest.mark.parametrize(
    ("market", "generation", "region"),
    [
        (PricedMarket.SPOT, "v6e", "us-west4"),  # `us` has no spot price
        (PricedMarket.FLEX_START, "v5e", "us-east5"),
        (PricedMarket.ON_DEMAND, "v6e", "mars-north1"),
    ],
)
def test_missing_price_is_an_error_that_names_it(
    market: PricedMarket, generation: str, region: str
) -> None:
    with pytest.raises(
        PriceError, match=f"market={market} generation={generation} region={region}"
    ):
        price_table().lookup(market, generation, region)


def test_operators_file_is_asked_first_and_the_rest_stays(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        """
tables:
  - market: spot
    read: "2027-01-02"
    source: our contract
    usd_per_chip_hour: {v6e: {any: 0.5}}
"""
    )
    table = price_table(file)

    ours = table.lookup(PricedMarket.SPOT, "v6e", "us-east5")
    assert (ours.usd_per_chip_hour, ours.source, ours.read) == (0.5, "our contract", "2027-01-02")
    assert table.lookup(PricedMarket.ON_DEMAND, "v6e", "us-east5").usd_per_chip_hour == 2.7


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("market: barter", "tables.0.market"),
        ("market: spot\n    discount: 0.1", "tables.0.discount"),
        ("market: spot\n    unverified: 'no'", "tables.0.unverified"),
    ],
)
def test_wrong_file_is_refused_by_field(tmp_path: Path, change: str, named: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        f"tables:\n  - {change}\n    read: '2027-01-02'\n    source: x\n"
        "    usd_per_chip_hour: {v6e: {any: 0.5}}\n"
    )
    with pytest.raises(PriceError, match=named):
        price_table(file)


def test_zero_is_no_price(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        "tables:\n  - market: spot\n    read: '2027-01-02'\n    source: x\n"
        "    usd_per_chip_hour: {v6e: {any: 0}}\n"
    )
    with pytest.raises(PriceError, match=r"usd_per_chip_hour\.v6e\.any"):
        price_table(file)


def test_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match=r"nowhere\.yaml cannot be read"):
        price_table(tmp_path / "nowhere.yaml")


@pytest.mark.skipif(not _DATA.exists(), reason="the reference prices are not here")
def test_shipped_prices_are_those_of_the_reference() -> None:
    reference = json.loads(_DATA.read_text())
    table = price_table()

    for market in (PricedMarket.ON_DEMAND, PricedMarket.SPOT, PricedMarket.FLEX_START):
        for generation, regions in reference[market].items():
            for region, usd in regions.items():
                found = table.lookup(market, generation, region)
                assert (found.usd_per_chip_hour, found.is_verified) == (usd, True)
