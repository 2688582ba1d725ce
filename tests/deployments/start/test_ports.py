"""Ports for what is about to be started: no two starts get the same, whoever asks."""

import socket
import subprocess
import sys
from itertools import pairwise

import pytest

from deployments.start import ports
from deployments.start.ports import free_ports, is_free

# Claims a run and holds it until its input ends.
CLAIM = """
import sys
from deployments.start.ports import free_ports
print(*free_ports(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks that other tests of this machine do not choose from."""
    monkeypatch.setattr(ports, "_FIRST_PORT", 17_000)
    monkeypatch.setattr(ports, "_LAST_PORT", 17_000 + 4 * ports._BLOCK)
    monkeypatch.setattr(ports, "_claims", type(ports._claims)())


def test_runs_that_are_chosen_do_not_overlap_though_nothing_listens_on_them() -> None:
    first, second = free_ports(ports._BLOCK + 1), free_ports(ports._BLOCK + 1)
    assert not set(first) & set(second)
    with pytest.raises(OSError, match="no 1 free ports between 17000"):
        free_ports(1)
    ports._close([*ports._claims])


def test_a_run_in_which_something_listens_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 17_001))
        taken.listen()
        assert not is_free("127.0.0.1", 17_001)
        starts = {free_ports(2)[0] for _ in range(3)}
    assert starts == {17_000 + each * ports._BLOCK for each in (1, 2, 3)}
    # What was not taken was not kept either.
    assert free_ports(2)[0] == 17_000
    ports._close([*ports._claims])


def test_the_oldest_claims_of_a_process_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MAX_CLAIMS", 2)
    chosen = [free_ports(1)[0] for _ in range(20)]
    assert all(one != next_ for one, next_ in pairwise(chosen))
    assert len(ports._claims) == 2
    ports._close([*ports._claims])


@pytest.mark.slow
def test_a_run_of_another_process_is_claimed_until_that_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIM, "300"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    with other:
        first = int(other.stdout.readline().split()[0])
        assert not ports._claimed(range(first, first + 1))
        other.kill()
    claims = ports._claimed(range(first, first + 1))
    assert claims
    ports._close(claims)
