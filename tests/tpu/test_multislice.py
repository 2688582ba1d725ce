"""Slices joined under one engine: what their processes are told, and how each of them ends."""

import json

import pytest

from serving.domain.inventory import ObservedHost, Slice
from serving.domain.slice_lifecycle import EndCause
from serving.tpu.multislice import multislice_ends, multislice_environment, own_environment


def slice_of(name: str, *addresses: str) -> Slice:
    hosts = tuple(
        ObservedHost(
            f"{name}/{worker_id}", address, name, worker_id, 4, 4, is_draining=False, labels={}
        )
        for worker_id, address in enumerate(addresses)
    )
    return Slice(name, hosts)


A, B = slice_of("a", "10.0.0.1", "10.0.0.2"), slice_of("b", "10.0.1.1", "10.0.1.2")


def test_slice_alone_is_told_nothing() -> None:
    assert multislice_environment([A]) == {}
    assert own_environment({"TPU_WORKER_ID": "1"}, "a/1") == {}


def test_joined_slices_meet_at_the_first_host_of_the_first() -> None:
    told = multislice_environment([A, B])
    ids = json.loads(told.pop("SLICEWISE_SLICE_IDS"))
    assert told == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
    }
    assert ids == {"a/0": 0, "a/1": 0, "b/0": 1, "b/1": 1}


@pytest.mark.parametrize(
    ("node_id", "slice_id"), [("a/0", "0"), ("a/1", "0"), ("b/0", "1"), ("b/1", "1")]
)
def test_each_worker_finds_its_own_slice_in_what_all_are_told(node_id: str, slice_id: str) -> None:
    assert own_environment(multislice_environment([A, B]), node_id) == {
        "MEGASCALE_SLICE_ID": slice_id
    }


def test_worker_outside_the_slices_is_an_error_and_not_slice_zero() -> None:
    with pytest.raises(KeyError, match="c/0"):
        own_environment(multislice_environment([A, B]), "c/0")


PREEMPTED = (EndCause.PREEMPTED, "host 1: preempted")
FREED = (EndCause.RELEASED, "it was joined with b: host 1: preempted")


@pytest.mark.parametrize(
    ("names", "own", "ends"),
    [
        # A slice alone ends as its replica says, whatever else is known of it.
        (["a"], {0: PREEMPTED}, [(EndCause.UNHEALTHY, "died")]),
        (["a", "b"], {}, [(EndCause.UNHEALTHY, "died")] * 2),
        (["a", "b"], {1: PREEMPTED}, [FREED, PREEMPTED]),
        (["a", "b", "c"], {1: PREEMPTED}, [FREED, PREEMPTED, FREED]),
        (["a", "b"], {0: PREEMPTED, 1: PREEMPTED}, [PREEMPTED, PREEMPTED]),
    ],
)
def test_each_slice_ends_for_its_own_cause_and_a_whole_one_is_given_back(
    names: list[str], own: dict[int, tuple[EndCause, str]], ends: list[tuple[EndCause, str]]
) -> None:
    assert list(multislice_ends(names, own, EndCause.UNHEALTHY, "died")) == ends
