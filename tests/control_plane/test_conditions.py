"""What is watched only to be shown: with which rights, and what becomes of it without them."""

import asyncio

import pytest

from autoscaling.provisioning.kubernetes import KubernetesAccess
from deployments.manifests.platform import CLASS_RULES, CONDITION_RULES, PROVISIONER_RULES
from serving.domain.supply.records import WaitingReplica

from .api import Api, reference
from .on_call import on_call, series
from .proxy import Fault, Proxy
from .ray_objects import SPOT

pytestmark = pytest.mark.process

WAITING = WaitingReplica("replica", "demo", "spot", "v6e", "2x4", since_s=0.0)
MISSING = series("slicewise_provisioning_missing_slices", group=SPOT)


async def test_what_is_shown_needs_the_rights_that_are_rendered_and_no_other(
    cluster: object, access: KubernetesAccess, proxy: Proxy
) -> None:
    rules = (*CONDITION_RULES, *CLASS_RULES)
    known = {rule["resources"][0] for rule in rules}
    async with on_call(access):
        async with asyncio.timeout(30):
            while not all(proxy.watches(resource) for resource in known):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        asked = {(each.verb, each.resource) for each in proxy.requests()}
    assert {each for each in asked if each[1] in known} == {
        (verb, rule["resources"][0]) for rule in rules for verb in rule["verbs"]
    }
    others = {rule["resources"][0] for rule in PROVISIONER_RULES}
    assert {resource for _, resource in asked} <= known | others


@pytest.mark.parametrize(("status", "kind"), [(403, "refused"), (404, "missing")])
async def test_what_may_not_be_read_is_told_and_holds_up_no_slice(
    cluster: object, access: KubernetesAccess, proxy: Proxy, status: int, kind: str
) -> None:
    for part in ("resourcequotas", "computeclasses"):
        proxy.inject(Fault("list", status, times=1_000_000, part=part))
    async with on_call(access, conditions=("pods",)) as seen:
        seen.report(waiting=(WAITING,))
        page = await seen.shows({MISSING: lambda count: count == 1})
        for resource in ("resourcequotas", "computeclasses"):
            assert page[series("slicewise_condition_readable", resource=resource, kind=kind)] == 0
        assert not any(name.startswith(("slicewise_quota", "slicewise_class")) for name in page)
        # Asked for again all the time, slowly: once it may be read, it is shown.
        proxy.forget_faults()
        await seen.shows({series("slicewise_condition_readable", resource="resourcequotas"): bool})


async def test_classes_of_others_are_not_shown(
    api: Api, cluster: object, access: KubernetesAccess
) -> None:
    ours, theirs = reference("ComputeClass", None, SPOT), reference("ComputeClass", None, "theirs")
    for body in (ours, theirs):
        api.apply(body | {"spec": {"priorities": [{"machineType": "n4-standard-4"}]}})
    try:
        async with on_call(access) as seen:
            name = series("slicewise_class_priorities", class_name=SPOT)
            page = await seen.shows({name: lambda count: count == 0})
    finally:
        for body in (ours, theirs):
            api.delete(body)
    assert "theirs" not in str(page)
