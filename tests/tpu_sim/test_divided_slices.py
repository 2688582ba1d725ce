"""Two engines of tpu-inference that share a host of eight chips, beside one that has it whole.

The simulation gives a process as many CPU devices as it was told chips, as libtpu does. That libtpu
keeps two processes to chips of their own shows on a TPU only.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.tpu.chips import VISIBLE_CHIPS
from tests.e2e.application import Role, RunningApplication, application_args, linked_engines
from tests.e2e.streams import stream_all

from .engines import ENGINE_ARGS, simulation_environment
from .evidence import Evidence
from .test_served import START_S, completion, outputs, started
from .tiny_models import NUM_NEW_TOKENS, QWEN3, TinyModels

pytestmark = [pytest.mark.tpu_sim, pytest.mark.timeout(1500)]

CHIPS_PER_HOST = 8
V6E_2X4 = {"generation": "v6e", "topology": "2x4"}
HALVES, WHOLE = "halves", "whole"


def served(models: TinyModels, name: str, compute_class: str, num_engines: int) -> dict[str, Any]:
    wanted = V6E_2X4 | {"num_engines": num_engines}
    return {
        "name": name,
        "source": models.path(QWEN3),
        "engine": "vllm-tpu",
        "engine_args": ENGINE_ARGS,
        "deployments": [{"compute_class": compute_class, "replicas": 1, "slice": wanted}],
    }


@pytest.fixture(scope="module")
def application(models: TinyModels, caches: Path) -> Iterator[RunningApplication]:
    """One model twice: two engines on a slice, and one on another."""
    kind = {"count": 1, "returns_after_s": 1, **V6E_2X4}
    plan = {
        "slices": [
            {"name": "spot", "compute_class": "spot", **kind},
            {"name": "kept", "compute_class": "reserved", **kind},
        ],
        "cpus_per_host": 2,
    }
    environment = simulation_environment(caches, CHIPS_PER_HOST)
    # A host knows its own.
    for name in ("TPU_WORKER_ID", "TPU_NAME", "TPU_ACCELERATOR_TYPE"):
        environment.pop(name)
    args = application_args(
        served(models, HALVES, "spot", 2),
        served(models, WHOLE, "reserved", 1),
        gateway={"request_deadline_s": 200.0},
        health={"hang_timeout_s": 60.0},
    )
    running = RunningApplication(args, through="sim", plan=plan, environment=environment)
    with started(running):
        running.wait_fleet(lambda fleet: linked_engines(fleet) == {HALVES: 2, WHOLE: 1}, START_S)
        yield running


def visible_chips(process: psutil.Process) -> str | None:
    return process.environ().get(VISIBLE_CHIPS)


def test_two_engines_of_four_chips_answer_as_one_of_eight_and_as_transformers(
    application: RunningApplication, models: TinyModels, evidence: Evidence
) -> None:
    hosts = application.processes(Role.ENGINE_HOST)
    assert sorted(str(visible_chips(each)) for each in hosts) == ["0,1,2,3", "4,5,6,7", "None"]
    for host in hosts:
        cores = host.children(recursive=True)
        assert {visible_chips(core) for core in cores} == {visible_chips(host)}
    prompts, expected = models.prompts[QWEN3], models.expected[QWEN3]
    for name in (WHOLE, HALVES):
        requests = [completion(name, prompt, NUM_NEW_TOKENS) for prompt in prompts * 4]
        answers = asyncio.run(stream_all(application.base_url, requests))
        assert outputs(answers) == expected * 4
    (row,) = [row for row in application.fleet()["slices"] if row["model"] == HALVES]
    assert row["num_engines"] == 2
    evidence.parity(
        f"{QWEN3}, two engines of TP 4 on one host of 8 chips",
        "a slice v6e 2x4 that two engines share, 4 devices each",
        "transformers, and one engine of TP 8",
        4 * len(prompts),
    )
