"""Checks that Ray runs, that it takes our token, and that its nodes make whole slices. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.doctor.findings import Finding, error, note, ok, warning
from serving.config.application import processes_per_node
from serving.domain.inventory import (
    ACCELERATOR_LABEL,
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
    SliceRequest,
    observe_hosts,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL, CONTROL_ROLE, ROLE_LABEL
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.topology import SliceShape, TopologyError, slice_shape
from serving.exporters.chips import named_generation

_CHIPS = "TPU"


class Reach(StrEnum):
    """The stage that a call to Ray reached."""

    ANSWERED = "answered"
    NO_ADDRESS = "no_address"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"  # the token
    SILENT = "silent"  # it took the connection and did not answer in time
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """Ray's answer. `nodes` are as `ray.nodes()` gives them, empty unless it answered.

    `cluster` and `here` are the versions of Ray and Python: those with which the cluster was
    started, and those of this process. They are empty where unknown.
    """

    reach: Reach
    address: str = ""
    detail: str = ""
    nodes: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    cluster: str = ""
    here: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """The way this process authenticates to Ray. `mode` is `None` where it is not set."""

    mode: str | None
    is_given: bool


def check_ray(answer: RayAnswer, token: Token) -> Iterator[Finding]:
    """Checks the address, the token, that nodes are alive, and the cluster's versions."""
    if token.mode == "token" and not token.is_given:
        yield error(
            "Ray token",
            "RAY_AUTH_MODE=token, and no token",
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
            "take it from the Secret slicewise-ray-token",
        )
    what = f"Ray at {answer.address}" if answer.address else "Ray"
    match answer.reach:
        case Reach.NO_ADDRESS:
            fix = "set RAY_ADDRESS or --ray-address to look at one"
            yield note(what, "no address, no cluster asked", fix)
        case Reach.UNREACHABLE:
            yield error(
                what,
                f"no connection: {answer.detail}",
                "host:port of the head's GCS, port 6379 by default",
                "is the head up? do network policies let this pod reach it?",
            )
        case Reach.REFUSED:
            yield error(
                what,
                "the token was refused" if token.is_given else "it wants a token",
                "RAY_AUTH_MODE=token and the cluster's token",
                "take it from the Secret slicewise-ray-token; after a rotation restart all pods",
            )
        case Reach.SILENT:
            yield error(
                what,
                f"connected, but no answer {answer.detail}",
                "an answer",
                "is this Ray's GCS port, of the same Ray version, without TLS?",
            )
        case Reach.BROKEN:
            yield error(
                what, answer.detail, "an answer", "see Ray's log gcs_server.out on the head"
            )
        case Reach.ANSWERED:
            alive = sum(bool(node.get("Alive")) for node in answer.nodes)
            with_token = " with a token" if token.mode == "token" else ""
            words = f"answers{with_token}; nodes alive: {alive}"
            if alive:
                yield ok(what, words)
            else:
                yield warning(what, words, "1 or more", "wait if it starts; else see raylet.out")
            if answer.cluster and answer.cluster != answer.here:
                yield error(
                    "versions in the cluster",
                    f"{answer.here} here",
                    f"{answer.cluster}, to the patch: Ray refuses others",
                    "build all images from one base and one lock",
                )


