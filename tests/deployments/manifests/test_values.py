"""Values files that cannot be rendered: what is said of them."""

from collections.abc import Callable
from typing import Any

import pytest

from deployments.manifests.values import parse_values
from serving.domain.errors import ConfigError
from serving.domain.topology import slice_shape

from .examples import parsed, raw_values

SHAPE = slice_shape("v6e", "4x4")

Raw = dict[str, Any]


def _args(raw: Raw) -> Raw:
    args: Raw = raw["applications"][0]["args"]
    return args


def _declare(raw: Raw, node_labels: dict[str, str]) -> None:
    """Another spot class, of nodes with these labels."""
    declared = {"name": "other", "market": "spot", "node_labels": node_labels}
    _args(raw)["compute_classes"] = [declared]
    _args(raw)["models"][0]["deployments"][1]["compute_class"] = "other"


CASES: dict[str, tuple[Callable[[Raw], object], str]] = {
    "no cluster": (lambda raw: raw.pop("cluster"), "cluster: missing; required: a mapping"),
    "unknown key": (
        lambda raw: raw["cluster"].update(zone="us-east5-b"),
        "cluster.zone: unknown key (value \"us-east5-b\"); did you mean 'zones'?",
    ),
    "image without a tag": (
        lambda raw: raw["cluster"]["images"].update(cpu="registry/cpu"),
        'cluster.images.cpu: not allowed (value "registry/cpu"); allowed: a string, an image with '
        "a tag or a digest",
    ),
    "name": (
        lambda raw: raw["cluster"].update(name="LLM"),
        'cluster.name: not allowed (value "LLM"); allowed: a string, lower-case letters, digits '
        "and inner `-`, a letter first, up to 30",
    ),
    "reserved without a reservation": (
        lambda raw: raw["cluster"].update(classes=[]),
        "cluster.classes[compute_class=reserved].reservation: missing, and GKE takes reserved "
        "slices from a named one only; required: the reservation's name",
    ),
    "reservation of a spot class": (
        lambda raw: raw["cluster"]["classes"].append(
            {"compute_class": "spot", "reservation": "ours"}
        ),
        "slices of the market spot come from no reservation",
    ),
    "class that nobody uses": (
        lambda raw: raw["cluster"]["classes"].append({"compute_class": "sport"}),
        'cluster.classes[1].compute_class: no deployment uses this class (value "sport"); did '
        "you mean 'spot'?",
    ),
    "class twice": (
        lambda raw: raw["cluster"]["classes"].append(dict(raw["cluster"]["classes"][0])),
        "cluster.classes[1].compute_class: already at cluster.classes[0].compute_class",
    ),
    "bounds": (
        lambda raw: raw["cluster"]["classes"][0].update(min_slices=3, max_slices=2),
        "cluster.classes[0].min_slices: more than max_slices (value 3); allowed: 0 to 2",
    ),
    "keys without a Secret": (
        lambda raw: raw["cluster"]["secrets"].pop("api_keys"),
        "cluster.secrets.api_keys: missing, and auth.keys_env or auth.keys_file reads one",
    ),
    "Secret without a reader": (
        lambda raw: _args(raw).update(link={}),
        "cluster.secrets.link: nobody reads it",
    ),
    "batches without a disk": (
        lambda raw: _args(raw).update(batches={"folder": "/batches"}),
        "args.batches.folder: gateways have pods of their own, which share no folder and keep none "
        "(value /batches); allowed: batches.store, a bucket, instead",
    ),
    "weights from no bucket": (
        lambda raw: _args(raw)["models"][0].update(source="/data/llama"),
        "args.models[0].source: no bucket is mounted at /data (value /data/llama); "
        "needed: cluster.bucket",
    ),
    "loopback": (
        lambda raw: raw["http_options"].update(host="127.0.0.1"),
        'http_options.host: in a pod nobody would reach it (value "127.0.0.1"); allowed: 0.0.0.0',
    ),
    "proxy on the head": (
        lambda raw: raw.update(proxy_location="HeadOnly"),
        'proxy_location: the head serves no requests, gateways\' pods do (value "HeadOnly"); '
        "allowed: EveryNode",
    ),
    "link on loopback": (
        lambda raw: _args(raw).update(link={"secret_env": "LINK", "listen_on": "loopback"}),
        "args.link.listen_on: gateways and engines are on different hosts (value loopback)",
    ),
    "no slice": (
        lambda raw: _args(raw)["models"][0]["deployments"][1].pop("slice"),
        "applications[0].args.models[0].deployments[1].slice: missing",
    ),
    "step above the surge": (
        lambda raw: raw["cluster"].update(upgrade={"step_percent": 50}),
        "cluster.upgrade.step_percent: larger than the surge, which KubeRay refuses (value 50); "
        "allowed: at most max_surge_percent, 25",
    ),
    "engine on CPUs": (
        lambda raw: _args(raw)["models"][0].pop("engine"),
        "applications[0].args.models[0].engine: it computes on the CPUs of hosts whose chips would "
        "idle (value vllm); allowed: vllm-tpu",
    ),
    "no Redis": (
        lambda raw: raw["cluster"].update(redis={}),
        "cluster.redis: neither there; allowed: address of one that there is, or own for a new one",
    ),
    "two of Redis": (
        lambda raw: raw["cluster"]["redis"].update(own={"image": "redis:7.4"}),
        "cluster.redis: given twice (value redis:6379); allowed: address of one that there is",
    ),
    "Redis without a port": (
        lambda raw: raw["cluster"].update(redis={"address": "10.0.0.3"}),
        'cluster.redis.address: not allowed (value "10.0.0.3"); allowed: a string or null, host '
        "and port",
    ),
    "joined slices in any zone": (
        lambda raw: (
            raw["cluster"].update(zones=["us-east5-a", "us-east5-b"]),
            _args(raw)["models"][0]["deployments"][1]["slice"].update(num_slices=2),
        ),
        "args.models[0].deployments[1].slice.zone: missing: joined slices are of one zone, and "
        "these may come in several; allowed: one of us-east5-a, us-east5-b",
    ),
    "more joined slices than there may be": (
        lambda raw: (
            raw["cluster"]["classes"][0].update(max_slices=1),
            _args(raw)["models"][0]["deployments"][0]["slice"].update(
                num_slices=2, zone="us-east5-b"
            ),
        ),
        "slice.num_slices: more than max_slices of compute class reserved (value 2); allowed: at "
        "most 1",
    ),
    "label by which the TPU webhook finds pods": (
        lambda raw: _declare(raw, {"app.kubernetes.io/name": "slicewise"}),
        "applications[0].args.compute_classes[0].node_labels[app.kubernetes.io/name]: it reaches "
        'the pods, where KubeRay and the TPU webhook set it (value "slicewise"); allowed: another '
        "label",
    ),
    "host index for all": (
        lambda raw: _declare(raw, {"ray.io/replica-host-index": "0"}),
        "node_labels[ray.io/replica-host-index]: it reaches the pods, where KubeRay and the TPU "
        'webhook set it (value "0"); allowed: another label',
    ),
    "label by which gateways are found": (
        lambda raw: _declare(raw, {"app.kubernetes.io/component": "gateway"}),
        "node_labels[app.kubernetes.io/component]: it reaches the pods, where our Services, "
        'policies and budgets select by it (value "gateway"); allowed: another label',
    ),
    "gateway's pod without room for the next one": (
        lambda raw: _args(raw).update(gateway={"num_cpus": 2.5}),
        "cluster.gateway_pod.cpus: no room for the next gateway beside one of 2.5 CPUs, so none is "
        "ever replaced (value 4); allowed: at least 5, twice applications[0].args.gateway.num_cpus",
    ),
    "topology": (
        lambda raw: _args(raw)["models"][0]["deployments"][0]["slice"].update(topology="4x5"),
        "deployments[0].slice.topology: no v6e slice of this topology",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    change, words = CASES[case]
    raw = raw_values((SHAPE, "reserved"), (SHAPE, "spot"))
    change(raw)
    with pytest.raises(ConfigError) as refused:
        parsed(raw)
    assert any(words in str(problem) for problem in refused.value.problems), refused.value


def test_flex_start_of_v4_is_refused() -> None:
    with pytest.raises(ConfigError, match="GKE has no flex-start slices of v4"):
        parsed(raw_values((slice_shape("v4", "2x2x1"), "flex-start")))


def test_names_that_are_too_long_for_slices_are_refused() -> None:
    name = "a-class-with-a-name-that-goes-on-for-very-much-too-long"
    raw = raw_values((SHAPE, name))
    _args(raw)["compute_classes"] = [{"name": name, "market": "spot"}]
    with pytest.raises(ConfigError, match="the name of its worker group is too long"):
        parsed(raw)


def test_every_problem_is_told_at_once() -> None:
    raw = raw_values((SHAPE, "spot"))
    raw["cluster"]["name"] = "X"
    raw["http_optoins"] = {}
    with pytest.raises(ConfigError) as refused:
        parsed(raw)
    assert len(refused.value.problems) == 2


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a mapping"):
        parse_values(["cluster"], None)
