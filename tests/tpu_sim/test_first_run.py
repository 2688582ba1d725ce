"""`slicewise first-run` on tpu-inference, on hosts in namespaces of their own.

Nodes are started as pods and TPU VMs start them, and the command runs on the head, which has no
chips, as it does under a RayJob. The chips and the kernels for them are replaced as elsewhere in
this folder; so memory, throughput and what chips report are skipped. On one host engines warm up
whole, as on a TPU host, and keep their programs: that no program is compiled while serving and that
the second start finds them is judged there. On two hosts, which have no warm-up, both are recorded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.first_run.order import RunStage
from deployments.first_run.runner import RESULT_FILE, TEXT_PAGE
from deployments.first_run.stages.load import LATE_PROGRAMS
from deployments.first_run.stages.starts import FOUND_PROGRAMS
from deployments.simulation.hosts.namespaces import Hosts, check_permitted
from deployments.simulation.plan import SimulatedSlices
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE
from tests.e2e.application import application_args, serve_config
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import RayNodes, node_environment

from .engines import ENGINE_ARGS, namespaced_environment
from .evidence import Evidence
from .tiny_models import LLAMA, PROJECT_ROOT, TinyModels

pytestmark = [pytest.mark.tpu_sim, pytest.mark.timeout(3600)]

START_S = 900.0
# Of a machine with much other work; the deadlines are meant for a TPU host.
PATIENCE = 5
SKIPPED = {RunStage.HBM, RunStage.THROUGHPUT}
# As `test_late_programs` has it: tpu-inference takes bfloat16 for granted when it warms up.
WARMED_UP = ENGINE_ARGS | {"dtype": "bfloat16"}


def slices_of(topology: str) -> SimulatedSlices:
    return SimulatedSlices(
        name="spot", compute_class="spot", generation="v6e", topology=topology, chips_per_host=4
    )


def config(
    models: TinyModels, slices: SimulatedSlices, programs: Path | None = None
) -> dict[str, Any]:
    """The file as a user writes it.

    `programs` is the folder of a store and of a host's programs, for an engine that warms up whole.
    """
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine_args = ENGINE_ARGS if programs is None else WARMED_UP
    served = {
        "name": LLAMA,
        "source": models.path(LLAMA),
        "engine": "vllm-tpu",
        "engine_args": engine_args | {"structured_outputs_config": structured},
        "deployments": [
            {
                "compute_class": slices.compute_class,
                "slice": {
                    "generation": slices.generation,
                    "topology": slices.topology,
                    "chips_per_host": slices.chips_per_host,
                },
            }
        ],
    }
    if programs is not None:
        served["compile_cache"] = {
            "store": str(programs / "store"),
            "local_dir": str(programs / "host"),
        }
    # Steps that compile take seconds here.
    args = application_args(served, link={}, health={"hang_timeout_s": 60.0})
    return serve_config(args, port=8000)


def judgement(out: Path, stage: RunStage, what: str) -> bool | None:
    """Whether a stage met an expectation; `None`: it has only recorded it."""
    found = json.loads((out / stage / RESULT_FILE).read_text())["measurements"]
    (is_met,) = (each["is_met"] for each in found if each["what"] == what)
    return is_met


@pytest.mark.parametrize(("topology", "num_hosts"), [("2x2", 1), ("2x4", 2)])
def test_every_stage_passes(
    topology: str,
    num_hosts: int,
    models: TinyModels,
    caches: Path,
    tmp_path: Path,
    evidence: Evidence,
) -> None:
    with skipped_where_refused():
        check_permitted()
    slices, out = slices_of(topology), tmp_path / "out"
    is_warmed_up = num_hosts == 1
    file = tmp_path / "serve_config.yaml"
    programs = tmp_path / "programs" if is_warmed_up else None
    file.write_text(yaml.safe_dump(config(models, slices, programs)))
    with Hosts() as network:
        names = ["head", *(f"host-{number}" for number in range(num_hosts))]
        head, *slice_hosts = [network.add(name) for name in names]
        environment = node_environment(network.folder) | namespaced_environment(
            caches, slices.chips_per_host
        )
        environment["PYTHONPATH"] = str(PROJECT_ROOT)
        if is_warmed_up:
            environment["SKIP_JAX_PRECOMPILE"] = "0"
            # The cache of the file has its place.
            environment.pop("VLLM_XLA_CACHE_PATH")
        nodes = RayNodes(head, environment, tmp_path)
        nodes.start_head(START_S)
        own = {SIMULATED_VARIABLE: "1", RUN_DIR_VARIABLE: str(network.folder / "run")}
        nodes.join_slice(slices, slice_hosts, [own] * num_hosts)
        nodes.wait_joined(START_S)
        with (tmp_path / "output.txt").open("wb") as output:
            command = [sys.executable, "-m", "deployments.cli", "first-run", str(file)]
            command += ["--out", str(out), "--address", nodes.address, "--patience", f"{PATIENCE}"]
            run = head.start(*command, env=environment, stdout=output, stderr=output)
            code = run.wait()
    page = (out / TEXT_PAGE).read_text()
    results = {
        stage: json.loads((out / stage / RESULT_FILE).read_text())["outcome"] for stage in RunStage
    }
    wanted = {stage: "skipped" if stage in SKIPPED else "passed" for stage in RunStage}
    assert (code, results) == (0, wanted), page
    judged = {
        what: judgement(out, stage, what)
        for stage, what in (
            (RunStage.MIXED_LOAD, LATE_PROGRAMS),
            (RunStage.WARM_START, FOUND_PROGRAMS),
        )
    }
    assert set(judged.values()) == {True if is_warmed_up else None}, (judged, page)
    evidence.placed(
        f"`slicewise first-run` on a slice v6e {topology} of {num_hosts} host(s) in namespaces of "
        "their own, from a head without chips: every stage passed but those of memory and "
        "throughput, which are skipped"
        + (
            "; no program was compiled under its mixed load, and the second start found those of "
            "the first"
            if is_warmed_up
            else ""
        )
    )