def check_nodes(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Checks each TPU host by itself, then each slice as a whole."""
    slices: dict[str, list[Mapping[str, Any]]] = {}
    num_hosts = 0
    for node in nodes:
        labels = node.get("Labels") or {}
        chips = int((node.get("Resources") or {}).get(_CHIPS, 0))
        if not node.get("Alive") or not (chips or POD_TYPE_LABEL in labels):
            continue
        num_hosts += 1
        problem = _host_problem(node, labels, chips)
        if problem is not None:
            yield problem
            continue
        # A single host needs no name of its own.
        name = labels.get(SLICE_NAME_LABEL) or f"node-{node['NodeID'][:12]}"
        slices.setdefault(name, []).append(node)
    if not num_hosts:
        yield note("TPU hosts in Ray", "none")
    for name, members in sorted(slices.items()):
        yield _slice_finding(name, members)


def _host_problem(node: Mapping[str, Any], labels: Mapping[str, str], chips: int) -> Finding | None:
    what = f"host {node.get('NodeManagerAddress', '')} ({str(node['NodeID'])[:12]})"
    by_group = "put it into `labels` of the worker group, as `slicewise render` does"
    missing = [name for name in (POD_TYPE_LABEL, TOPOLOGY_LABEL) if not labels.get(name)]
    if missing:
        return error(what, f"label {' and '.join(missing)} not set", "both", by_group)
    try:
        shape = _shape_of(labels, chips)
    except TopologyError as wrong:
        return error(what, f"{wrong.complaint}: {wrong.value}", ", ".join(wrong.choices), by_group)
    if labels.get(ACCELERATOR_LABEL) != shape.ray_accelerator_type:
        return error(
            what,
            f"{ACCELERATOR_LABEL}={labels.get(ACCELERATOR_LABEL)}",
            shape.ray_accelerator_type,
            by_group,
        )
    if shape.num_hosts > 1 and not labels.get(SLICE_NAME_LABEL):
        return error(
            what,
            f"label {SLICE_NAME_LABEL} not set",
            f"its slice's name: {shape.generation} {shape.topology} has {shape.num_hosts} hosts",
            "is KubeRay's TPU webhook installed? It sets TPU_NAME, which Ray turns into the label",
        )
    return None


def _shape_of(labels: Mapping[str, str], chips: int) -> SliceShape:
    """The slice that a host's labels and chips describe together; raises `TopologyError`."""
    pod_type = labels[POD_TYPE_LABEL]
    generation = named_generation(pod_type)
    if generation is None:
        raise TopologyError("unknown pod type", pod_type, ("v6e-16", "v5litepod-16", "v5p-16"))
    shape = slice_shape(generation, labels[TOPOLOGY_LABEL])
    if shape.ray_pod_type != pod_type:
        complaint = f"pod type does not fit topology {shape.topology}"
        raise TopologyError(complaint, pod_type, (shape.ray_pod_type,))
    return slice_shape(generation, shape.topology, chips)


def _slice_finding(name: str, members: list[Mapping[str, Any]]) -> Finding:
    what = f"slice {name}"
    kinds = {
        (
            member["Labels"][POD_TYPE_LABEL],
            member["Labels"][TOPOLOGY_LABEL],
            int(member["Resources"][_CHIPS]),
        )
        for member in members
    }
    if len(kinds) > 1:
        found = "; ".join(
            f"{pod} {topology} of {chips} chips" for pod, topology, chips in sorted(kinds)
        )
        return error(what, f"hosts disagree: {found}", "one kind", "two slices have one TPU_NAME")
    shape = _shape_of(members[0]["Labels"], int(members[0]["Resources"][_CHIPS]))
    kind = f"{shape.generation} {shape.topology}"
    ids = sorted(_worker_id(member["Labels"].get(WORKER_ID_LABEL)) for member in members)
    missing = sorted(set(range(shape.num_hosts)) - set(ids))
    if missing:
        return error(
            what,
            f"{kind}: {len(members)} of {shape.num_hosts} hosts; missing: {_format_ids(missing)}",
            f"worker ids {_format_ids(range(shape.num_hosts))}",
            "wait if it is starting; else see `kubectl get pods`: KubeRay replaces it as a whole",
        )
    if len(members) > shape.num_hosts:
        return error(
            what,
            f"{kind}: {len(members)} hosts with worker ids {_format_ids(ids)}",
            f"{shape.num_hosts} hosts",
            "a replacement has the lost slice's name: wait until Ray calls the old nodes dead",
        )
    return ok(what, f"{kind}, {shape.num_hosts} of {shape.num_hosts} hosts")


def _worker_id(label: str | None) -> int:
    if label is None:
        return 0
    return int(label) if label.isdecimal() else -1


def _format_ids(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


@dataclass(frozen=True, slots=True)
class WantedSlices:
    """The least number of slices that a deployment of a serve config needs, and their shape."""

    deployment: str
    want: SliceRequest
    num_slices: int


def check_wanted(
    wanted: Iterable[WantedSlices], nodes: Iterable[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Checks that there are as many slices as the replicas need. A slice in use counts."""
    all_nodes = tuple(nodes)
    # As if all chips were free: who holds which slice is not asked here.
    free = {str(node["NodeID"]): node.get("Resources") or {} for node in all_nodes}
    hosts = observe_hosts(all_nodes, free, ())
    for wanted_slice in wanted:
        found = match_slices(find_slices(hosts), wanted_slice.want)
        what = f"slices for {wanted_slice.deployment}"
        words = (
            f"{len(found.free)} whole of {wanted_slice.want.pod_type} {wanted_slice.want.topology}"
        )
        if len(found.free) >= wanted_slice.num_slices:
            yield ok(what, words)
            continue
        broken = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
        wanted_labels = {
            **wanted_slice.want.labels,
            COMPUTE_CLASS_LABEL: wanted_slice.want.compute_class,
        }
        labels = ", ".join(f"{name}={value}" for name, value in sorted(wanted_labels.items()))
        yield warning(
            what,
            f"{words}{f' ({broken})' if broken else ''}",
            f"{wanted_slice.num_slices}, labels {labels}",
            "replicas wait until there are: the slice provisioner's log says what it asked for",
        )


def check_control_nodes(
    num_processes: int, nodes: Iterable[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Checks that nodes for control processes have room for these while one of them is away.

    Their CPUs say how many processes Ray puts on each. Where there are no such nodes, as on one
    machine, the processes are beside the gateways.
    """
    what = "nodes for control processes"
    own = [
        (node.get("Resources") or {}).get("CPU", 0.0)
        for node in nodes
        if node.get("Alive") and (node.get("Labels") or {}).get(ROLE_LABEL) == CONTROL_ROLE
    ]
    if not own:
        yield note(what, "none: control processes are beside the gateways")
        return
    # The largest is away.
    room = sum(map(processes_per_node, sorted(own)[:-1]))
    words = f"{len(own)}, with room for {room} processes while one is away"
    if room >= num_processes:
        yield ok(what, words)
        return
    yield warning(
        what,
        words,
        f"room for {num_processes}: one for each engine, directory and dashboard",
        "wait if they start; else raise cluster.control_pool.pods or cpus: meanwhile the others "
        "are on the gateways' pods and leave with them",
    )
