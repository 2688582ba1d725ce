"""Checks that GKE's ComputeClasses make what the worker groups wait for, and name it. Pure."""

from collections.abc import Iterator

from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
    texts,
    value_at,
)
from deployments.validation.groups import (
    FoundGroup,
    generations_by_accelerator,
    slice_groups_in,
)
from serving.config.slices import MARKET_LABEL
from serving.domain.compute_class import Market
from serving.domain.errors import Problem
from serving.domain.names.gke_names import GKE_COMPUTE_CLASS
from serving.domain.topology import Generation, TopologyError, slice_shape


def class_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every class that makes slices, alone and with the groups that wait for it."""
    classes = {manifest.name: manifest for manifest in folder.of_kind("ComputeClass")}
    for compute_class in folder.of_kind("ComputeClass"):
        rules = [
            rule
            for rule in sequence(compute_class.body, "spec", "priorities")
            if isinstance(rule, dict)
        ]
        if any("tpu" in rule or "nodepools" in rule for rule in rules):
            yield from _class_problems(compute_class)
        for at, rule in enumerate(rules):
            if "tpu" in rule:
                yield from _rule_problems(compute_class, f"spec.priorities[{at}]", rule)
    for manifest, path, cluster in ray_clusters(folder):
        for group in slice_groups_in(manifest, path, cluster):
            used = classes.get(str(group.selector.get(GKE_COMPUTE_CLASS)))
            if used is not None:
                yield from _agreement_problems(group, used)


def market_of(rule: Json) -> Market:
    """Returns how a rule's machines are bought."""
    if rule.get("spot") is True:
        return Market.SPOT
    if mapping(rule, "flexStart").get("enabled") is True:
        return Market.FLEX_START
    return Market.RESERVED if rule.get("reservations") else Market.ON_DEMAND


def _class_problems(each: KubernetesManifest) -> Iterator[Problem]:
    spec = mapping(each.body, "spec")
    if spec.get("whenUnsatisfiable", "DoNotScaleUp") != "DoNotScaleUp":
        complaint = "GKE would make machines without chips"
        value = spec.get("whenUnsatisfiable")
        yield each.problem("spec.whenUnsatisfiable", complaint, "allowed: DoNotScaleUp", value)
    if mapping(spec, "activeMigration").get("optimizeRulePriority"):
        complaint = "GKE would restart running engines to move them"
        field = "spec.activeMigration.optimizeRulePriority"
        yield each.problem(field, complaint, "allowed: false", value=True)
    threshold = mapping(spec, "autoscalingPolicy").get("consolidationThreshold", 0)
    if threshold != 0:
        complaint = "GKE would take hosts that still have pods"
        field = "spec.autoscalingPolicy.consolidationThreshold"
        yield each.problem(field, complaint, "allowed: 0", threshold)


def _rule_problems(each: KubernetesManifest, path: str, rule: Json) -> Iterator[Problem]:
    """Yields what GKE's autoscaler refuses, and the schema does not."""
    tpu = mapping(rule, "tpu")
    known = generations_by_accelerator()
    generation = known.get(str(tpu.get("type")))
    if generation is None:
        allowed = f"allowed: {texts(list(known))}"
        yield each.problem(f"{path}.tpu.type", "no TPU of GKE's", allowed, tpu.get("type"))
        return
    count = tpu.get("count")
    try:
        shape = slice_shape(generation, str(tpu.get("topology")))
        shape = slice_shape(generation, str(tpu.get("topology")), int(str(count)))
    except TopologyError as error:
        field = "count" if error.value == str(count) else "topology"
        allowed = f"nearest allowed: {texts(error.choices)}"
        yield each.problem(f"{path}.tpu.{field}", error.complaint, allowed, error.value)
        return
    except ValueError:
        yield each.problem(f"{path}.tpu.count", "not a number", "allowed: chips per host", count)
        return
    machine = rule.get("machineType")
    if machine != shape.gke_machine_type:
        complaint = f"not a machine with {shape.chips_per_host} chips of {generation}"
        allowed = f"allowed: {shape.gke_machine_type}"
        yield each.problem(f"{path}.machineType", complaint, allowed, machine)
    if generation == Generation.TPU7X:
        disk = mapping(rule, "storage").get("bootDiskType")
        if disk != "hyperdisk-balanced":
            field = f"{path}.storage.bootDiskType"
            complaint = "TPU7x starts from no other"
            yield each.problem(field, complaint, "allowed: hyperdisk-balanced", disk)
        if shape.num_hosts > 1 and not mapping(rule, "placement").get("policyName"):
            field = f"{path}.placement.policyName"
            complaint = "missing: TPU7x slices of several hosts need a workload policy"
            yield each.problem(field, complaint, "required: its name")
    yield from _market_problems(each, path, rule)


