"""Reads from the configuration what the stages need of its models. Pure but for the check."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.first_run.context import StageContext
from serving.config.check import check_serve_config
from serving.config.models import ModelConfig
from serving.config.slices import SliceConfig
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.models.engine_kind import EngineKind


@dataclass(frozen=True, slots=True)
class RunModel:
    """The first model of the configuration, on which the stages work.

    `num_engines` counts the engines of all models that the file asks for at the start.
    """

    name: str
    config: ModelConfig
    num_engines: int

    @property
    def slice(self) -> SliceConfig | None:
        """The slice of its first deployment; `None` where engines have none."""
        return self.config.deployments[0].slice

    @property
    def num_replicas(self) -> int:
        """How many replicas of it the file asks for at the start: each has a slice of its own."""
        return sum(deployment.replicas or 0 for deployment in self.config.deployments)

    @property
    def is_paced(self) -> bool:
        """Whether its tokens are made up: they have no likelihoods, and no reference."""
        return self.config.engine == EngineKind.PACED

    @property
    def dtype(self) -> str:
        """What it is computed in, as the file says; `auto` where it does not."""
        return str(self.engine_args.get("dtype", "auto"))

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """The arguments that the file sets for vLLM."""
        return self.config.engine_args


def run_model(context: StageContext) -> RunModel:
    """Returns the model of a run, whose file has been checked before."""
    checked = check_serve_config(dict(context.settings), installed_vllm_args())
    models = [model for config in checked.applications.values() for model in config.models]
    # What scales may well begin with none; then one that answers is waited for.
    counts = [
        (deployment.replicas or 0) * deployment.num_engines
        for model in models
        for deployment in model.deployments
    ]
    return RunModel(models[0].name, models[0], max(1, sum(counts)))
