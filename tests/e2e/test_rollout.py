"""A model is replaced under streams on a simulated cluster: slice by slice, canary, rollback.

Real Ray nodes carry the chips; the engines are paced. Serve's own rolling update does the
replacing, started by `serve deploy`.
"""

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml

from .application import (
    Role,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    serve_config,
)
from .rollout_load import StreamLoad, patiently

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = "paced"
SHAPE = {"generation": "v6e", "topology": "1x1"}
NUM_SLICES = 4
# One more than the model has: a replacement must not take it.
PLAN = {"slices": [{"name": "kept", "compute_class": "reserved", "count": NUM_SLICES + 1, **SHAPE}]}
WIDTH = 48
NUM_TOKENS = 120


def model_of(seed: int, replicas: int = NUM_SLICES, **changes: Any) -> dict[str, Any]:
    pace = {"ttft_ms": 10.0, "tpot_ms": 50.0, "load_ms": 1000.0, "model_seed": seed}
    deployment = {
        "compute_class": "reserved",
        "replicas": replicas,
        "num_cpus": 0.01,
        "slice": SHAPE,
    }
    return paced_model(pace=pace, deployments=[deployment], **changes)


def args_of(*models: dict[str, Any], **sections: Any) -> dict[str, Any]:
    sections.setdefault("rollout", {"drain_s": 60.0})
    sections.setdefault("gateway", {"request_deadline_s": 60.0})
    # The same as at the start: hosts of a simulated cluster are not this machine.
    sections.setdefault("link", {"listen_on": "node"})
    return application_args(*models, **sections)


class Watch(threading.Thread):
    """Looks at the fleet ten times a second: who holds slices, in which version and state."""

    def __init__(self, application: RunningApplication) -> None:
        super().__init__(daemon=True)
        self._application = application
        self._ending = threading.Event()
        self.most_held = 0
        self.at_most: list[tuple[str, str, str]] = []
        self.most_away = 0  # slices at once that were not ready, of those that there should be
        self.num_looks = 0

    def run(self) -> None:
        while not self._ending.wait(0.1):
            rows = self._application.fleet()["slices"]
            held = [row for row in rows if row["state"] not in ("requested", "provisioning")]
            ready = [row for row in held if row["state"] == "ready"]
            self.num_looks += 1
            # By name: a slice that changes hands may have a row of each replica for a moment, and a
            # replica that is to end before it has a slice drains without a name.
            names = {row["name"] for row in held if row["name"] is not None}
            if len(names) > self.most_held:
                self.most_held = len(names)
                self.at_most = [(row["name"], row["state"], row["reason"]) for row in held]
            self.most_away = max(self.most_away, NUM_SLICES - len(ready))

    def finish(self) -> None:
        self._ending.set()
        self.join(10)


@pytest.fixture
def application() -> Iterator[RunningApplication]:
    with patiently(RunningApplication(args_of(model_of(1)), through="sim", plan=PLAN)) as running:
        running.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: NUM_SLICES}, 120.0)
        yield running


def load_on(application: RunningApplication, **changes: Any) -> StreamLoad:
    given: dict[str, Any] = {"model": MODEL, "width": WIDTH, "num_tokens": NUM_TOKENS}
    load = StreamLoad(application.base_url, seeds=(1, 2), **(given | changes))
    load.start()
    return load


def deploy(application: RunningApplication, args: dict[str, Any]) -> None:
    path = application.folder / "changed.yaml"
    path.write_text(yaml.safe_dump(serve_config(args, application.port)))
    answer = application.serve("deploy", str(path))
    assert answer.returncode == 0, answer.stderr


def version_ids(fleet: dict[str, Any]) -> list[str]:
    return [row["version"] for row in fleet["slices"] if row["state"] == "ready"]


def wait_version(
    application: RunningApplication, version: str, timeout_s: float = 240.0
) -> dict[str, Any]:
    """Waits until all slices are ready with it, and nothing else is there."""
    return application.wait_fleet(
        lambda fleet: (
            version_ids(fleet) == [version] * NUM_SLICES and len(fleet["slices"]) == NUM_SLICES
        ),
        timeout_s,
    )


def current(fleet: dict[str, Any]) -> str:
    return str(fleet["models"][0]["version"])


def other_processes(application: RunningApplication) -> list[psutil.Process]:
    return [*application.processes(Role.GATEWAY), *application.processes(Role.DIRECTORY)]


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n    {line}\n")


