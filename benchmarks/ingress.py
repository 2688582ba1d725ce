"""Polite clients beside others that are not: their TTFT as a ratio to that of an undisturbed run.

The shipped application with paced engines behind the real HAProxy, all at 127.0.0.1. Phases follow
each other in pairs, an undisturbed one and a disturbed one, so that what the machine does meanwhile
is in both. Owns the phases and what is measured in them; `ingress_polite` are the clients that are
measured, `ingress_disturbances` the others. All of it shares one machine: a ratio has the CPU of
the disturbing clients in it.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.ingress_disturbances import (
    MODEL,
    SLOW_MODEL,
    Kind,
    Order,
    disturbing,
)
from benchmarks.ingress_polite import Seen, ask_politely
from deployments.start.ingress.haproxy import MAX_CONNECTIONS
from loadtest.scorecard.spread import spread_of
from tests.e2e.application import Role, RunningApplication, application_args, paced_model

# As slow as a slice that serves a large model.
TTFT_MS, TPOT_MS = 50.0, 20.0
# The readers' streams are long and carry little: 2,000 at the pace above are more than a gateway
# carries, however they read. Several engines, so that their tokens do not come all at one instant.
SLOW_TPOT_MS, NUM_SLOW_ENGINES = 4000.0, 4
_SLOW_MODEL_LEN = 4096
_MAX_NUM_SEQS = 4096
_MIB = 2**20
_PAGE_BYTES = 4096
_IDLE_S = 60.0
_POLL_S = 0.5
_TURN = re.compile(rb"^slicewise_gateway_longest_turn_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ALLOWED = re.compile(r"ingress max_connections=(\d+) served=(\d+) header_timeout_s=(\d+)")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. `max_connections` of `None` is what descriptors allow.

    Half-sent requests are `half_sent_ratio` times the connections that are allowed. `rest_s` is
    before each kind: the longest turn is that of the last 30 to 60 s.
    """

    num_pairs: int = 5
    window_s: float = 10.0
    rest_s: float = 60.0
    max_connections: int | None = None
    half_sent_ratio: float = 1.1
    num_readers: int = 2000
    num_bodies: int = 4
    body_bytes: int = 16 * _MIB


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the ingress said at its start."""

    max_connections: int
    served: int
    header_timeout_s: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What polite clients had in one window, and the server in the meantime.

    `ttft_ms` are p50 and p99, `None` where no answer was whole; `gap_ms` is the longest between two
    tokens of one answer. `refusals` are tries that were told to come again. Memory in MiB by role,
    the most that was seen; `tcp_mib` is what the kernel held for all sockets of the machine.
    """

    num_whole: int
    ttft_ms: tuple[float, float] | None
    gap_ms: float | None
    refusals: dict[str, int]
    failures: dict[str, int]
    client_turn_ms: float
    gateway_turn_ms: float
    memory_mib: dict[str, float]
    tcp_mib: float


