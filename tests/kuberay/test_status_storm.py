"""`slicewise status` after a storm: each fault is named with what it is and what to do about it."""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from control_plane.kubectl import kubectl_binary
from control_plane.ray_objects import FINALIZER
from control_plane.server import ControlPlane

from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import Snapshot
from serving.domain.supply.records import SupplyState

from .storm import RESERVED, SHAPE, SPOT, Storm, name_of, storm_on
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0
logger = logging.getLogger(__name__)


async def status(storm: Storm, plane: ControlPlane, *options: str, url: str | None = None) -> str:
    """Runs the command as an operator does; what it prints."""
    code, printed, problem = await asked(storm, plane, *options, url=url)
    assert code == 0, problem
    return printed


async def asked(
    storm: Storm, plane: ControlPlane, *options: str, url: str | None = None
) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deployments.cli", "status", "--url", url or storm.url),
        *("--rayservice", "llm", "--namespace", storm.namespace),
        *("--kubeconfig", f"{plane.kubeconfig}", "--patience-s", "2", *options),
        cwd=ROOT,
        env={**os.environ, "PATH": f"{kubectl_binary().parent}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        printed, problem = await process.communicate()
    return process.returncode, printed.decode(), problem.decode()


async def test_storm_is_told_in_words_to_act_on(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> None:
    async with storm_on(control_plane, tmp_path, 11) as storm:
        calm = await status(storm, control_plane)
        logger.info("screen\n%s", calm)
        assert "\nnothing is wrong\n" in calm
        expected = await cause(storm)
        check(await told(storm, control_plane, expected), expected)
        screen = await status(storm, control_plane)
        logger.info("screen\n%s", screen)
        assert max(len(line) for line in screen.partition("\n\n")[0].splitlines()) <= 110
        # The gateway's half is away: the pods are told all the same.
        code, screen, problem = await asked(storm, control_plane, url="http://127.0.0.1:1")
        logger.info("screen\n%s", screen)
        assert (code, "Connection refused" in problem) == (2, True)
        words = " ".join(screen.split())
        assert "CRITICAL gateway: it did not answer, so only pods are looked at" in words
        for subject in ("pod-failed", "half", "held-back"):
            assert f"slice {expected[subject][0][1]}" in words
        # And kubectl's.
        screen = await status(storm, control_plane, "--context", "nowhere")
        logger.info("screen\n%s", screen)
        words = " ".join(screen.split())
        assert "WARNING kubectl: the cluster was not read" in words
        assert "slices:" in words


# Severity, name, what is said of it, what to do.
Telling = tuple[str, str, str, str]
# How each fault may be told: one of them has to be.
Expected = dict[str, tuple[Telling, ...]]


async def cause(storm: Storm) -> Expected:
    """Lets everything go wrong that can be caused here; what is to be told of each."""
    order = iter(storm.slices)
    lonely = next(order)
    (holder,) = [each for each in storm.fleet.holding() if each.whole and each.whole.name == lonely]
    # Its process is away, and its chips stay taken. That shows after a minute.
    await holder.close()
    held_back, failed, half, silent, chipless, quarantined, condemned, gone, doubled = (
        next(order) for _ in range(9)
    )
    # Nothing comes of the reserved class: one slice waits for machines, the next is refused.
    storm.fleet.start(SHAPE, 1, "reserved")
    await storm.move_until(lambda: len(storm.pods_of(RESERVED)) == 2, "a slice is asked for")
    storm.suspend(RESERVED)
    await storm.use_up_quota()
    storm.fleet.start(SHAPE, 1, "reserved")
    await storm.move_until(storm.is_refused, "the quota refuses")
    await storm.order("freeze", "--reason", "the big demo", "--by", "anna", "--for", "2h")
    await storm.order("pin", "reserved", "--at", "2", "--reason", "paid for", "--by", "bo")
    await storm.order("quarantine", quarantined, "--reason", "slow links", "--by", "cy")
    await storm.order("condemn", condemned, "--reason", "ICI errors", "--by", "di")
    await storm.known(lambda snapshot: len(snapshot.orders) == 4)
    twin = storm.double(doubled)
    await storm.known(lambda now: sum(each.name == doubled for each in now.supply) == 2)
    await storm.known(
        lambda now: any(
            each.name == lonely and each.state == SupplyState.LEASED and each.until_s is None
            for each in now.supply
        ),
        120.0,
    )
    storm.gateway.planned_ago_s = 75.0
    held_pod = storm.pod(held_back, 1)
    storm.hold_back(held_pod)
    failed_pod = storm.fail(failed)
    half_pod = storm.pod(half, 1)
    storm.api.delete(half_pod)
    # The provisioner may act before anybody looks.
    storm.keep(silent)
    silent_pod = storm.pod(silent, 1)
    storm.ray.kill(name_of(silent_pod))
    chipless_pod = storm.pod(chipless, 1)
    storm.ray.lose_chips(name_of(chipless_pod))
    gateway, head = storm.gateways()[0], storm.head()
    storm.set_status(gateway, ready=False)
    storm.set_status(head, ready=True, containerStatuses=[restarted()])
    machine = storm.pod(gone)["spec"]["nodeName"]

    def is_seen(now: Snapshot) -> bool:
        chips = {each.name: {host.num_chips for host in each.hosts} for each in now.supply}
        ready = {each.life.slice_name for each in now.records if each.state == SliceState.READY}
        return 0 in chips[chipless] and ready.isdisjoint({failed, silent})

    await storm.known(is_seen)
    storm.api.delete({"apiVersion": "v1", "kind": "Node", "metadata": {"name": machine}})
    await storm.known(lambda _: True)
    describe = f"kubectl -n {storm.namespace} describe pod"
    runbooks = "docs/operate/runbooks"
    only = {
        "model": (
            "critical", "model-2x4-reserved", "no engine takes its requests, 3 requests wait",
            f"{runbooks}/NoSliceReady.md",
        ),
        "plan": ("critical", "autoscaling", "nobody plans any more", "AutoscalerPlanStale.md"),
        "gateway": (
            "warning", name_of(gateway), "it is not ready", f"{describe} {name_of(gateway)}",
        ),
        "head": (
            "warning", name_of(head), "has restarted 2 times, last ended as OOMKilled",
            f"logs {name_of(head)} -c ray-head --previous",
        ),
        "suspended": (
            "warning", RESERVED, "no v6e is left in us-east5-b", f"computeclass {RESERVED}",
        ),
        "quota": (
            "warning", RESERVED, "exceeded quota: few", "QuotaExhausted.md",
        ),
        "waits": ("warning", "reserved", "2 replicas wait for a slice", "SlicePodsPending.md"),
        "unschedulable": (
            "warning", f"{RESERVED}-0", "nodes are available", describe,
        ),
        "held-back": (
            "warning", held_back, f"finalizers hold it: {FINALIZER}",
            f"patch pod {name_of(held_pod)}",
        ),
        "pod-failed": (
            "warning", failed, f"its pod {failed_pod} has ended (Failed",
            f"{describe} {failed_pod}",
        ),
        "half": (
            "warning", half, "1 of its 2 pods is there, none of host 1",
            f"{runbooks}/SlicesNotCreated.md",
        ),
        "chipless": (
            "warning", chipless, f"(pod {name_of(chipless_pod)} on "
            f"{chipless_pod['spec']['nodeName']}) has joined with 0 of 4 chips",
            f"{runbooks}/TpuChipMissing.md",
        ),
        "machine": (
            "warning", gone, f"machine {machine} under its pod", "is replaced",
        ),
        "doubled": (
            "warning", doubled, f"this name: {twin} (pending)", f"slicewise order condemn {twin}",
        ),
        "leased": ("warning", lonely, "nobody who commands it", "slicewise order condemn"),
        "freeze": (
            "note", "fleet", "ordered by anna: the big demo", "slicewise order thaw",
        ),
        "pin": (
            "note", "reserved", "stay at 2 until it is lifted, ordered by bo: paid for",
            "slicewise order unpin reserved",
        ),
        "quarantined": (
            "note", quarantined, "ordered by cy: slow links", "slicewise order release",
        ),
        "condemned": (
            "note", condemned, "ordered by di: ICI errors",
            f"slicewise order release {condemned}",
        ),
    }  # fmt: skip
    # Of the other host too, once the provisioner has ended its node; then it names the pods for
    # deletion, and that is what is told.
    of_silent = (
        ("warning", silent, " is ready, and Ray has no node of it", " logs "),
        ("note", silent, "it has to go: ", "it is replaced where it is wanted"),
        ("warning", silent, "it has to go and is still there: ", "ChangesRefused.md"),
        ("warning", silent, "should have ended and is still there", "finalizers"),
    )
    return {**{what: (telling,) for what, telling in only.items()}, "silent": of_silent}


def restarted() -> Json:
    """A container that was killed for its memory, and runs again."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    end = {"exitCode": 137, "reason": "OOMKilled", "startedAt": now, "finishedAt": now}
    return {
        "name": "ray-head",
        "image": "none",
        "imageID": "",
        "ready": True,
        "restartCount": 2,
        "lastState": {"terminated": end},
        "state": {"running": {"startedAt": now}},
    }


async def told(storm: Storm, plane: ControlPlane, expected: Expected) -> list[list[Json]]:
    """What is told, look after look, until each fault has been.

    On a busy machine the directory sees some of it late, and the first faults are mended by then.
    """
    deadline_s = time.monotonic() + WITHIN_S
    looks: list[list[Json]] = []
    while True:
        await storm.known(lambda _: True)  # the gateway shows what the directory has by now
        looks.append(json.loads(await status(storm, plane, "--json"))["findings"])
        is_all = all(is_told(looks, fault) for fault in expected.values())
        if is_all:
            return looks
        if time.monotonic() > deadline_s:
            logger.error("screen\n%s", await status(storm, plane))
            return looks


def is_told(looks: list[list[Json]], fault: tuple[Telling, ...]) -> bool:
    """Whether one of the looks has it, in one of its ways."""
    return any(those_of(found, telling) for found in looks for telling in fault)


def those_of(found: list[Json], telling: Telling) -> list[Json]:
    """The findings with that severity, name, words and action."""
    severity, name, words, action = telling
    return [
        each
        for each in found
        if each["severity"] == severity
        and subject_of(each) == name
        and words in each["what"]
        and action in each["action"]
    ]


def check(looks: list[list[Json]], expected: Expected) -> None:
    """Each fault is told with its name, its words and what to do; nothing else is blamed."""
    for what, fault in expected.items():
        about = [each for found in looks for each in found if subject_of(each) == fault[0][1]]
        assert is_told(looks, fault), f"{what}: {about or looks[-1]}"
    ranks = ["critical", "warning", "note"]
    for found in looks:
        order = [ranks.index(each["severity"]) for each in found]
        assert order == sorted(order)
    blamed = {subject_of(each) for found in looks for each in found}
    # Replicas that have lost their slices want others, which nobody makes.
    following = {"spot", SPOT}
    names = {name for fault in expected.values() for _, name, _, _ in fault}
    assert names <= blamed <= names | following


def subject_of(finding: Json) -> str:
    """The name of what a finding is about, without its kind."""
    subject: str = finding["subject"]
    return subject.split(" ")[-1]
