"""What compute classes cost and how long their slices are waited for, of the models served now.

Both mappings are changed in place, because those who show them keep them.
"""

from collections.abc import Iterable

from serving.config.application import AppConfig, ModelConfig


class ClassTerms:
    """Of deployments that own slices; a class without a price or a patience is left out."""

    def __init__(self, config: AppConfig) -> None:
        self.usd_per_chip_hour: dict[str, float] = {}  # by compute class
        self.patience_s: dict[tuple[str, str], float] = {}  # by model and compute class
        self._config = config

    def update(self, models: Iterable[ModelConfig]) -> None:
        """Takes in other models."""
        self.usd_per_chip_hour.clear()
        self.patience_s.clear()
        for model in models:
            for deployment in model.deployments:
                if deployment.slice is None:
                    continue
                try:
                    terms = self._config.compute_class(deployment.compute_class)
                except KeyError:
                    continue  # a class that came later; this gateway is being replaced for it
                if terms.usd_per_chip_hour is not None:
                    self.usd_per_chip_hour[terms.name] = terms.usd_per_chip_hour
                if terms.patience_s is not None:
                    self.patience_s[model.name, terms.name] = terms.patience_s
