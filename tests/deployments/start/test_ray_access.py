"""The token of a cluster on one machine, and the file that names it."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.start.ray_access import copy_token, environment_file, token_file
from deployments.start.serve import child_environment


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_token_is_new_for_each_folder_kept_in_it_and_its_users_alone(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    tokens = [token_file(folder).read_text() for folder in folders]
    assert len(set(tokens)) == 2
    assert {len(token) for token in tokens} == {64}
    assert [token_file(folder).read_text() for folder in folders] == tokens
    assert [mode(token_file(folder)) for folder in folders] == [0o600, 0o600]


def test_host_with_a_folder_of_its_own_gets_the_token(tmp_path: Path) -> None:
    inside = tmp_path / "hosts" / "spot-0-0"
    inside.mkdir(parents=True)
    token = token_file(tmp_path)
    copy_token(tmp_path, inside)
    copied = inside / token.name
    assert (copied.read_text(), mode(copied)) == (token.read_text(), 0o600)


def test_host_of_a_cluster_without_a_token_gets_none(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    child_environment({"RAY_AUTH_MODE": "disabled"}, str(tmp_path))
    copy_token(tmp_path, inside)
    assert list(inside.iterdir()) == []


def test_shell_that_reads_the_file_knows_the_cluster_and_no_token(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    environment = child_environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, str(folder))
    path = environment_file(environment, folder)
    done = subprocess.run(
        ["sh", "-c", f". '{path}'; env"], env={}, capture_output=True, text=True, check=True
    )
    said = dict(line.split("=", 1) for line in done.stdout.splitlines())
    said = {name: value for name, value in said.items() if name.startswith("RAY_")}
    assert said == {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(folder)),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    assert mode(path) == 0o600
    assert token_file(folder).read_text() not in path.read_text()
