"""The prices of compute classes and the patience for their slices, as metrics need them."""

from collections.abc import Iterable

from serving.config.application import AppConfig
from serving.config.models import ModelConfig


class ClassPrices:
    """The prices of compute classes and the patience for their slices, for the present models.

    Only deployments that own slices count; a class without a price or a patience is left out. Both
    mappings are changed in place, because their readers keep them.
    """

    def __init__(self, config: AppConfig) -> None:
        self.usd_per_chip_hour: dict[str, float] = {}  # by compute class
        self.patience_s: dict[tuple[str, str], float] = {}  # by model and compute class
        self._config = config

    def update(self, models: Iterable[ModelConfig]) -> None:
        """Takes the prices of these models in place of those of before."""
        self.usd_per_chip_hour.clear()
        self.patience_s.clear()
        for model in models:
            for deployment in model.deployments:
                if deployment.slice is None:
                    continue
                try:
                    prices = self._config.compute_class(deployment.compute_class)
                except KeyError:
                    continue  # a class that came later; this gateway is being replaced for it
                if prices.usd_per_chip_hour is not None:
                    self.usd_per_chip_hour[prices.name] = prices.usd_per_chip_hour
                if prices.patience_s is not None:
                    self.patience_s[model.name, prices.name] = prices.patience_s
