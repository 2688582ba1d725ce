"""What is wrong with what slices stand on, and with models, classes, plans and orders."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from supply_builders import life

from autoscaling.orders.command import order
from autoscaling.provisioning.sidecar.readings import ClusterWish, QuotaUse
from deployments.status.cluster.reading import (
    ClassReading,
    ClusterReading,
    ClusterWarning,
    SuspendedRule,
)
from deployments.status.findings.finding import FleetFinding, Severity
from deployments.status.findings.join import StatusReadings, find_faults
from deployments.status.findings.lines import finding_lines
from serving.domain.supply.orders import OperatorOrder, OrderKind
from tests.deployments.status.staged import (
    GROUP,
    NOW_S,
    Scene,
    gateway_pod,
    head_pod,
    instant,
    pool_pod,
    ready,
)

UNREADY = {"conditions": [ready("False", 700)]}
STARTING = {"conditions": [ready("False", 20)]}
RUNBOOKS = "docs/operate/runbooks"
ROOT = Path(__file__).parents[3]


def scene(**parts: object) -> Scene:
    """One with a slice that is well."""
    made = Scene(**parts)  # type: ignore[arg-type]
    made.add()
    return made


def told(found: tuple[FleetFinding, ...]) -> list[tuple[Severity, str]]:
    return [(each.severity, each.subject) for each in found]


@pytest.mark.parametrize(
    ("control", "expected", "what"),
    [
        ([gateway_pod("g-1"), gateway_pod("g-2")], (Severity.CRITICAL, "head"), "is not there"),
        (
            [head_pod(**UNREADY), gateway_pod("g-1"), gateway_pod("g-2")],
            (Severity.CRITICAL, "head head-1"),
            "no slice is added, taken over or dropped",
        ),
        (
            [head_pod(), gateway_pod("g-1"), gateway_pod("g-2", **UNREADY)],
            (Severity.WARNING, "gateway g-2"),
            "the other gateways have its requests",
        ),
        (
            [head_pod(), gateway_pod("g-1")],
            (Severity.WARNING, "gateways"),
            "1 of 2 pods is not there",
        ),
    ],
)
def test_control_pod_that_is_away_is_told(
    control: list[dict[str, object]], expected: tuple[Severity, str], what: str
) -> None:
    found = scene(control=control).found()
    assert told(found) == [expected]
    assert what in found[0].what


@pytest.mark.parametrize(
    ("pool", "expected", "what"),
    [
        ([], (Severity.WARNING, "control pods"), "2 of 2 pods are not there: streams go on"),
        ([pool_pod("c-1")], (Severity.WARNING, "control pods"), "1 of 2 pods is not there"),
        (
            [pool_pod("c-1", **UNREADY), pool_pod("c-2")],
            (Severity.WARNING, "control c-1"),
            "it is not ready (Running): streams go on; its processes are on the others of its kind",
        ),
    ],
)
def test_pod_of_control_processes_that_is_away_is_told_and_is_no_catastrophe(
    pool: list[dict[str, object]], expected: tuple[Severity, str], what: str
) -> None:
    wish = ClusterWish({"head": 1, "gateway": 2, "control": 2}, frozenset({GROUP}))
    control = [head_pod(), gateway_pod("g-1"), gateway_pod("g-2"), *pool]
    found = scene(control=control, cluster_parts={"wish": wish}).found()
    assert told(found) == [expected]
    assert what in found[0].what
    assert "ControlPodsMissing.md" in found[0].action


def test_last_gateway_is_told_at_once_and_another_only_when_it_takes_long() -> None:
    starting = [head_pod(), gateway_pod("g-1"), gateway_pod("g-2", **STARTING)]
    assert scene(control=starting).found() == ()
    both = [head_pod(), gateway_pod("g-1", **STARTING), gateway_pod("g-2", **STARTING)]
    found = scene(control=both).found()
    assert told(found) == [(Severity.CRITICAL, "gateway g-1"), (Severity.CRITICAL, "gateway g-2")]
    assert "every request fails" in found[0].what


@pytest.mark.parametrize(("ago_s", "is_told"), [(600, True), (7200, False)])
def test_restart_of_the_head_is_told_for_an_hour(ago_s: float, is_told: bool) -> None:
    end = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": instant(ago_s + 1)}
    container = {
        "name": "ray-head",
        "restartCount": 1,
        "state": {"running": {"startedAt": instant(ago_s)}},
        "lastState": {"terminated": end},
    }
    control = [head_pod(containerStatuses=[container]), gateway_pod("g-1"), gateway_pod("g-2")]
    found = scene(control=control).found()
    words = [(each.what, each.since_s) for each in found]
    expected = (
        "its container ray-head has restarted once, last ended as OOMKilled (exit status 137)"
    )
    assert words == ([(expected, ago_s)] if is_told else [])


@pytest.mark.parametrize(
    ("quotas", "warnings", "what", "action"),
    [
        (
            (QuotaUse("few", "requests.google.com/tpu", 8.0, 12.0),),
            (),
            ": quota few allows 12 requests.google.com/tpu, and 8 are used",
            f"{RUNBOOKS}/QuotaExhausted.md",
        ),
        (
            (QuotaUse("few", "requests.google.com/tpu", 8.0, 16.0),),
            (ClusterWarning("FailedToCreateWorkerPod", "webhook is away", NOW_S - 30),),
            ": webhook is away",
            f"{RUNBOOKS}/SlicesNotCreated.md",
        ),
        ((), (), "", f"{RUNBOOKS}/SlicesNotCreated.md"),
    ],
)
def test_slices_that_nobody_makes_are_told_with_the_reason(
    quotas: tuple[QuotaUse, ...], warnings: tuple[ClusterWarning, ...], what: str, action: str
) -> None:
    one = scene(replicas=3, cluster_parts={"quotas": quotas, "warnings": warnings})
    (found,) = one.found()
    assert (found.severity, found.subject) == (Severity.WARNING, f"group {GROUP}")
    assert found.what == f"2 of 3 slices that are asked for have no pods{what}"
    assert found.action.endswith(action)


def test_full_quota_without_a_missing_slice_is_well() -> None:
    quotas = (QuotaUse("few", "requests.google.com/tpu", 8.0, 8.0),)
    assert scene(cluster_parts={"quotas": quotas}).found() == ()


@pytest.mark.parametrize(
    ("num_rules", "severity", "words"),
    [
        (1, Severity.WARNING, "GKE has suspended its only rule and makes no machines for it"),
        (2, Severity.NOTE, "GKE has suspended 1 of its 2 rules"),
    ],
)
def test_suspended_class_is_told_with_gkes_words(
    num_rules: int, severity: Severity, words: str
) -> None:
    rule = SuspendedRule("OutOfResources: no capacity", NOW_S - 90)
    classes = (ClassReading(GROUP, num_rules, (rule,)),)
    (found,) = scene(cluster_parts={"classes": classes}).found()
    assert (found.severity, found.subject, found.since_s) == (severity, f"class {GROUP}", 90)
    assert found.what == f"{words}: OutOfResources: no capacity"
    assert f"kubectl get computeclass {GROUP}" in found.action


def test_part_that_may_not_be_read_is_told_and_hides_nothing() -> None:
    parts = {"problems": {"nodes": "nodes is forbidden"}, "machines": None}
    (found,) = scene(cluster_parts=parts).found()
    assert found.what == ("nodes could not be read, so nothing is said of them: nodes is forbidden")


def test_rayservice_that_is_not_there_is_told() -> None:
    reading = ClusterReading("RayService serving/llm", "serving")
    found = find_faults(StatusReadings(None, reading), NOW_S)
    assert told(found) == [(Severity.CRITICAL, "RayService serving/llm")]


def test_model_without_an_engine_is_told_with_what_its_replicas_do() -> None:
    one = Scene(waiting=4)
    one.lives = [life("r-1", at_s=NOW_S - 400), life("r-2", at_s=NOW_S - 500)]
    found = one.found()
    assert told(found) == [(Severity.CRITICAL, "model demo"), (Severity.WARNING, "class spot")]
    assert found[0].what == (
        "no engine takes its requests, 4 requests wait; its replicas: 2 provisioning"
    )
    assert (found[1].what, found[1].since_s) == (
        "2 replicas wait for a slice: none is free",
        500,
    )


def test_model_that_is_scaled_to_nothing_is_well() -> None:
    assert Scene().found() == ()


def test_ready_engine_without_a_link_is_told() -> None:
    one = scene()
    fleet = one.fleet()
    (model,) = fleet.models
    engines = tuple(
        engine.model_copy(update={"linked": False, "since_s": 900.0}) for engine in model.engines
    )
    unlinked = fleet.model_copy(update={"models": (model.model_copy(update={"engines": engines}),)})
    found = find_faults(StatusReadings(unlinked, one.cluster()), NOW_S)
    assert told(found) == [(Severity.CRITICAL, "model demo"), (Severity.WARNING, "engine engine-0")]


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ({"age_s": 75.0, "alerts": ["old words"], "models": []}, "nobody plans any more"),
        ({"age_s": 2.0, "alerts": ["the load is old"], "models": []}, "the load is old"),
    ],
)
def test_plan_that_is_stale_or_complains_is_told(plans: dict[str, object], expected: str) -> None:
    (found,) = scene(autoscaling=plans).found()
    assert found.what.startswith(expected)


def test_orders_for_more_than_a_slice_are_notes_with_the_way_to_lift_them() -> None:
    freeze = OperatorOrder(OrderKind.FREEZE, "anna", "a demo", NOW_S - 60.0, until_s=NOW_S + 600.0)
    pin = OperatorOrder(OrderKind.PIN, "bo", "paid for", NOW_S, "spot", model="demo")
    release = OperatorOrder(OrderKind.RELEASE, "cy", "mended", NOW_S, "gone-0", "gone")
    found = scene(orders=(freeze, pin, release)).found()
    assert [(each.subject, each.what, each.action) for each in found] == [
        (
            "fleet",
            "nothing is scaled down for another 10m00s, ordered by anna: a demo",
            "once the reason is over: slicewise order thaw",
        ),
        (
            "class spot",
            "its replicas of demo stay as many as they are until it is lifted, ordered by bo: "
            "paid for",
            "once the reason is over: slicewise order unpin spot --model demo",
        ),
    ]


def test_findings_are_printed_in_narrow_lines_and_cannot_command_the_terminal() -> None:
    assert list(finding_lines(())) == ["nothing is wrong"]
    found = FleetFinding(Severity.WARNING, "slice s", "words " * 40, "do\x1b[2J this", 90.0)
    lines = list(finding_lines((found, replace(found, severity=Severity.NOTE))))
    assert lines[0] == "found: 1 warning, 1 note"
    assert lines[1].startswith("WARNING   slice s [1m30s]: words words")
    assert all(len(line) <= 110 for line in lines)
    assert lines[-1] == "          -> do?[2J this"


def test_pages_and_commands_that_findings_name_exist() -> None:
    texts = [path.read_text() for path in (ROOT / "deployments/status/findings").glob("*.py")]
    pages = {
        page for text in texts for page in re.findall(r"""["']((?:[A-Z][a-z]+){2,})["']""", text)
    }
    assert len(pages) > 10
    assert [page for page in pages if not (ROOT / RUNBOOKS / f"{page}.md").is_file()] == []
    orders = {name for text in texts for name in re.findall(r"slicewise order (\w+)", text)}
    assert orders == {"thaw", "unpin", "release", "condemn"}
    known = {command.name or command.callback.__name__ for command in order.registered_commands}
    assert orders <= known
    (anchor,) = {found for text in texts for found in re.findall(r"operations\.md#([\w-]+)", text)}
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs/operate/operations.md").read_text(), re.M)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
