"""The provisioner's page: what it says of rounds and slices, and how much of it there can be."""

import asyncio
from dataclasses import replace
from types import MappingProxyType

import httpx
import pytest
from provisioning_builders import SPOT, group

from autoscaling.provisioning.errors import RefusedError, UnreachableError, UnusableError
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan, Refusal
from autoscaling.provisioning.protocol import ClusterObservation
from autoscaling.provisioning.sidecar.metrics import (
    ProvisionerCollector,
    ProvisionerState,
    asked_of,
    served_page,
)
from autoscaling.provisioning.sidecar.readings import PlatformConditions, QuotaUse, quantity
from autoscaling.provisioning.sidecar.rounds import RoundLog
from serving.domain.supply.pods import ObservedPod, ObservedSlice, PodPhase
from serving.domain.supply.records import SupplyHost, SupplyRecord, SupplyReport, SupplyState
from serving.telemetry.metric_names import ALL, labels_of

NUM_SLICES, NUM_HOSTS = 1000, 4
NO_CONDITIONS = PlatformConditions(None, None, None, None, None, (), MappingProxyType({}))


class Told:
    """A log of rounds with a clock that the test holds, and the page of it."""

    def __init__(self, conditions: PlatformConditions | None = None) -> None:
        self.now_s = 100.0
        self.rounds = RoundLog(lambda: self.now_s)
        self.conditions = conditions
        self.collector = ProvisionerCollector(self.state, lambda: self.now_s)

    def state(self) -> ProvisionerState:
        return ProvisionerState(self.rounds.so_far(), 1.5, self.conditions)

    def page(self) -> dict[tuple[str, str], float]:
        """The values by name and the values of the labels, in the order of the labels' names."""
        return {
            (sample.name, " ".join(text for _, text in sorted(sample.labels.items()))): sample.value
            for family in self.collector.collect()
            for sample in family.samples
        }


def record(name: str, state: SupplyState, num_machines: int) -> SupplyRecord:
    hosts = tuple(
        SupplyHost(n, f"{name}-{n}", f"m{n}" if n < num_machines else None)
        for n in range(NUM_HOSTS)
    )
    return SupplyRecord(
        name, name, state, "", 0.0, SPOT.compute_class, "v6e", "4x4", 16, hosts, group="spot"
    )


def test_rounds_are_counted_by_how_they_end() -> None:
    told = Told()
    told.rounds.observed(ClusterObservation((group(),), ("a note",)))
    told.rounds.reported(SupplyReport("1"))
    told.rounds.done(ProvisioningPlan(refusals=(Refusal("v5e", "no group"),)))
    told.now_s = 130.0
    told.rounds.failed(RefusedError("403"))
    told.rounds.failed(RuntimeError("ours"))
    page = told.page()
    assert page["slicewise_provisioning_rounds_total", ""] == 3
    assert page["slicewise_provisioning_failures_total", "refused"] == 1
    assert page["slicewise_provisioning_failures_total", "fault"] == 1
    assert page["slicewise_provisioning_failures_total", "records"] == 0
    assert page["slicewise_provisioning_success_time_seconds", ""] == 100.0
    assert page["slicewise_provisioning_refusals", "v5e"] == 1


def test_what_could_not_be_read_any_more_is_absent_and_not_zero() -> None:
    told = Told()
    told.rounds.observed(ClusterObservation((group(),)))
    told.rounds.reported(SupplyReport("1"))
    told.rounds.done(ProvisioningPlan())
    name = group().name
    assert told.page()["slicewise_provisioning_missing_slices", name] == 0
    told.rounds.failed(UnreachableError("the API server is away"))
    page = told.page()
    assert ("slicewise_provisioning_missing_slices", name) not in page
    assert not any(series.startswith("slicewise_provisioning_slices") for series, _ in page)


def test_slices_that_a_change_makes_and_drops_are_counted() -> None:
    told = Told()
    before = replace(group("s-0", "s-1", replicas=2), max_replicas=9)
    drop = Drop(before.slices[0], is_condemned=True, reason="it failed")
    told.rounds.observed(ClusterObservation((before,)))
    # One goes, and three are made: two more than before.
    told.rounds.changed(Change(before, 4, (drop,), "because"))
    page = told.page()
    assert page["slicewise_provisioning_changed_slices_total", f"add {before.name}"] == 3
    assert page["slicewise_provisioning_changed_slices_total", f"drop {before.name}"] == 1


def test_chips_are_unheld_where_machines_are_there_and_nobody_has_them() -> None:
    told = Told()
    told.rounds.observed(ClusterObservation((replace(group(), name="spot"),)))
    told.rounds.reported(
        SupplyReport(
            "1",
            (
                record("a", SupplyState.FREE, 4),
                record("b", SupplyState.PENDING, 1),
                record("c", SupplyState.HELD, 4),
                record("d", SupplyState.LEASED, 4),
                record("e", SupplyState.PENDING, 0),
            ),
        )
    )
    assert told.page()["slicewise_provisioning_unheld_chips", "spot spot"] == 16 + 4


