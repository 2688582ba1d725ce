"""The annotation by which pods of an older template are told."""

from typing import Any

from serving.domain.names.gke_names import TEMPLATE_HASH_ANNOTATION, template_hash
from serving.domain.topology import slice_shape

from .examples import in_memory, one, raw_values

SPOT, RESERVED = (slice_shape("v6e", "4x4"), "spot"), (slice_shape("v6e", "4x4"), "reserved")

Json = dict[str, Any]


def hashes(raw: Json) -> dict[str, str]:
    """The annotation of each group's template, and of the head's, as rendered."""
    spec = one(in_memory(raw), "RayService").body["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    groups["head"] = spec["headGroupSpec"]
    assert all(template_hash(group) == annotation(group) for group in groups.values())
    return {name: annotation(group) for name, group in groups.items()}


def annotation(group: Json) -> str:
    value: str = group["template"]["metadata"]["annotations"][TEMPLATE_HASH_ANNOTATION]
    return value


def test_new_image_of_hosts_changes_the_hash_of_every_slice_group_and_of_nothing_else() -> None:
    before = hashes(raw_values(SPOT, RESERVED))
    raw = raw_values(SPOT, RESERVED)
    raw["cluster"]["images"]["tpu"] = "registry/tpu:2"
    after = hashes(raw)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"v6e-4x4-spot", "v6e-4x4-reserved"}


def test_bounds_and_models_change_no_hash() -> None:
    before = hashes(raw_values(SPOT))
    raw = raw_values(SPOT, classes=[{"compute_class": "spot", "max_slices": 9}])
    raw["applications"][0]["args"]["models"][0]["source"] = "models/other"
    assert hashes(raw) == before


def test_hash_of_a_group_without_metadata_or_labels_is_that_of_empty_ones() -> None:
    bare = {"template": {"spec": {}}}
    empty = {"template": {"spec": {}, "metadata": {"annotations": {}}}, "labels": {}}
    assert template_hash(bare) == template_hash(empty)
    assert template_hash(bare | {"labels": {"zone": "a"}}) != template_hash(bare)
