"""`slicewise first-run` on a slice that eight engines share, on a simulated host without chips.

Engines are paced, so that what a model and chips have to show is skipped: that the stages wait for
all engines of a slice, ask them, and leave the slice as one, is seen here, and that libtpu keeps to
its chips is not.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml

from deployments.first_run.order import RunStage
from deployments.first_run.runner import RESULT_FILE, TEXT_PAGE
from deployments.simulation.hosts.namespaces import Hosts, check_permitted
from deployments.simulation.plan import SimulatedSlices
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.slices.host_agent import NO_METADATA
from serving.slices.metadata_client import HOST_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import RayNodes, node_environment

from .application import PROJECT_ROOT, application_args, paced_model, serve_config

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

NODES_S = 120.0
PATIENCE = 5
ENGINES = 8
SLICES = SimulatedSlices(
    name="spot", compute_class="spot", generation="v6e", topology="2x4", chips_per_host=8
)
DEPLOYMENT = {
    "compute_class": SLICES.compute_class,
    "num_cpus": 0.01,
    "slice": {
        "generation": SLICES.generation,
        "topology": SLICES.topology,
        "num_engines": ENGINES,
    },
}
# Of what a paced engine has none: memory, weights, speed, a process that can be killed alone.
SKIPPED = {RunStage.HBM, RunStage.CORRECTNESS, RunStage.THROUGHPUT, RunStage.RESUME}


def test_stages_take_all_engines_of_a_slice_for_one(tmp_path: Path) -> None:
    with skipped_where_refused():
        check_permitted()
    model = paced_model(pace={"ttft_ms": 20.0, "tpot_ms": 20.0}, deployments=[DEPLOYMENT])
    file, out = tmp_path / "serve_config.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(serve_config(application_args(model, link={}), port=8000)))
    with Hosts() as network:
        head, host = network.add("head"), network.add("host-0")
        environment = node_environment(network.folder) | {"PYTHONPATH": str(PROJECT_ROOT)}
        nodes = RayNodes(head, environment, tmp_path)
        nodes.start_head(NODES_S)
        own = {
            SIMULATED_VARIABLE: "1",
            HOST_VARIABLE: NO_METADATA,
            RUN_DIR_VARIABLE: str(network.folder / "run"),
        }
        nodes.join_slice(SLICES, [host], [own])
        nodes.wait_joined(NODES_S)
        command = [sys.executable, "-m", "deployments.cli", "first-run", str(file)]
        command += ["--out", str(out), "--address", nodes.address, "--patience", f"{PATIENCE}"]
        with (tmp_path / "output.txt").open("wb") as output:
            run = head.start(*command, env=environment, stdout=output, stderr=output)
            code = run.wait()
    page = (out / TEXT_PAGE).read_text()
    results = {stage: json.loads((out / stage / RESULT_FILE).read_text()) for stage in RunStage}
    wanted = {stage: "skipped" if stage in SKIPPED else "passed" for stage in RunStage}
    assert (code, {stage: each["outcome"] for stage, each in results.items()}) == (0, wanted), page
    for stage in (RunStage.COLD_START, RunStage.WARM_START):
        found = {each["what"]: each for each in results[stage]["measurements"]}
        assert found["engines ready"]["expected"] == f"{ENGINES}"
        # Of the one host with chips, through Ray.
        memory = found[f"most resident memory of all processes on {host.address}"]
        assert memory["is_met"] is True, page