def test_age_of_a_slice_that_nobody_has_is_its_own_through_all_its_states() -> None:
    told = Told()
    told.rounds.observed(ClusterObservation((replace(group(), name="spot"),)))

    def look(*records: SupplyRecord) -> float:
        told.rounds.reported(SupplyReport("1", records))
        return told.page()["slicewise_provisioning_oldest_unheld_seconds", "spot spot"]

    assert look(record("a", SupplyState.PENDING, 0)) == 0
    assert look(record("a", SupplyState.BOOTING, 4)) == 0
    told.now_s += 600
    assert look(record("a", SupplyState.FREE, 4), record("b", SupplyState.BOOTING, 4)) == 600
    told.now_s += 60
    # Another one boots meanwhile, and is younger.
    assert look(record("a", SupplyState.HELD, 4), record("b", SupplyState.FREE, 4)) == 60
    assert look(record("a", SupplyState.HELD, 4), record("b", SupplyState.HELD, 4)) == 0


def test_age_of_what_is_held_back_is_that_of_its_state() -> None:
    told = Told()
    told.rounds.observed(ClusterObservation((replace(group(), name="spot"),)))
    condemned = replace(record("a", SupplyState.CONDEMNED, 4), since_s=40.0)
    told.rounds.reported(SupplyReport("1", (condemned, record("b", SupplyState.FREE, 4))))

    page = told.page()
    name = "slicewise_provisioning_oldest_held_back_seconds"
    assert page[name, "spot spot condemned"] == 60
    assert page[name, "spot spot quarantined"] == 0


def test_age_of_a_slice_without_machines_goes_on_until_it_has_them() -> None:
    told = Told()

    def look(machine: str | None) -> float:
        pods = tuple(ObservedPod(f"p{n}", PodPhase.PENDING, None, machine) for n in range(2))
        told.rounds.observed(
            ClusterObservation((replace(group(), slices=(ObservedSlice("s-0", pods),)),))
        )
        key = "slicewise_provisioning_oldest_machineless_seconds", group().name
        return told.page()[key]

    assert look(None) == 0
    told.now_s += 40
    assert look(None) == 40
    assert look("a-machine") == 0


def large() -> Told:
    """A thousand slices of four hosts, each of whose pods waits by a word of its own."""
    told = Told(NO_CONDITIONS)
    slices = tuple(
        ObservedSlice(
            f"s-{number}",
            tuple(
                ObservedPod(f"p-{number}-{n}", PodPhase.PENDING, waiting=f"Word{number}: text")
                for n in range(NUM_HOSTS)
            ),
        )
        for number in range(NUM_SLICES)
    )
    told.rounds.observed(ClusterObservation((replace(group(), name="spot", slices=slices),)))
    records = tuple(record(f"s-{n}", SupplyState.FREE, 4) for n in range(NUM_SLICES))
    told.rounds.reported(SupplyReport("1", records))
    return told


def test_page_does_not_grow_with_slices_and_words() -> None:
    page = large().page()
    assert len(page) < 60
    hindered = {labels for name, labels in page if name == "slicewise_provisioning_hindered_pods"}
    assert hindered == {"spot other"}


def test_every_series_is_in_the_registry_of_names() -> None:
    told = large()
    quotas = (QuotaUse("few", "pods", 1.0, 2.0),)
    problems = {"pods": "refused"}
    told.conditions = PlatformConditions((), (), {"head": 1}, quotas, (), ("pods",), problems)
    families = list(told.collector.collect())
    assert families
    for family in families:
        for sample in family.samples:
            assert set(sample.labels) <= set(labels_of(ALL[sample.name]))


async def test_page_is_served_and_its_state_is_read_on_the_loop() -> None:
    told = Told()
    loop = asyncio.get_running_loop()

    def read() -> ProvisionerState:
        assert asyncio.get_running_loop() is loop
        return told.state()

    collector = ProvisionerCollector(asked_of(loop, read), lambda: told.now_s)
    with served_page(collector, 0) as port:
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert "slicewise_provisioning_rounds_total 0.0" in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("500m", 0.5), ("2Ki", 2048), ("3M", 3e6), ("1e3", 1000), ("2Gi", 2**31)],
)
def test_quantities_of_kubernetes_are_numbers(text: str, number: float) -> None:
    assert quantity(text) == number


def test_what_is_no_quantity_is_refused() -> None:
    with pytest.raises(UnusableError, match="not a quantity"):
        quantity("many")
