"""Checks the variables that GKE and TPU VMs set against each other and against the chips. Pure."""

from collections.abc import Iterator, Mapping

from deployments.doctor.findings import Finding, error, note, ok, warning
from serving.domain.topology import Generation, SliceShape, TopologyError, shapes, slice_shape
from serving.exporters.chips import HostChip, named_generation
from serving.exporters.identity import runtime_targets

_TYPE, _TOPOLOGY, _NAME, _ID = (
    "TPU_ACCELERATOR_TYPE",
    "TPU_TOPOLOGY",
    "TPU_NAME",
    "TPU_WORKER_ID",
)
_HOSTS = "TPU_WORKER_HOSTNAMES"
_OF_A_HOST = (_TYPE, _TOPOLOGY, _NAME, _ID, _HOSTS)
_BACKEND = "TPU_MULTIHOST_BACKEND"
_SET_BY = "set by GKE's device plugin and KubeRay's TPU webhook: are both installed?"


def is_tpu_host(environment: Mapping[str, str], chips: tuple[HostChip, ...]) -> bool:
    """Returns whether this process runs on a host of a slice, real or simulated."""
    return bool(chips) or any(environment.get(name) for name in _OF_A_HOST)


def host_shape(environment: Mapping[str, str], num_chips: int | None) -> SliceShape | None:
    """The slice that the environment describes; `None` where it describes none.

    `num_chips` of this host chooses between hosts of several sizes. Where it is `None`, or no such
    host has as many, the larger one is taken of which there is a host with this one's number.
    """
    generation = named_generation(environment.get(_TYPE, ""))
    topology = environment.get(_TOPOLOGY, "")
    if generation is None or not topology:
        return None
    try:
        larger = slice_shape(generation, topology)
    except TopologyError:
        return None
    alike = [shape for shape in shapes(generation) if shape.topology == larger.topology]
    worker = environment.get(_ID, "0")
    number = int(worker) if worker.isdecimal() else 0
    fitting = (
        *(shape for shape in alike if shape.chips_per_host == num_chips),
        *(shape for shape in alike if number < shape.num_hosts),
    )
    return next(iter(fitting), larger)


def check_tpu_environment(
    environment: Mapping[str, str], chips: tuple[HostChip, ...]
) -> Iterator[Finding]:
    """Checks variables by themselves, then against each other and against the chips."""
    yield from _settings(environment)
    if not is_tpu_host(environment, chips):
        yield note("TPU variables", "none is set: this is no TPU host")
        return
    missing = [name for name in (_TYPE, _TOPOLOGY) if not environment.get(name)]
    if missing:
        yield error("TPU variables", f"{' and '.join(missing)} not set", "both", _SET_BY)
        return
    generation = named_generation(environment[_TYPE])
    if generation is None:
        names = ", ".join(
            shapes(known_generation)[0].ray_pod_type for known_generation in Generation
        )
        yield error(_TYPE, environment[_TYPE], f"such as {names}", _SET_BY)
        return
    shape = host_shape(environment, len(chips) or None)
    if shape is None:
        yield _no_such_topology(generation, environment[_TOPOLOGY])
        return
    problems = [*_about_slice(environment, shape), *_bounds(environment, shape)]
    yield from problems
    if not problems:
        place = f"host {environment.get(_ID, '0')} of {shape.num_hosts}"
        name = environment.get(_NAME) or "a slice without name"
        yield ok("TPU variables", f"{name}: {shape.generation} {shape.topology}, {place}")


def _no_such_topology(generation: Generation, topology: str) -> Finding:
    try:
        slice_shape(generation, topology)
    except TopologyError as wrong:
        return error(
            _TOPOLOGY,
            f"{topology} of {generation}",
            ", ".join(wrong.choices),
            "correct gke-tpu-topology in the worker group",
        )
    raise AssertionError("the topology exists")


def _about_slice(environment: Mapping[str, str], shape: SliceShape) -> Iterator[Finding]:
    kind = f"{shape.generation} {shape.topology}"
    pod_types = {other.ray_pod_type for other in shapes(shape.generation)}
    if environment[_TYPE].lower() in pod_types - {shape.ray_pod_type}:
        yield error(
            _TYPE,
            f"{environment[_TYPE]} with {_TOPOLOGY}={environment[_TOPOLOGY]}",
            f"{shape.ray_pod_type} for {kind}",
            "the two describe different slices: correct the worker group's node selectors",
        )
    if shape.num_hosts > 1 and not environment.get(_NAME):
        yield error(_NAME, "not set", f"a name: {kind} has {shape.num_hosts} hosts", _SET_BY)
    worker = environment.get(_ID, "" if shape.num_hosts > 1 else "0")
    if not (worker.isdecimal() and int(worker) < shape.num_hosts):
        allowed = f"0 to {shape.num_hosts - 1}, for {kind}"
        yield error(_ID, worker or "not set", allowed, _SET_BY)
    for variable in (_HOSTS, "TPU_PROCESS_ADDRESSES"):
        yield from _one_per_host(variable, environment.get(variable), shape)


def _one_per_host(variable: str, text: str | None, shape: SliceShape) -> Iterator[Finding]:
    if text is None:
        return
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) != shape.num_hosts or len(set(names)) != len(names):
        yield error(
            variable,
            f"{len(names)} entries, {len(set(names))} of them different",
            f"{shape.num_hosts} different ones, one for each host",
            "numOfHosts of the worker group has to be the slice's number of hosts",
        )


def _bounds(environment: Mapping[str, str], shape: SliceShape) -> Iterator[Finding]:
    counts = {
        "TPU_CHIPS_PER_HOST_BOUNDS": shape.chips_per_host,
        "TPU_HOST_BOUNDS": shape.num_hosts,
    }
    for variable, count in counts.items():
        text = environment.get(variable)
        if text is not None and _volume(text) != count:
            yield error(
                variable,
                text,
                f"three numbers whose product is {count}",
                "leave it to the TPU webhook; unset it where you set it yourself",
            )


def _volume(text: str) -> int | None:
    """Returns the chips or hosts in bounds such as `2,2,1`; `None` for other text."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]) * int(parts[1]) * int(parts[2])


def _settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the variables that a user may set, on a TPU host or not."""
    if (backend := environment.get(_BACKEND)) not in (None, "ray"):
        # Source: tpu-inference 0.32.0 `envs.py`, read 2026-11-21.
        yield error(_BACKEND, f"{backend}", "ray, or not set", f"unset {_BACKEND}: replicas set it")
    if joined := sorted(name for name in environment if name.startswith("MEGASCALE_")):
        yield warning(
            "MEGASCALE_*",
            ", ".join(joined),
            "none: one engine owns one slice",
            "one worker group per slice, not a multislice job",
        )
    try:
        runtime_targets(environment)
    except ValueError as wrong:
        yield error(
            "TPU_RUNTIME_METRICS_PORTS", f"{wrong}", "ports, with commas between", "unset it"
        )
