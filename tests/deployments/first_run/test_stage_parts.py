"""The decisions of single stages, without an application."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.first_run.application import served_settings
from deployments.first_run.hosts.ray_tasks import first_hosts, place_of
from deployments.first_run.hosts.reach import (
    PYTHON,
    HostAnswer,
    HostsUnreachableError,
    RayHosts,
    ThisHost,
)
from deployments.first_run.requests.asking import StreamedAnswer
from deployments.first_run.requests.prompts import PROMPTS
from deployments.first_run.stages.chips import measured_on_host
from deployments.first_run.stages.hosts import different
from deployments.first_run.stages.load import no_warm_up, published_figure
from deployments.first_run.stages.losses import tokens_within
from deployments.first_run.stages.probe import ProbeTurn, measured_turn
from deployments.first_run.stages.served_models import RunModel
from serving.config.check import check_serve_config
from serving.config.models import ModelConfig
from serving.config.slices import SliceConfig
from serving.domain.inventory import SLICE_NAME_LABEL, WORKER_ID_LABEL
from serving.tpu.published import PublishedFigure, published_for

ROOT = Path(__file__).parents[3]
CHIP: dict[str, Any] = {
    "compute_class": "spot",
    "slice": {"generation": "v6e", "topology": "1x1"},
}
SLEEP = str(shutil.which("sleep"))
SHIPPED = yaml.safe_load((ROOT / "serve_config.yaml").read_text())


def test_served_copy_can_be_served_and_waits_for_an_engine_that_returns() -> None:
    before = yaml.safe_dump(SHIPPED)
    made = served_settings(SHIPPED, 4711)
    assert yaml.safe_dump(SHIPPED) == before
    assert list(map(str, check_serve_config(made, None).problems)) == []
    assert made["http_options"] == {"host": "127.0.0.1", "port": 4711}
    args = made["applications"][0]["args"]
    assert args["gateway"]["request_deadline_s"] == 600
    assert args["health"]["engine_handover_s"] == 0
    assert args["models"] == SHIPPED["applications"][0]["args"]["models"]


def test_longer_deadline_of_a_request_stays() -> None:
    settings: dict[str, Any] = {
        "applications": [{"args": {"gateway": {"request_deadline_s": 900}}}]
    }
    made = served_settings(settings, 1)
    assert made["applications"][0]["args"]["gateway"]["request_deadline_s"] == 900


def test_prompts_are_as_many_as_the_streams_that_a_kill_hits_and_all_different() -> None:
    assert len(set(PROMPTS)) == 20
    assert all(len(prompt) <= 80 for prompt in PROMPTS)


def paced(*arrivals_s: float) -> StreamedAnswer:
    return StreamedAnswer([1] * len(arrivals_s), arrivals_s=list(arrivals_s))


@pytest.mark.parametrize(
    ("answers", "num_tokens"),
    [
        # As on a busy machine of two cores: of 128 tokens a fifth had not come after the notice.
        ([paced(0.0, 0.1, 0.2), paced(9.0, 9.25, 9.5)], 60),
        ([paced(0.0, 0.01, 0.02)], 128),
        ([paced(0.0, 4.0, 8.0)], 16),
        ([paced(), paced(1.0)], 128),
        ([], 128),
    ],
)
def test_streams_that_have_nowhere_to_go_end_within_the_notice(
    answers: list[StreamedAnswer], num_tokens: int
) -> None:
    assert tokens_within(answers, 15.0) == num_tokens


def probed(number: int, wall_s: float) -> ProbeTurn:
    return ProbeTurn(number, HostAnswer("a", 0, '{"outcome": "passed"}', ""), wall_s)


@pytest.mark.parametrize(("longer_s", "is_met"), [(10.0, False), (20.0, True)])
def test_probe_that_waits_for_chips_takes_no_longer_than_patience_has_it(
    longer_s: float, is_met: bool
) -> None:
    passed, later = measured_turn(probed(3, 16.5), probed(1, 3.4), longer_s)

    assert passed.is_met
    assert (later.measured, later.expected) == ("13.1 s", f"below {longer_s:g} s")
    assert later.is_met is is_met


def test_published_figure_holds_for_its_model_on_its_chips_only() -> None:
    found = published_for("meta-llama/Llama-3.1-8B-Instruct", "v6e", 1)
    assert not isinstance(found, str)
    assert found.requests_per_s == 10.77
    other = published_for("meta-llama/Llama-3.1-8B-Instruct", "v6e", 4)
    assert other == (
        "no figure known for meta-llama/Llama-3.1-8B-Instruct on 4 chips of v6e, "
        "only on 1 chips of v6e"
    )
    assert published_for("models/slicewise-demo", "v6e", 1) == (
        "no figure known for models/slicewise-demo"
    )


def test_longest_pause_of_a_stream_is_between_two_tokens() -> None:
    assert StreamedAnswer([1, 2, 3], arrivals_s=[1.0, 1.5, 4.0]).longest_gap_s == 2.5
    assert StreamedAnswer([1], arrivals_s=[1.0]).longest_gap_s == 0


@pytest.mark.process
def test_program_runs_on_this_host_with_its_environment() -> None:
    program = (PYTHON, "-c", "import os; print('{\"seen\": \"' + os.environ['WORD'] + '\"}')")
    (found,) = ThisHost().run(program, 60, {"WORD": "here"})
    assert (found.status, found.last_json()) == (0, {"seen": "here"})


@pytest.mark.process
def test_program_that_does_not_end_in_time_is_told_of() -> None:
    (found,) = ThisHost().run((PYTHON, "-c", "import time; time.sleep(600)"), 0.5)
    assert found.status is None
    assert found.complaint() == "not in time: it said nothing"


def test_host_that_there_is_not_is_refused() -> None:
    with pytest.raises(HostsUnreachableError, match="there is no host 'x'"):
        ThisHost().run((PYTHON, "-c", ""), 60, host="x")


@pytest.mark.process
def test_ray_that_is_not_there_is_named() -> None:
    with pytest.raises(HostsUnreachableError, match=r"Ray at nowhere:"):
        RayHosts("nowhere").run((PYTHON, "-c", ""), 60)


@pytest.mark.process
def test_process_of_this_cluster_is_killed_and_no_other(tmp_path: Path) -> None:
    def start(folder: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        return subprocess.Popen(["SW::Test", "600"], executable=SLEEP, env=environment)

    ours, others = start(f"{tmp_path}/a1/sw"), start(f"{tmp_path}/other")
    try:
        command = (PYTHON, "-m", "deployments.first_run.hosts.kill", "SW::Test", f"{tmp_path}/a1/")
        (told,) = ThisHost().run(command, 60)
        assert told.last_json() == {"found": 1, "killed": ours.pid}
        assert ours.wait(30) == -9
        assert psutil.Process(others.pid).status() != psutil.STATUS_ZOMBIE
        # In a task of Ray it has to be of the task's own node.
        in_task = (*command[:-1], "-")
        (told,) = ThisHost().run(in_task, 60, {"RAY_RAYLET_PID": "4711"})
        assert told.last_json() == {"found": 0, "killed": None}
        (again,) = ThisHost().run(command, 60)
        assert again.last_json() == {"found": 0, "killed": None}
    finally:
        for each in (ours, others):
            each.kill()
            each.wait()


def test_program_on_a_ray_node_is_told_its_place_in_its_slice() -> None:
    def node(address: str, slice_name: str | None, worker: str | None) -> dict[str, Any]:
        labels = {SLICE_NAME_LABEL: slice_name, WORKER_ID_LABEL: worker}
        return {
            "NodeManagerAddress": address,
            "Labels": {name: value for name, value in labels.items() if value is not None},
        }

    nodes = [
        node("a", "s-0", "1"),
        node("b", "s-0", "0"),
        node("c", "s-1", "0"),
        node("d", None, None),
    ]
    firsts = first_hosts(nodes)
    told = [tuple(place_of(each, firsts).values()) for each in nodes]
    assert told == [("1", "b"), ("0", "b"), ("0", "c"), ("0", "")]


# -- engines that share a slice --


def captured(used: list[float]) -> HostAnswer:
    values = {
        "tpu_chips_detected": [8.0],
        "tpu_duty_cycle_ratio": [0.5],
        "tpu_hbm_used_bytes": used,
    }
    told = {"capture": {"readings": [{"collector": "libtpu", "code": "ok"}]}, "values": values}
    return HostAnswer("host-0", 0, json.dumps(told), "")


def missed(answer: HostAnswer, wanted: SliceConfig | None, *, are_real: bool = True) -> list[str]:
    measured = measured_on_host(answer, wanted, are_real=are_real)
    return [str(each.what) for each in measured if each.is_met is False]


def test_chips_that_no_source_tells_of_are_a_fault_where_they_are_real() -> None:
    """An exporter that reaches nothing has no readings, as one on a host without chips."""
    told = {
        "capture": {"readings": [{"collector": "libtpu", "code": "UNAVAILABLE"}]},
        "values": {"tpu_chips_detected": [0.0]},
    }
    away = HostAnswer("host-0", 0, json.dumps(told), "")
    wanted = SliceConfig(generation="v6e", topology="2x4")
    assert missed(away, wanted) == ["chips on host-0"]
    assert missed(away, wanted, are_real=False) == []
    assert missed(away, None) == []


def test_every_chip_of_engines_that_share_a_host_has_to_be_in_use() -> None:
    wanted = SliceConfig(generation="v6e", topology="2x4", num_engines=8)
    assert missed(captured([1e9] * 8), wanted) == []
    (what,) = missed(captured([1e9] * 7 + [0.0]), wanted)
    assert what == "chips on host-0 with memory in use, over all engines"
    # The exporter took the chips of two engines for the same.
    assert len(missed(captured([1e9] * 4), wanted)) == 1
    # One engine of a large model may well leave a chip alone, as far as is known.
    assert missed(captured([1e9]), SliceConfig(generation="v6e", topology="2x4")) == []
    assert missed(captured([1e9]), None) == []


def figure_of(*deployments: dict[str, Any]) -> PublishedFigure | str:
    source = "meta-llama/Llama-3.1-8B-Instruct"
    config = ModelConfig(name="m", source=source, engine="vllm-tpu", deployments=[*deployments])
    return published_figure(RunModel("m", config, 1))


def test_published_figure_counts_for_each_replica() -> None:
    figure = figure_of(CHIP | {"replicas": 3})
    assert not isinstance(figure, str)
    assert figure.requests_per_s == pytest.approx(3 * 10.77)
    assert figure.concurrency == 3 * 128
    assert figure_of(CHIP, CHIP | {"compute_class": "reserved"}) == (
        "2 deployments: no published figure holds for several together"
    )


def test_page_names_the_shipped_files_that_have_a_published_figure() -> None:
    named = set()
    for path in sorted((ROOT / "deployments/tpu").glob("*.yaml")):
        checked = check_serve_config(yaml.safe_load(path.read_text()), None)
        for config in checked.applications.values():
            model = RunModel(config.models[0].name, config.models[0], 1)
            if not isinstance(published_figure(model), str):
                named.add(path.name)
    assert named
    page = (ROOT / "docs/operate/first-run.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `throughput` |"))
    assert set(re.findall(r"`([\w.-]+\.yaml)`", row)) == named


def warm_up_of(*on_hosts: str, **changes: Any) -> str | None:
    config = ModelConfig(
        name="m", source="models/slicewise-demo", engine="vllm-tpu", deployments=[CHIP], **changes
    )
    return no_warm_up(RunModel("m", config, 1), on_hosts)


def test_late_programs_are_judged_where_engines_warm_up() -> None:
    assert warm_up_of("", "0") is None
    assert warm_up_of("0", "1") == "SKIP_JAX_PRECOMPILE"
    assert warm_up_of("", engine_env={"SKIP_JAX_PRECOMPILE": "1"}) == "SKIP_JAX_PRECOMPILE"
    # What the file says goes before what the host has.
    assert warm_up_of("1", engine_env={"SKIP_JAX_PRECOMPILE": "0"}) is None
    assert warm_up_of("", engine_args={"enforce_eager": True}) == "enforce_eager"


def test_published_figure_of_a_part_counts_for_each_engine_on_a_slice() -> None:
    config = ModelConfig(
        name="m",
        source="meta-llama/Llama-3.1-8B-Instruct",
        engine="vllm-tpu",
        deployments=[
            {
                "compute_class": "spot",
                "slice": {"generation": "v6e", "topology": "2x4", "num_engines": 8},
            }
        ],
    )
    figure = published_figure(RunModel("m", config, 8))
    assert not isinstance(figure, str)
    assert figure.requests_per_s == pytest.approx(8 * 10.77)
    assert figure.concurrency == 8 * 128


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"a": {"jax": "1", "ray": "2"}, "b": {"jax": "1", "ray": "2"}}, []),
        ({"a": {"jax": "1", "ray": "2"}, "b": {"jax": "3", "ray": "2"}}, ["jax is 1 on a, 3 on b"]),
        ({"a": {"jax": "1"}, "b": {}}, ["jax is 1 on a, None on b"]),
        # A host that did not answer has nothing.
        ({"a": {"jax": "1"}, "b": None}, ["packages is {'jax': '1'} on a, None on b"]),
        ({"a": "3.11.7"}, []),
        ({}, ["packages is told by no host"]),
    ],
)
def test_what_hosts_differ_in_is_told_field_by_field(
    found: dict[str, Any], told: list[str]
) -> None:
    assert different(found, "packages") == told
