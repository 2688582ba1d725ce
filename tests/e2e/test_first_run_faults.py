"""A real fault in each stage of `slicewise first-run` in turn, on the embedded default.

The verdict names the stage that it hit, and the archive has what was found before. The stages of
memory and throughput are skipped on CPUs; what several hosts have to have alike is looked at on
hosts in namespaces of their own, where nothing is served.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deployments.first_run.order import RunStage
from deployments.first_run.record.evidence import ARCHIVE
from deployments.first_run.runner import TEXT_PAGE
from deployments.simulation.hosts.namespaces import Hosts, check_permitted
from deployments.simulation.plan import SimulatedSlices
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import RayNodes, node_environment

from .application import PROJECT_ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

PATIENCE = 5
RUN_S = 1500.0
NODES_S = 120.0
# In the environment of all that a run starts.
MARK = "SLICEWISE_FAULT_TEST"
WEIGHTS = "model.safetensors"
# More than a run has written when its engines are ready, less than a machine's memory would miss.
DISK = "8m"


class Run:
    """A run of some stages on a model of its own, that is watched while it goes on."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.model = folder / "model"
        shutil.copytree(PROJECT_ROOT / "models/slicewise-demo", self.model)
        self.out = folder / "out"
        self._mark = str(folder)
        self._file = folder / "serve_config.yaml"
        self._file.write_text(yaml.safe_dump(self._settings()))
        self._output = folder / "output.txt"
        self._options = options
        self._environment = environment

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())
        settings["applications"][0]["args"]["models"][0]["source"] = str(self.model)
        return settings

    def until_it_ends(self, meanwhile: Callable[["Run"], bool] = lambda _: True) -> None:
        """Runs it. `meanwhile` is called until it says that it has done what it is to do."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                self._command(),
                cwd=PROJECT_ROOT,
                env=inherited | {MARK: self._mark} | self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                until_s, is_done = time.monotonic() + RUN_S, False
                while process.poll() is None:
                    assert time.monotonic() < until_s, self.said
                    is_done = is_done or meanwhile(self)
                    time.sleep(0.1)  # between two looks at a process that others end
                assert is_done, self.said
            finally:
                process.kill()
                process.wait()
                left = list(self.processes())
                for each in left:
                    each.kill()
        assert left == [], self.said

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "deployments.cli", "first-run", str(self._file)]
        return [*command, "--out", str(self.out), "--patience", f"{PATIENCE}", *self._options]

    @property
    def said(self) -> str:
        """What the command has printed."""
        return self._output.read_text(errors="replace")

    def processes(self, name: str = "", *, is_served: bool = False) -> list[psutil.Process]:
        """All that it has started, of whose command this is a part; or its application's alone."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                is_ours = environment.get(MARK) == self._mark
                is_ours = is_ours and (not is_served or "RAY_TMPDIR" in environment)
                if is_ours and name in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def outcomes(self) -> dict[str, str]:
        """How each stage ended, by the archive."""
        found = {}
        with tarfile.open(self.out / ARCHIVE) as archive:
            for entry in archive:
                path = Path(entry.name)
                if path.name == "result.json" and (file := archive.extractfile(entry)) is not None:
                    found[path.parent.name] = json.loads(file.read())["outcome"]
        return found

    def reason(self, stage: RunStage) -> str:
        """Why a stage failed, which the page says too."""
        reason: str = json.loads((self.out / stage / "result.json").read_text())["reason"]
        assert reason
        assert reason.split(";")[0][:40] in (self.out / TEXT_PAGE).read_text()
        return reason


class RunOnSmallDisk(Run):
    """A run whose `--out` is a disk of its own, which only the run sees. Kept as it was at the end.

    Root makes the mount in a namespace, so that a killed test leaves none behind.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        with skipped_where_refused():
            check_permitted()
        super().__init__(folder, *options)
        self._disk = folder / "disk"
        self._disk.mkdir()
        self.out.mkdir()

    def _command(self) -> list[str]:
        kept, self.out = self.out, self._disk
        command = shlex.join(super()._command())
        self.out = kept
        disk = shlex.quote(f"{self._disk}")
        lines = [
            f"mount -t tmpfs -o size={DISK} tmpfs {disk} || exit",
            command,
            "status=$?",
            f"cp -r {disk}/. {shlex.quote(f'{kept}')}",
            "exit $status",
        ]
        # As `tests/deployments/first_run/test_evidence.py` has it.
        return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "\n".join(lines)]

    def fill(self) -> None:
        """Fills the disk, as somebody else's file does."""
        command = self.processes("deployments.cli first-run")[0]
        filler = Path(f"/proc/{command.pid}/root") / self._disk.relative_to("/") / "filler"
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def names(self) -> set[str]:
        """What the archive has."""
        with tarfile.open(self.out / ARCHIVE) as archive:
            return {name.removeprefix("first-run/") for name in archive.getnames()}


