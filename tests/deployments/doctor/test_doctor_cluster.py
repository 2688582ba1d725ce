"""`slicewise doctor` beside a simulated cluster of real Ray nodes, whole and with a host killed."""

import os
from pathlib import Path

import pytest
import yaml

from deployments.simulation.plan import parse_plan
from deployments.start.serve import child_environment, dashboard_port

from .test_doctor_command import doctor

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::ResourceWarning")]

PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "4x4"},
        {"name": "reserved", "compute_class": "reserved", "generation": "v6e", "topology": "2x4"},
    ]
}
CONFIG = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "main",
            "import_path": "serving.app:build",
            "args": {
                "models": [
                    {
                        "name": "demo",
                        "source": "models/slicewise-demo",
                        "engine": "paced",
                        "deployments": [
                            {
                                "compute_class": name,
                                "replicas": 1,
                                "slice": {"generation": "v6e", "topology": topology},
                            }
                            for name, topology in (("spot", "4x4"), ("reserved", "2x4"))
                        ],
                    }
                ]
            },
        }
    ],
}


def test_whole_slices_are_fine_and_a_killed_host_is_named(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("c")
    # This process is a driver of the cluster, and has no token of it.
    environment = child_environment({"RAY_AUTH_MODE": "disabled"}, str(folder))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS")
    config = Path(folder) / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    # As `slicewise sim` does: Ray reads its environment when it is imported.
    from deployments.simulation.cluster import SimulatedCluster

    with SimulatedCluster(parse_plan(PLAN), dashboard_port(environment)) as cluster:
        ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        arguments = ("--ray-address", cluster.address, "--config", str(config))
        _, found = doctor(*arguments, **ours)
        spot = next(name for name in cluster.names() if name.startswith("spot"))
        assert found[f"slice {spot}"]["found"] == "v6e 4x4, 4 of 4 hosts"
        for name in ("spot", "reserved"):
            (wanted,) = (
                each
                for what, each in found.items()
                if what.startswith("slices for ") and name in what
            )
            assert wanted["level"] == "ok"
        assert found["simulated: slices"]["level"] == "note"
        assert found["RAY_worker_niceness"]["level"] == "ok"

        cluster.kill(spot, 2)
        # Ray notices after seconds, and the simulation takes the rest of the slice even later.
        for _ in range(20):
            _, found = doctor(*arguments, **ours)
            if found.get(f"slice {spot}", {"level": "error"})["level"] == "error":
                break
        if f"slice {spot}" in found:
            _, _, missing = found[f"slice {spot}"]["found"].partition("missing: ")
            assert "2" in missing.split(", ")
        (wanted,) = (
            each
            for what, each in found.items()
            if what.startswith("slices for ") and "spot" in what
        )
        assert wanted["level"] == "warning"
        assert wanted["found"].startswith("0 whole of v6e-16 4x4")
