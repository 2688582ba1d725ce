"""The identity of this host: the labels on each of its series, from the process's environment.

Owns the names of environment variables and their order. Does not read the environment itself; no
metadata server is asked. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.telemetry.metric_names import HOST_LABELS

# The first that is set counts. TPU_* are set on TPU VMs and by GKE's device plugin; the others are
# given to a pod by its manifest, from its own labels and its node's.
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "slice": ("SLICEWISE_SLICE", "TPU_NAME"),
    "worker": ("SLICEWISE_WORKER", "TPU_WORKER_ID"),
    "node": ("SLICEWISE_NODE", "NODE_NAME", "HOSTNAME"),
    "accelerator": ("SLICEWISE_ACCELERATOR", "TPU_ACCELERATOR_TYPE"),
    "topology": ("SLICEWISE_TOPOLOGY", "TPU_TOPOLOGY"),
    "compute_class": ("SLICEWISE_COMPUTE_CLASS",),
}
_PORTS = "TPU_RUNTIME_METRICS_PORTS"
# Where libtpu listens by default. Source: tpu-info 0.14.2, read 2026-11-21.
_DEFAULT_PORT = "8431"


@dataclass(frozen=True, slots=True)
class Identity:
    """The host's labels; an empty text where none was given."""

    labels: tuple[tuple[str, str], ...]

    def __getitem__(self, label: str) -> str:
        """Returns the value of one label of a host."""
        return dict(self.labels)[label]


def read_identity(environment: Mapping[str, str]) -> Identity:
    """Returns the host's labels from the environment."""
    return Identity(
        tuple(
            (label, next(filter(None, map(environment.get, _VARIABLES[label])), ""))
            for label in HOST_LABELS
        )
    )


def runtime_targets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the addresses of libtpu's services on this host, one for each runtime process.

    Raises:
        ValueError: the environment names something that is no port.
    """
    ports = environment.get(_PORTS) or _DEFAULT_PORT
    targets = []
    for port in ports.split(","):
        if not (port.strip().isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{_PORTS}: not a port (value {port!r}); allowed are 1 to 65535")
        targets.append(f"127.0.0.1:{int(port)}")
    return tuple(targets)
