"""The emulated operator and webhook against what the real ones made of the same objects.

Each recorded scenario is played on a real control plane, and at each recorded moment the whole
namespace is held against the recorded one. `normalise.py` says what is left out and why,
`differences.py` where the emulation is known to differ.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from control_plane.server import ControlPlane

from .by_hand import snapshot
from .differences import KNOWN
from .namespaces import own_namespace
from .normalise import RULES, Picture, pictures
from .play import Play, recorded, recorded_scenarios
from .scenarios import SCENARIOS
from .webhook_server import Webhook

pytestmark = pytest.mark.process


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    with own_namespace(control_plane.api, "recorded") as name:
        yield name


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two normalised values differ, as paths with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        missing = object()
        pairs = {
            name: (ours.get(name, missing), theirs.get(name, missing))
            for name in sorted({*ours, *theirs})
        }
        found = []
        for name, (one, other) in pairs.items():
            if one is missing or other is missing:
                who = "only in the recording" if one is missing else "only in the emulation"
                found.append(f"{path}/{name}: {who}: {other if one is missing else one!r}")
            else:
                found += differences(one, other, f"{path}/{name}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs_of = enumerate(zip(ours, theirs, strict=True))
        return [
            each
            for number, (one, other) in pairs_of
            for each in differences(one, other, f"{path}/{number}")
        ]
    return [] if ours == theirs else [f"{path}: {ours!r}, recorded {theirs!r}"]


def unexpected(scenario: str, moment: str, found: list[str]) -> list[str]:
    """The differences that nobody knows of, and the known ones that there are no more."""
    known = [each for each in KNOWN if (each.scenario, each.moment) == (scenario, moment)]
    paths = [each.path for each in known]
    stale = [path for path in paths if not any(each.startswith(path) for each in found)]
    return [each for each in found if not each.startswith(tuple(paths))] + [
        f"{path} differs no more: take it out of differences.py" for path in stale
    ]


# The rest is as much of the same: other generations, and indices on single hosts.
LONG = {each for each in SCENARIOS if each.startswith("08-")} - {"08-every-shape-tpu7x"}
LONG |= {"10-single-host-with-host-index"}


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in SCENARIOS],
)
def test_namespace_is_as_recorded_at_every_moment(
    scenario: str, control_plane: ControlPlane, webhook: Webhook, namespace: str
) -> None:
    play = Play(control_plane.api, namespace, webhook, scenario)
    seen = [snapshot(control_plane.api, namespace) for _ in SCENARIOS[scenario](play)]
    # Otherwise the loss of one pod's host is the loss of another's, which the recordings have not.
    for moment in seen:
        placed = [pod["spec"]["nodeName"] for pod in moment["pods"] if "nodeName" in pod["spec"]]
        assert len(placed) == len(set(placed))
    ours = pictures(seen, namespace)
    theirs = pictures(play.recorded.moments, "serving")
    found: dict[str, list[str]] = {}
    for name, one, other in zip(play.recorded.names, ours, theirs, strict=True):
        assert len(other) > 10
        if wrong := unexpected(scenario, name, differences(one, other)):
            found[name] = wrong
    assert not found, _words(found)


def _words(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {each}" for name, wrong in found.items() for each in wrong)


def test_every_recording_is_played() -> None:
    assert set(SCENARIOS) == set(recorded_scenarios())


def test_known_differences_are_of_recorded_moments() -> None:
    moments = {(name, moment) for name in SCENARIOS for moment in recorded(name).names}
    assert {(each.scenario, each.moment) for each in KNOWN} <= moments


def test_every_rule_says_what_and_why() -> None:
    assert all(rule.what and rule.reason for rule in RULES)


def test_a_changed_object_is_a_difference() -> None:
    """What the comparison is made of sees a variable, a label and a missing object."""
    moment = recorded("12-raycluster-flavour").moments[0]
    (picture,) = pictures([moment], "serving")
    changed: Picture = pictures([moment], "serving")[0]
    name = next(key for key in changed if key.startswith("pods/") and ".head" in key)
    changed[name]["spec"]["containers"][0]["env"][0]["value"] = "other"
    changed[name]["metadata"]["labels"]["ray.io/cluster"] = "other"
    gone = next(key for key in changed if key.startswith("services/"))
    del changed[gone]
    found = differences(changed, picture)
    assert len(found) == 3
    assert [each.partition(":")[0].removeprefix("/").partition("/")[0] for each in found] == [
        "pods",
        "pods",
        "services",
    ]