def test_model_is_replaced_slice_by_slice_under_streams(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.fleet()
    others = other_processes(application)
    load, watch = load_on(application), Watch(application)
    watch.start()
    began_s = time.monotonic()
    deploy(application, args_of(model_of(2)))
    changed = application.wait_fleet(lambda fleet: current(fleet) != current(before), 120.0)
    wait_version(application, current(changed))
    took_s = time.monotonic() - began_s
    watch.finish()
    outcome = load.finish()
    assert outcome.failures == []
    assert outcome.mixed == []
    assert min(outcome.seeds[1], outcome.seeds[2]) > WIDTH
    assert watch.most_held == NUM_SLICES, watch.at_most
    assert watch.most_away <= 1, watch.most_away
    # Neither the gateway nor the directory was replaced.
    assert other_processes(application) == others
    resumes = application.fleet()["models"][0]["resumes"]
    report(
        capsys,
        f"{NUM_SLICES} slices replaced in {took_s:.0f} s under {WIDTH} streams: "
        f"{outcome.num_streams} answers, 0 failed, {outcome.seeds[1]} of the old and "
        f"{outcome.seeds[2]} of the new version, none of both; at most {watch.most_held} slices "
        f"held and {watch.most_away} not ready ({watch.num_looks} looks); {resumes} resumes, "
        f"longest gap {outcome.longest_gap_s:.2f} s",
    )


def test_rollback_in_the_middle_keeps_the_engines_that_are_left(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = application.fleet()
    old = {row["engine_id"] for row in before["slices"]}
    load, watch = load_on(application), Watch(application)
    watch.start()
    deploy(application, args_of(model_of(2)))
    middle = application.wait_fleet(
        lambda fleet: (
            sorted(version_ids(fleet)).count(current(fleet)) >= 1
            and current(fleet) != current(before)
        ),
        120.0,
    )
    began_s = time.monotonic()
    deploy(application, args_of(model_of(1)))
    fleet = wait_version(application, current(before))
    took_s = time.monotonic() - began_s
    watch.finish()
    outcome = load.finish()
    assert outcome.failures == []
    assert outcome.mixed == []
    assert watch.most_held == NUM_SLICES, watch.at_most
    assert current(fleet) == current(before) != current(middle)
    kept = old & {row["engine_id"] for row in fleet["slices"]}
    assert len(kept) >= 1
    report(
        capsys,
        f"rollback after {len(old) - len(kept)} of {NUM_SLICES} slices in {took_s:.0f} s: "
        f"{outcome.num_streams} answers, 0 failed, {dict(outcome.seeds)} by version; "
        f"{len(kept)} engines never stopped",
    )


def test_canary_takes_its_share_and_the_same_users(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    stable = model_of(1, NUM_SLICES - 1)
    canary = model_of(2, 1, name="paced-next", canary_of=MODEL, canary_weight=0.2)
    before = {row["engine_id"] for row in application.fleet()["slices"]}
    load = load_on(application, num_tokens=8)
    deploy(application, args_of(stable, canary))
    application.wait_fleet(
        lambda fleet: linked_engines(fleet) == {MODEL: NUM_SLICES - 1, "paced-next": 1}, 120.0
    )
    assert load.finish().failures == []
    # From here on the weight alone decides.
    measured = load_on(application, num_tokens=8, num_users=400)
    deadline_s = time.monotonic() + 90.0
    while measured.outcome.num_streams < 4000 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    outcome = measured.finish()
    assert outcome.failures == []
    assert outcome.mixed == []
    assert all(len(seeds) == 1 for seeds in outcome.users.values()), "a user saw both versions"
    share = sum(seeds == {2} for seeds in outcome.users.values()) / len(outcome.users)
    # 400 users at 0.2: a standard deviation is 0.02.
    assert 0.1 < share < 0.3
    promoted = args_of(model_of(2))
    rest = load_on(application, num_tokens=8)
    deploy(application, promoted)
    fleet = application.wait_fleet(
        lambda fleet: (
            linked_engines(fleet) == {MODEL: NUM_SLICES}
            and set(version_ids(fleet)) == {current(fleet)}
            and len(fleet["models"]) == 1
        ),
        240.0,
    )
    assert rest.finish().failures == []
    assert not before & {row["engine_id"] for row in fleet["slices"]}
    report(
        capsys,
        f"canary of weight 0.2: {outcome.seeds[2]} of {outcome.num_streams} requests, "
        f"{share:.3f} of {len(outcome.users)} users, none in both; promoted, 0 failed",
    )