def _market_problems(each: KubernetesManifest, path: str, rule: Json) -> Iterator[Problem]:
    reservations = mapping(rule, "reservations")
    if reservations:
        affinity = reservations.get("affinity")
        if affinity != "Specific" or not sequence(reservations, "specific"):
            field = f"{path}.reservations.affinity"
            complaint = "chips are reserved by name only"
            allowed = "allowed: Specific, with the reservation in specific"
            yield each.problem(field, complaint, allowed, affinity)
        if mapping(rule, "location").get("zones"):
            complaint = "stands against the reservation's own zones"
            allowed = "allowed: in reservations.specific[].zones"
            zones = texts(sequence(rule, "location", "zones"))
            yield each.problem(f"{path}.location.zones", complaint, allowed, zones)
        if rule.get("spot") or rule.get("flexStart"):
            complaint = "reserved slices are neither spot nor flex-start"
            yield each.problem(f"{path}.reservations", complaint, "allowed: one market", "two")
    if rule.get("spot") and mapping(rule, "flexStart").get("enabled"):
        complaint = "spot and flex-start exclude each other"
        yield each.problem(f"{path}.flexStart", complaint, "allowed: one market", "enabled")


def _agreement_problems(group: FoundGroup, used: KubernetesManifest) -> Iterator[Problem]:
    """Checks that the class makes the hosts that the group's pods select, in their market."""
    rules = sequence(used.body, "spec", "priorities")
    if len(rules) != 1:
        complaint = (
            f"group {group.name} serves from it, and of several rules nobody says which one won"
        )
        yield used.problem("spec.priorities", complaint, "allowed: one rule", f"{len(rules)} rules")
        return
    rule = rules[0] if isinstance(rules[0], dict) else {}
    if "tpu" not in rule or group.shape is None:
        return
    tpu, shape = mapping(rule, "tpu"), group.shape
    expected = {
        "type": shape.gke_accelerator,
        "count": shape.chips_per_host,
        "topology": shape.topology,
    }
    for name, value in expected.items():
        if tpu.get(name) != value:
            complaint = f"not what the pods of group {group.name} select"
            field = f"spec.priorities[0].tpu.{name}"
            yield used.problem(field, complaint, f"allowed: {value}", tpu.get(name))
    has_claims = bool(sequence(group.pod, "resourceClaims"))
    is_driven = (
        value_at(used.body, "spec", "nodePoolConfig", "dra", "networking", "enabled") is True
    )
    if has_claims and not is_driven:
        complaint = f"pods of group {group.name} claim network interfaces, which nobody would give"
        field = "spec.nodePoolConfig.dra.networking.enabled"
        yield used.problem(field, complaint, "allowed: true", is_driven)
    market = group.labels.get(MARKET_LABEL)
    if market in tuple(Market) and market != market_of(rule):
        complaint = f"not the market of its ComputeClass, whose rule is {market_of(rule)}"
        allowed = f"allowed: {market_of(rule)}"
        yield group.problem(f"labels[{MARKET_LABEL}]", complaint, allowed, market)