def weights_gone(after: str) -> Callable[[Run], bool]:
    """Returns what takes a run's weights away once it has said these words."""

    def take_away(run: Run) -> bool:
        if after not in run.said:
            return False
        (run.model / WEIGHTS).unlink()
        return True

    return take_away


def failed_at(stage: RunStage, run: Run) -> None:
    """Holds the archive against a run that failed at one stage, after a start that passed."""
    assert run.outcomes() == {RunStage.COLD_START: "passed", stage: "failed"}, run.said
    with tarfile.open(run.out / ARCHIVE) as archive:
        assert "first-run/application-1.log" in archive.getnames()


def test_package_that_is_not_of_the_lock_fails_the_doctor(tmp_path: Path) -> None:
    """As in an image that was built from another list than the one that it names."""
    lock = tmp_path / "packages.lock"
    lock.write_text("transformers==0.0.1\n")
    run = Run(tmp_path, "--only", "doctor", SLICEWISE_LOCK=str(lock))
    run.until_it_ends()
    assert run.outcomes() == {RunStage.DOCTOR: "failed"}, run.said
    reason = run.reason(RunStage.DOCTOR)
    assert reason.startswith("doctor on this host: transformers: "), reason
    # What the host is like is in the archive all the same, with all that the doctor has found.
    with tarfile.open(run.out / ARCHIVE) as archive:
        assert {"first-run/doctor/hosts.json", "first-run/doctor/doctor.json"} <= {
            *archive.getnames()
        }


def test_exporter_that_dies_fails_its_stage_while_the_application_goes_on(tmp_path: Path) -> None:
    """Its process is killed each time that one is there, and nothing else is."""
    killed: set[int] = set()

    def kill(run: Run) -> bool:
        for process in run.processes("tpu-exporter --dump-raw"):
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        return f"{RunStage.EXPORTER}: " in run.said

    run = Run(tmp_path, "--only", RunStage.EXPORTER)
    run.until_it_ends(kill)
    assert len(killed) >= 2, run.said  # idle, and beside the streams
    failed_at(RunStage.EXPORTER, run)
    reason = run.reason(RunStage.EXPORTER)
    assert "capture on this host" in reason
    assert "the exporter wrote no capture" in reason
    result = json.loads((run.out / RunStage.EXPORTER / "result.json").read_text())
    met = {each["what"]: each["is_met"] for each in result["measurements"]}
    assert met == {"streams beside it": True, "capture on this host": False}


def test_disk_that_is_filled_costs_logs_alone_and_is_named(tmp_path: Path) -> None:
    run = RunOnSmallDisk(tmp_path, "--only", RunStage.RESUME)
    fill_once = filled(run, is_lasting=False)
    run.until_it_ends(fill_once)
    assert run.outcomes() == {RunStage.COLD_START: "passed", RunStage.RESUME: "passed"}, run.said
    page = " ".join((run.out / TEXT_PAGE).read_text().split())
    assert "No space left on device" in page, run.said
    assert f"first-run: failed: 2 passed; first fault: not in {tmp_path}/disk: " in run.said
    # What had no room as a file of its own has it in the archive, which is smaller.
    assert {"cold_start/result.json", "resume/result.json", "resume/before.json"} <= run.names()
    assert not (run.out / "resume/before.json").exists()


def test_disk_that_stays_full_keeps_what_was_before_and_is_named(tmp_path: Path) -> None:
    """Somebody takes what the run has kept back for itself too."""
    run = RunOnSmallDisk(tmp_path, "--only", RunStage.EXPORTER)
    run.until_it_ends(filled(run, is_lasting=True))
    for name in ("run.json", "cold_start/result.json", "application-1.log"):
        assert (run.out / name).stat().st_size > 0, run.said
    assert json.loads((run.out / "cold_start/result.json").read_text())["outcome"] == "passed"
    assert "not in" in run.said
    assert "No space left on device" in run.said
    # The run went on, and its verdict was printed where it could not be written.
    assert f"{RunStage.EXPORTER}: passed" in run.said
    assert "first-run: failed: 2 passed; first fault: not in" in run.said
    # All of it is in an archive that has found another place.
    told = re.search(r"first-run: send back (\S+), because (\S+) does not have all of it", run.said)
    assert told is not None, run.said
    with tarfile.open(told[1]) as archive:
        assert "first-run/exporter/result.json" in archive.getnames()
    shutil.rmtree(Path(told[1]).parent)


def filled(run: RunOnSmallDisk, *, is_lasting: bool) -> Callable[[Run], bool]:
    """Returns what fills a run's disk once it has started: once, or until its last stage ended."""

    def fill(_: Run) -> bool:
        if f"{RunStage.COLD_START}: passed" not in run.said:
            return False
        is_over = f"{RunStage.EXPORTER}: " in run.said
        run.fill()
        return is_over or not is_lasting

    return fill


