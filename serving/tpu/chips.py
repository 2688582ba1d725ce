"""Gives an engine that has a part of a slice its own chips.

Owns the variables by which libtpu keeps to some chips of a host. Pure.

Sources, read 2026-11-27: JAX 0.10.2 `_src/test_multiprocess.py`, which sets these for several
processes on a host and has four chips of eight as a square; tpu-inference 0.32.0
`worker/tpu_worker.py` (`_setup_dp_chip_isolation`), which sets the same ones for data parallelism
but has them in a row. Which of the two libtpu wants of v5e is not known. Nothing here has run on a
TPU.
"""

from serving.domain.topology import SliceShape, engine_shape

# libtpu's own defaults: where its processes meet, and where one tells its metrics.
_PROCESS_PORT = 8476
LIBTPU_PORT = 8431
# How the chips of one process lie, by their number.
_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}

VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
METRICS_PORTS = "TPU_RUNTIME_METRICS_PORTS"


def host_of_engine(shape: SliceShape, num_engines: int, number: int) -> int:
    """Returns the worker id of the host on which engine `number` begins; 0 for one engine."""
    return number * shape.num_hosts // num_engines


def chips_of_engine(shape: SliceShape, num_engines: int, number: int) -> range:
    """Returns the chips of engine `number`, as its host numbers them."""
    num_chips = engine_shape(shape, num_engines).num_chips
    first = number * num_chips % shape.chips_per_host
    return range(first, first + num_chips)


def metrics_ports(shape: SliceShape, num_engines: int) -> tuple[int, ...]:
    """Returns the ports on each host at which libtpu tells of its engines' chips."""
    per_host = max(1, num_engines // shape.num_hosts)
    return tuple(LIBTPU_PORT + place for place in range(per_host))


def chips_environment(shape: SliceShape, num_engines: int, number: int) -> dict[str, str]:
    """Returns the variables of every process of engine `number`; none where it has a whole slice.

    Each is a TPU system of one process, which knows of no other chips, on its host or beyond.
    """
    if num_engines == 1:
        return {}
    chips = chips_of_engine(shape, num_engines, number)
    place = chips.start // len(chips)
    port = _PROCESS_PORT + place
    return {
        VISIBLE_CHIPS: ",".join(map(str, chips)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": str(port),
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "CLOUD_TPU_TASK_ID": "0",
        METRICS_PORTS: str(LIBTPU_PORT + place),
        # libtpu locks the whole host for a process that does not say so.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