@dataclass(frozen=True, slots=True)
class Pair:
    """An undisturbed phase, the disturbed one after it, and what became of those who disturbed."""

    undisturbed: Phase
    disturbed: Phase
    became: dict[str, int]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """All pairs of one kind. Memory in MiB by role, before the first pair and after the last."""

    kind: Kind
    count: int
    body_bytes: int
    pairs: list[Pair]
    memory_before_mib: dict[str, float]
    memory_after_mib: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. `prompt_tokens` are the fewest and the most of a polite prompt, as counted."""

    scale: Scale
    allowed: Allowed
    prompt_tokens: tuple[int, int]
    disturbances: list[Disturbance]


async def measure(note: Callable[[str], None], scale: Scale, kinds: tuple[Kind, ...]) -> Run:
    """Measures these kinds, each with its pairs, at one application."""
    models = [
        paced_model(
            1, {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS, "max_num_seqs": _MAX_NUM_SEQS}, name=MODEL
        ),
        paced_model(
            NUM_SLOW_ENGINES,
            {
                "ttft_ms": TTFT_MS,
                "tpot_ms": SLOW_TPOT_MS,
                "max_num_seqs": _MAX_NUM_SEQS,
                "max_model_len": _SLOW_MODEL_LEN,
            },
            name=SLOW_MODEL,
        ),
    ]
    gateway = {"max_body_bytes": scale.body_bytes}
    variables = (
        {} if scale.max_connections is None else {MAX_CONNECTIONS: str(scale.max_connections)}
    )
    application = RunningApplication(
        application_args(*models, gateway=gateway), through="slicewise", environment=variables
    )
    with application:
        bench = _Bench(application, scale, note)
        await bench.warm_up()
        disturbances = [await bench.measure(kind) for kind in kinds]
        tokens = bench.prompt_tokens
        return Run(scale, allowed_of(application.folder), (min(tokens), max(tokens)), disturbances)


def allowed_of(folder: Path) -> Allowed:
    """Returns what HAProxy's last start below the folder said.

    Raises:
        LookupError: it said nothing.
    """
    logs = sorted(folder.rglob("*.stderr.log"), key=lambda path: path.stat().st_mtime)
    said = [_ALLOWED.findall(log.read_text(errors="replace")) for log in logs]
    if not any(said):
        raise LookupError(f"no log of {len(logs)} below {folder} has the limits of the ingress")
    return Allowed(*map(int, [line for lines in said for line in lines][-1]))


class _Bench:
    def __init__(
        self, application: RunningApplication, scale: Scale, note: Callable[[str], None]
    ) -> None:
        self._application = application
        self._scale = scale
        self._note = note
        self._num_phases = 0
        # Found once: to look through all processes takes a turn of the polite clients' loop.
        self._processes = self._find_processes()
        self.prompt_tokens: set[int] = set()

    async def warm_up(self) -> None:
        """Imports, caches and connections of the first requests."""
        await self._ask()

    async def measure(self, kind: Kind) -> Disturbance:
        """All pairs of one kind, after a rest."""
        order = self._order(kind)
        self._processes = self._find_processes()
        await asyncio.sleep(self._scale.rest_s)
        before = self._memory_mib()
        pairs = []
        for _ in range(self._scale.num_pairs):
            undisturbed = await self._phase()
            # They leave at the window's end: a request that waits for that is whole after it.
            async with asyncio.TaskGroup() as group, disturbing(order) as disturbers:
                watched = group.create_task(self._watched())
                await asyncio.sleep(self._scale.window_s)
            disturbed = await self._phase_of(*watched.result())
            await asyncio.to_thread(self._application.wait_idle, _IDLE_S)
            pairs.append(Pair(undisturbed, disturbed, disturbers.became))
            self._note(f"{kind}: {undisturbed}\n  {disturbed}\n  {disturbers.became}")
        after = self._memory_mib()
        return Disturbance(kind, order.count, order.body_bytes, pairs, before, after)

    def _order(self, kind: Kind) -> Order:
        port, scale = self._application.port, self._scale
        match kind:
            case Kind.HALF_SENT:
                allowed = allowed_of(self._application.folder).max_connections
                return Order(kind, port, math.ceil(allowed * scale.half_sent_ratio))
            case Kind.QUICK_READERS | Kind.SLOW_READERS:
                return Order(kind, port, scale.num_readers)
            case Kind.BODIES | Kind.SLOW_BODIES:
                return Order(kind, port, scale.num_bodies, scale.body_bytes)

    async def _phase(self) -> Phase:
        return await self._phase_of(*await self._watched())

    async def _phase_of(self, seen: Seen, memory: dict[str, float], tcp_mib: float) -> Phase:
        ttft, gaps = spread_of(seen.ttft_s), spread_of(seen.longest_gap_s)
        return Phase(
            num_whole=len(seen.ttft_s),
            ttft_ms=None
            if ttft.p50 is None or ttft.p99 is None
            else (ttft.p50 * 1e3, ttft.p99 * 1e3),
            gap_ms=None if gaps.max is None else gaps.max * 1e3,
            refusals=dict(seen.refusals),
            failures=dict(seen.failures),
            client_turn_ms=seen.longest_turn_s * 1e3,
            gateway_turn_ms=await self._gateway_turn_ms(),
            memory_mib=memory,
            tcp_mib=tcp_mib,
        )

    async def _watched(self) -> tuple[Seen, dict[str, float], float]:
        """Asks for a window, and watches the memory meanwhile."""
        peaks: dict[str, float] = {}
        async with _repeated(lambda: self._see_memory(peaks)):
            seen = await self._ask()
        tcp_mib = peaks.pop("TCP")
        return seen, peaks, tcp_mib

    async def _ask(self) -> Seen:
        self._num_phases += 1
        seen = await ask_politely(
            self._application.base_url,
            MODEL,
            seed=self._num_phases,
            window_s=self._scale.window_s,
        )
        self.prompt_tokens |= seen.prompt_tokens
        return seen

    def _see_memory(self, peaks: dict[str, float]) -> None:
        for name, mib in (self._memory_mib() | {"TCP": _tcp_mib()}).items():
            peaks[name] = max(peaks.get(name, 0.0), mib)

    def _find_processes(self) -> dict[str, list[psutil.Process]]:
        roles = {"gateway": Role.GATEWAY, "HAProxy": Role.HAPROXY}
        # A reload leaves an old HAProxy behind for a while: the last one has the load.
        return {name: self._application.processes(role)[-1:] for name, role in roles.items()}

    def _memory_mib(self) -> dict[str, float]:
        return {
            name: sum(process.memory_info().rss for process in processes) / _MIB
            for name, processes in self._processes.items()
        }

    async def _gateway_turn_ms(self) -> float:
        async with httpx.AsyncClient(
            base_url=self._application.base_url, timeout=_IDLE_S
        ) as client:
            page = (await client.get("/metrics")).raise_for_status().content
        return max(float(value) for value in _TURN.findall(page)) * 1e3


@asynccontextmanager
async def _repeated(look: Callable[[], None]) -> AsyncIterator[None]:
    """Looks at once, and on meanwhile."""

    async def look_on() -> None:
        while True:
            look()
            await asyncio.sleep(_POLL_S)

    task = asyncio.create_task(look_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _tcp_mib() -> float:
    """What the kernel holds for TCP sockets of the machine: buffers that nobody has read."""
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            words = line.split()
            return int(words[words.index("mem") + 1]) * _PAGE_BYTES / _MIB
    raise LookupError("/proc/net/sockstat has no line of TCP")
