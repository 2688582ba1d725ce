"""Reads chip prices by compute class: a file such as `spot: 0.593`, in USD per chip and hour."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, RootModel

from loadtest.strict_yaml import read_strict_yaml

# Ten times the highest chip price on any list; above it a user wrote cents, or a slice's price.
MAX_USD_PER_CHIP_HOUR = 100.0

_Price = Annotated[float, Field(ge=0, le=MAX_USD_PER_CHIP_HOUR)]


class ChipPriceFile(RootModel[dict[str, _Price]]):
    """The prices by name of the compute class, as the platform's `/fleet` names it."""

    model_config = ConfigDict(frozen=True, strict=True)


def read_prices(path: Path) -> Mapping[str, float]:
    """Reads USD per chip and hour by compute class.

    Raises:
        LoadTestError: it is no such file.
    """
    return read_strict_yaml(path, ChipPriceFile).root
