"""The shipped application that scales, on one compute class: its sizes are easy to tell."""

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .application import PROJECT_ROOT, RunningApplication, wait_until

SHIPPED = PROJECT_ROOT / "deployments" / "sim" / "autoscaling.yaml"
MODEL, CLASS = "slicewise-demo", "flex-start"
NUM_SLICES = 8
LATER_S = 300.0
CLUSTER = {
    "slices": [
        {
            "name": "flex",
            "compute_class": CLASS,
            "generation": "v6e",
            "topology": "2x2",
            "count": NUM_SLICES,
        }
    ]
}


class OneClass(RunningApplication):
    """The shipped model with up to eight slices of flex-start, and a decision log.

    `changes` are of its profile; `sections` are of the application, as `batches`.
    """

    def __init__(self, changes: Mapping[str, Any], **sections: Any) -> None:
        self._file = yaml.safe_load(SHIPPED.read_text())
        self._changes = changes
        args = copy.deepcopy(self._file["applications"][0]["args"]) | sections
        (model,) = args["models"]
        (deployment,) = (each for each in model["deployments"] if each["compute_class"] == CLASS)
        model["deployments"] = [deployment | {"max_replicas": NUM_SLICES}]
        super().__init__(args, through="sim", plan=CLUSTER)
        self.decision_log = self.folder / "decisions.jsonl"

    def write_config(self, args: Any) -> Path:
        (application,) = self._file["applications"]
        application["args"] = dict(args)
        policy = application["autoscaling_policy"]["policy_kwargs"]
        policy["decision_log"] = str(self.decision_log)
        (model,) = policy["models"].values()
        model["profile"] |= self._changes
        model["classes"] = {CLASS: model["classes"][CLASS]}
        self._file["http_options"]["port"] = self.port
        self.config_path.write_text(yaml.safe_dump(self._file))
        return self.config_path

    def _is_ready(self) -> bool:
        return "Try it:" in self.log_text()

    async def until_ready(self, least: int, most: int = NUM_SLICES) -> dict[str, Any]:
        """Waits until so many slices are ready, and targets are no more than `most`."""

        def is_so(fleet: dict[str, Any]) -> bool:
            num_ready = [row["state"] for row in fleet["slices"]].count("ready")
            plans = (fleet["autoscaling"] or {"models": []})["models"]
            return num_ready >= least and all(each["targets"][CLASS] <= most for each in plans)

        found: dict[str, Any] = await asyncio.to_thread(self.wait_fleet, is_so, LATER_S)
        return found

    def plans(self) -> list[dict[str, Any]]:
        """The plans so far, oldest first."""
        entries = map(json.loads, self.decision_log.read_text().splitlines())
        return [entry["plan"] for entry in entries if entry["kind"] == "decision"]

    async def plans_from(self, number: int) -> list[dict[str, Any]]:
        """Waits until there are so many plans, and returns all."""
        await asyncio.to_thread(wait_until, lambda: len(self.plans()) >= number, LATER_S)
        return self.plans()
