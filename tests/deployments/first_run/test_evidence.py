"""Evidence is there at once, in every place that can take it, and without secrets."""

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deployments.first_run.record.evidence import ARCHIVE, MAX_FILE_BYTES, EvidenceFolder
from deployments.simulation.hosts.namespaces import check_permitted
from serving.artifacts.object_store.address import open_store
from tests.hosts.permission import skipped_where_refused

ROOT = Path(__file__).parents[3]
RESERVE_BYTES = 4096


def evidence(folder: Path, store: Path | None = None, *secrets: str) -> EvidenceFolder:
    opened = None if store is None else open_store(str(store))
    return EvidenceFolder(folder, opened, secrets, RESERVE_BYTES)


def test_file_is_in_the_folder_and_in_the_store_at_once_without_secrets(tmp_path: Path) -> None:
    run = evidence(tmp_path / "run", tmp_path / "bucket", "opensesame")
    run.write("probe/log.txt", "say opensesame\n")
    for place in ("run", "bucket"):
        assert (tmp_path / place / "probe/log.txt").read_text() == "say ***\n"
    assert run.faults == ()


def test_archive_has_every_file_and_is_in_the_store_too(tmp_path: Path) -> None:
    run = evidence(tmp_path / "run", tmp_path / "bucket", "opensesame")
    run.write("run.json", "{}")
    run.write("probe/log.txt", "opensesame")
    path = run.archive()
    assert path == tmp_path / "run" / ARCHIVE
    assert path.read_bytes() == (tmp_path / "bucket" / ARCHIVE).read_bytes()
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["first-run/probe/log.txt", "first-run/run.json"]
        log = archive.extractfile("first-run/probe/log.txt")
        assert log is not None
        assert log.read() == b"***"


def test_end_of_a_file_that_is_too_long_is_kept(tmp_path: Path) -> None:
    run = evidence(tmp_path / "run")
    run.write("log.txt", "a" * MAX_FILE_BYTES + "the end")
    text = (tmp_path / "run/log.txt").read_text()
    assert text.endswith("the end")
    assert text.startswith("[the beginning is left out]")
    assert len(text) < MAX_FILE_BYTES + 100


def test_store_that_is_away_is_a_fault_until_it_has_all_that_was_written(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.write_text("no folder, so nothing can be put into it")
    run = evidence(tmp_path / "run", bucket)
    run.write("doctor/result.json", "first")
    assert (tmp_path / "run/doctor/result.json").read_text() == "first"
    (fault,) = run.faults
    assert "not in the store: doctor/result.json" in fault
    bucket.unlink()
    run.write("probe/result.json", "second")
    assert run.faults == ()
    assert (bucket / "doctor/result.json").read_text() == "first"
    assert (bucket / "probe/result.json").read_text() == "second"


def test_archive_that_the_folder_does_not_take_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = evidence(tmp_path / "run")
    run.write("doctor/result.json", "first")
    (tmp_path / "run" / ARCHIVE).mkdir()  # as good as no room
    assert run.archive() is None
    assert not run.has_archive
    path = run.archive_elsewhere()
    assert path is not None
    assert path.is_relative_to(tmp_path)
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["first-run/doctor/result.json"]
    (tmp_path / "run" / ARCHIVE).rmdir()
    assert run.archive() == tmp_path / "run" / ARCHIVE
    assert run.has_archive
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert run.archive_elsewhere() is None


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        evidence(tmp_path / "file" / "run")


def test_reserve_is_given_back_at_the_end(tmp_path: Path) -> None:
    run = evidence(tmp_path / "run")
    run.write("run.json", "{}")
    run.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def on_small_disk(tmp_path: Path, store: str) -> dict[str, Any]:
    with skipped_where_refused():
        check_permitted()
    disk = tmp_path / "disk"
    disk.mkdir()
    program = f"{sys.executable} -m tests.deployments.first_run.full_disk {disk} {store}"
    script = f"mount -t tmpfs -o size=2m tmpfs {disk} && exec {program}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.process
def test_full_disk_is_named_and_what_came_before_is_in_the_archive(tmp_path: Path) -> None:
    found = on_small_disk(tmp_path, "-")
    assert {"doctor/result.json", "probe/result.json", "verdict.txt"} <= set(found["here"])
    assert found["archived"][:2] == ["first-run/doctor/result.json", "first-run/probe/result.json"]
    (fault,) = found["faults"]
    assert "probe/log.txt" in fault
    assert "No space left on device" in fault


@pytest.mark.process
def test_store_takes_what_the_full_disk_does_not(tmp_path: Path) -> None:
    on_small_disk(tmp_path, str(tmp_path / "bucket"))
    assert len((tmp_path / "bucket/probe/log.txt").read_text()) == 300_000