def test_installation_that_is_broken_fails_the_probe(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "jax"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtpu.so: not a library')\n")
    run = Run(tmp_path, "--only", "probe", PYTHONPATH=str(broken.parent))
    run.until_it_ends()
    assert run.outcomes() == {RunStage.PROBE: "failed"}, run.said
    assert run.reason(RunStage.PROBE)


def test_weights_that_were_cut_short_fail_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = run.model / WEIGHTS
    os.truncate(weights, weights.stat().st_size // 2)
    run.until_it_ends()
    outcomes = run.outcomes()
    assert outcomes.pop(RunStage.COLD_START) == "failed", run.said
    alone = {RunStage.DOCTOR, RunStage.PROBE, RunStage.HOSTS}
    assert outcomes == {
        stage: "passed" if stage in alone else "blocked"
        for stage in RunStage
        if stage != RunStage.COLD_START
    }
    run.reason(RunStage.COLD_START)
    # Why is in the application's log, which the archive has.
    with tarfile.open(run.out / ARCHIVE) as archive:
        file = archive.extractfile("first-run/application-1.log")
        assert file is not None
        assert b"safetensors" in file.read().lower()


def test_weights_that_are_gone_fail_the_second_start(tmp_path: Path) -> None:
    run = Run(tmp_path, "--only", "warm_start")
    run.until_it_ends(weights_gone(after=f"{RunStage.COLD_START}: passed"))
    failed_at(RunStage.WARM_START, run)
    run.reason(RunStage.WARM_START)


@pytest.mark.parametrize(
    "stage", [RunStage.EXPORTER, RunStage.CORRECTNESS, RunStage.MIXED_LOAD, RunStage.DRAIN]
)
def test_application_that_dies_fails_the_stage_that_asks_it(
    tmp_path: Path, stage: RunStage
) -> None:
    """Its gateway, its ingress and its engines, all at once: nobody is left to answer."""

    def kill(run: Run) -> bool:
        if f"{stage} ..." not in run.said:
            return False
        if not run.processes("deployments.first_run.child"):
            return False  # the stage's own process is not there yet
        for process in run.processes(is_served=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        return True

    run = Run(tmp_path, "--only", stage)
    run.until_it_ends(kill)
    failed_at(stage, run)
    run.reason(stage)


def test_engine_that_cannot_return_fails_the_resume(tmp_path: Path) -> None:
    """Its core is killed by the stage, and what it is loaded from is gone."""
    run = Run(tmp_path, "--only", "resume")
    run.until_it_ends(weights_gone(after=f"{RunStage.RESUME} ..."))
    failed_at(RunStage.RESUME, run)
    assert "engines ready again" in run.reason(RunStage.RESUME)


def test_hosts_with_different_versions_fail_by_what_differs(tmp_path: Path) -> None:
    """One of two hosts of a slice has another JAX, as after a rebuilt image that one node kept."""
    with skipped_where_refused():
        check_permitted()
    other = tmp_path / "other"
    installed = other / "jax-0.1.2.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.1.2\n")
    pair = SimulatedSlices(
        name="spot", compute_class="spot", generation="v6e", topology="2x4", chips_per_host=4
    )
    out = tmp_path / "out"
    with Hosts() as network:
        head, *hosts = [network.add(each) for each in ("head", "host-0", "host-1")]
        environment = node_environment(network.folder) | {"PYTHONPATH": str(PROJECT_ROOT)}
        nodes = RayNodes(head, environment, tmp_path)
        nodes.start_head(NODES_S)
        nodes.join_slice(pair, hosts, [{}, {"PYTHONPATH": f"{other}:{PROJECT_ROOT}"}])
        nodes.wait_joined(NODES_S)
        command = [sys.executable, "-m", "deployments.cli", "first-run"]
        command += [str(PROJECT_ROOT / "serve_config.yaml"), "--out", str(out), "--only", "hosts"]
        command += ["--address", nodes.address, "--patience", f"{PATIENCE}"]
        with (tmp_path / "output.txt").open("wb") as output:
            run = head.start(*command, env=environment, stdout=output, stderr=output)
            code = run.wait()
    said = (tmp_path / "output.txt").read_text()
    assert code == 1, said
    result = json.loads((out / RunStage.HOSTS / "result.json").read_text())
    assert result["outcome"] == "failed", said
    judged = {each["what"]: each["is_met"] for each in result["measurements"]}
    assert judged["python of 2 hosts"], said
    assert not judged["packages of 2 hosts"], said
    assert f"0.1.2 on {hosts[1].address}" in result["reason"]
    assert "jaxlib" not in result["reason"]
    assert result["reason"] in " ".join((out / TEXT_PAGE).read_text().split())
