"""Every engine of the shipped values fits its slices, by the planner and the facts we have."""

from pathlib import Path

import pytest
import yaml

from deployments.engine_plan import plan_serve_config
from serving.config.vllm.vllm_args import installed_vllm_args

from .models import MODELS

VALUES = Path(__file__).parents[2] / "deployments" / "values"
# Fewer would make an engine of many chips serve one user.
MIN_LONGEST_REQUESTS = 8


@pytest.mark.parametrize("path", sorted(VALUES.glob("*.yaml")), ids=lambda path: path.stem)
def test_engines_of_shipped_values_fit_with_room_for_requests(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    del raw["cluster"]
    report = plan_serve_config(raw, installed_vllm_args(), [MODELS])
    assert report.problems == ()
    num_deployments = sum(
        len(model["deployments"])
        for application in raw["applications"]
        for model in application["args"]["models"]
    )
    assert num_deployments >= len(report.plans) > 0
    for plan in report.plans:
        # `None`: no facts file has the model, so nobody knows whether it fits.
        assert plan.budget is not None, plan.uncounted
        longest = int(plan.settings.engine_args["max_model_len"])
        assert plan.budget.cache_tokens >= MIN_LONGEST_REQUESTS * longest
