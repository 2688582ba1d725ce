"""Commands reach a simulated cluster over its socket, and only from its user."""

import stat
from pathlib import Path
from typing import Any

import pytest

from deployments.simulation.control import ControlError, ControlServer, call
from deployments.simulation.control_plane import ControlPlane
from deployments.simulation.plan import UnknownSliceError


class Slices:
    """What a simulated cluster does on command, without Ray."""

    def __init__(self) -> None:
        self.killed: list[tuple[str, int | None]] = []
        self.control_plane = ControlPlane(0, 0)

    def describe(self) -> dict[str, Any]:
        return {"slices": ["spot-0"]}

    def kill(self, name: str, worker_id: int | None = None) -> None:
        if name != "spot-0":
            raise UnknownSliceError(f"no slice {name!r}; there are spot-0")
        self.killed.append((name, worker_id))

    def slow(self, name: str, factor: float, for_s: float) -> None:
        raise ValueError(f"factor is {factor:g}; allowed: 1.1 to 50")

    def partition(self, name: str, for_s: float) -> str:
        return f"{name} for {for_s:g} s"


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "c" / "control.sock"


def test_command_is_carried_out_and_answered(socket: Path) -> None:
    slices = Slices()
    with ControlServer(slices, socket):
        assert call(socket, "describe") == {"slices": ["spot-0"]}
        assert call(socket, "kill", name="spot-0", worker_id=1) is None
        assert call(socket, "partition", name="spot-0", for_s=2.5) == "spot-0 for 2.5 s"
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert slices.killed == [("spot-0", 1)]
    assert not socket.exists()


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("kill", {"name": "spot-9"}, "no slice 'spot-9'; there are spot-0"),
        ("kill", {"nme": "spot-0"}, "unexpected keyword argument 'nme'|missing a required"),
        ("slow", {"name": "spot-0", "factor": 1, "for_s": 1}, "factor is 1; allowed: 1.1 to 50"),
        ("kill_head", {}, "keeps its state in its head; start it with --redis"),
        ("kill_redis", {"lose": True}, "keeps its state in its head; start it with --redis"),
        ("stop", {}, "unknown command 'stop'"),
        ("__init__", {}, "unknown command"),
    ],
)
def test_command_that_cannot_be_carried_out_says_why(
    socket: Path, command: str, arguments: dict[str, Any], words: str
) -> None:
    with ControlServer(Slices(), socket), pytest.raises(ControlError, match=words):
        call(socket, command, **arguments)


def test_without_a_cluster_the_user_is_told_how_to_start_one(socket: Path) -> None:
    with pytest.raises(ControlError, match="slicewise sim up"):
        call(socket, "describe")


def test_second_cluster_on_one_socket_is_refused(socket: Path) -> None:
    with (
        ControlServer(Slices(), socket),
        pytest.raises(ControlError, match="another simulated cluster"),
        ControlServer(Slices(), socket),
    ):
        pass


def test_socket_that_a_killed_cluster_left_is_taken_over(socket: Path) -> None:
    socket.parent.mkdir()
    socket.write_text("")
    with ControlServer(Slices(), socket):
        assert call(socket, "describe") == {"slices": ["spot-0"]}
