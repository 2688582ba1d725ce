"""What the slice provisioner costs beside a thousand slices: memory, CPU, API calls, delay.

A real API server has the pods, a proxy before it counts what the provisioner asks, and can end its
watch. The directory's report is written here, into the store of a real Ray head. The provisioner is
`slicewise provision` as we render it, with its page for Prometheus, which is asked as Prometheus
would. It is measured as a whole process by the kernel: `VmHWM` is the most memory that it ever had,
CPU is user and system time.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import httpx
import msgspec
from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled

from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import CLUSTERS, RAY
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.raycluster import worker_pods_selector
from benchmarks.provisioner_cluster import (
    ACCOUNT,
    CHIPS_PER_HOST,
    CLUSTER,
    GENERATION,
    INSTALLATION,
    NAMESPACE,
    NUM_HOSTS,
    TOPOLOGY,
    Group,
    LargeCluster,
    pod_address,
    pod_name,
)
from deployments.start.ports import free_ports
from deployments.start.serve import child_environment
from serving.domain.slice_lifecycle import SliceState
from serving.domain.supply.beat import BEAT_S, ReportBeat
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.records import (
    SliceHolder,
    SupplyHost,
    SupplyRecord,
    SupplyReport,
    SupplyState,
    WaitingReplica,
    encode_supply,
)
from tests.control_plane.assets import VARIABLE
from tests.control_plane.proxy import Fault, Proxy, Request
from tests.control_plane.server import ControlPlane
from tests.control_plane.shared import define_crds

NUM_RUNS = 3
NUM_SLICES = 1000
IDLE_S = 600.0
NUM_WISHES = 20
APPLICATION = "slicewise"
_WITHIN_S = 120.0
_POLL_S = 0.02
_SHOWN_LOG = 2000
_OBJECT_STORE_BYTES = 80_000_000
# As `deployments/prometheus` asks.
_SCRAPE_S = 15.0
# In what is asked of the API for the pods of slices, and for no others.
_OF_WORKERS = quote(worker_pods_selector(CLUSTER), safe="")


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: its length, the CPU that was used in it, and the peak memory at its end."""

    seconds: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `calls_per_minute` are of the idle phase, `wish_s` from a record to its count."""

    num_pods: int
    pod_bytes: int
    start: Phase
    idle: Phase
    idle_rss_mib: float
    calls_per_minute: float
    calls: dict[str, int]
    wishes: Phase
    wish_s: list[float]
    relist: Phase
    touched: Phase
    num_scrapes: int
    page_bytes: int


class Process:
    """The provisioner as the kernel sees it."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._began_s = time.monotonic()
        self._cpu_s = 0.0

    def phase(self) -> Phase:
        """What happened since the last call."""
        now_s, cpu_s = time.monotonic(), self._used_s()
        done = Phase(now_s - self._began_s, cpu_s - self._cpu_s, self.memory_mib("VmHWM"))
        self._began_s, self._cpu_s = now_s, cpu_s
        return done

    def memory_mib(self, name: str) -> float:
        """A size of `/proc/PID/status`."""
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024

    def _used_s(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Directory:
    """What the fleet directory would report: a replica on every slice, and some that wait."""

    def __init__(self, cluster: LargeCluster, gcs_address: str) -> None:
        self._gcs = GcsClient(address=gcs_address)
        self._keys = SupplyKeys(APPLICATION)
        self._slices = tuple(
            _record(group, number, name)
            for number, (group, name) in enumerate(cluster.slice_names())
        )
        self._waiting: list[WaitingReplica] = []
        self._num_beats = 0
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Beats until it is cancelled."""
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_S)

    async def report(self) -> None:
        """Writes everything anew."""
        report = SupplyReport(self._version, self._slices, tuple(self._waiting))
        async with self._turn:
            await asyncio.to_thread(self._put, self._keys.supply, encode_supply(report))
        await self._beat()

    async def wait_for(self, compute_class: str) -> None:
        """One replica more waits for a slice."""
        life_id = f"waiting-{len(self._waiting)}"
        kind = (compute_class, GENERATION, TOPOLOGY)
        self._waiting.append(WaitingReplica(life_id, "demo", *kind, since_s=0.0))
        await self.report()

    @property
    def _version(self) -> str:
        return f"benchmark:{len(self._waiting)}"

    async def _beat(self) -> None:
        async with self._turn:
            self._num_beats += 1
            beat = ReportBeat(self._version, self._num_beats).encode()
            await asyncio.to_thread(self._put, self._keys.supply_beat, beat)

    def _put(self, key: bytes, value: bytes) -> None:
        self._gcs.internal_kv_put(key, value, overwrite=True)


def _record(group: Group, number: int, name: str) -> SupplyRecord:
    """A slice that a replica has."""
    pods = [pod_name(group, number, host) for host in range(NUM_HOSTS)]
    hosts = tuple(
        SupplyHost(host, pod, f"gke-{number}-{host}", f"{number:052x}{host:04x}", address)
        for host, pod in enumerate(pods)
        for address in [pod_address(number, host)]
    )
    return SupplyRecord(
        incarnation=pods[0],
        name=name,
        state=SupplyState.HELD,
        reason="a replica has it",
        since_s=0.0,
        compute_class=group.compute_class,
        generation=GENERATION,
        topology=TOPOLOGY,
        num_chips=NUM_HOSTS * CHIPS_PER_HOST,
        hosts=hosts,
        group=group.name,
        holder=SliceHolder(f"replica-{number}", "demo", group.compute_class, SliceState.READY),
    )


class Counts:
    """The counts of all groups as the server reports them, each with the instant it was seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    async def follow(self, api: KubernetesApi) -> None:
        """Watches the RayCluster until it is cancelled."""
        selection = Selection(RAY, CLUSTERS, name=CLUSTER)
        async for page in api.pages(selection):
            version = page.metadata.version
        async with api.watch(selection, version, int(_WITHIN_S * 10)) as events:
            async for event in events:
                for spec in (
                    msgspec.json.decode(event.object).get("spec", {}).get("workerGroupSpecs", ())
                ):
                    name, count = spec["groupName"], spec["replicas"]
                    if self._seen.get(name, (None, 0.0))[0] != count:
                        self._seen[name] = (count, time.monotonic())

    async def changed_after(self, group: str, at_s: float) -> float:
        """The seconds from `at_s` to the next change of a group's count."""
        await until(lambda: self._seen.get(group, (0, 0.0))[1] > at_s, f"{group} is changed")
        return self._seen[group][1] - at_s


async def until(is_so: Callable[[], bool], what: str) -> None:
    """Waits until it is so.

    Raises:
        TimeoutError: it is not, for two minutes.
    """
    deadline_s = time.monotonic() + _WITHIN_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {_WITHIN_S:g} s: {what}")
        await asyncio.sleep(_POLL_S)


async def measure(
    report: Callable[[str], None],
    num_slices: int = NUM_SLICES,
    idle_s: float = IDLE_S,
    num_wishes: int = NUM_WISHES,
) -> Run:
    """One run, from an empty API server to its end.

    Raises:
        KeyError: `KUBEBUILDER_ASSETS` is not set.
        TimeoutError: the provisioner does not do its work.
    """
    with ControlPlane(Path(os.environ[VARIABLE])) as plane, _control_store() as gcs_address:
        define_crds(plane.api)
        cluster = LargeCluster(plane.api, num_slices)
        await asyncio.to_thread(cluster.make)
        directory = Directory(cluster, gcs_address)
        await directory.report()
        report(f"{num_slices} slices, {cluster.pod_bytes()} bytes a pod")
        with TemporaryDirectory(prefix="slicewise-bench-") as name:
            folder = Path(name)
            with Proxy(plane) as proxy:
                token = folder / "token"
                token.write_text(plane.api.request_token(NAMESPACE, ACCOUNT))
                access = KubernetesAccess(proxy.url, NAMESPACE, token, proxy.ca_file)
                direct = KubernetesAccess(plane.url, NAMESPACE, token, plane.ca_file)
                (port,) = free_ports(1)
                with _provisioner(gcs_address, access, port, folder / "log") as process:
                    page = Page(port)
                    bench = _Bench(cluster, directory, proxy, process, page, report)
                    async with (
                        _running(directory.run()),
                        _running(page.ask_on()),
                        _counts(direct) as counts,
                    ):
                        return await bench.run(counts, idle_s, num_wishes)


class Page:
    """Asks for the page of metrics as Prometheus does."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self.num_scrapes = 0
        self.num_bytes = 0

    async def ask_on(self) -> None:
        """Asks until it is cancelled; first when somebody answers."""
        async with httpx.AsyncClient(timeout=_WITHIN_S) as client:
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    self.num_bytes = len((await client.get(self._url)).raise_for_status().content)
                    self.num_scrapes += 1
                await asyncio.sleep(_SCRAPE_S if self.num_scrapes else _POLL_S)


class _Bench:
    def __init__(
        self,
        cluster: LargeCluster,
        directory: Directory,
        proxy: Proxy,
        process: Process,
        page: Page,
        report: Callable[[str], None],
    ) -> None:
        self._page = page
        self._cluster = cluster
        self._directory = directory
        self._proxy = proxy
        self._process = process
        self._report = report

    async def run(self, counts: Counts, idle_s: float, num_wishes: int) -> Run:
        start = await self._phase("start", self._watches())
        asked = len(self._proxy.requests())
        idle = await self._phase("idle", asyncio.sleep(idle_s))
        calls = Counter(map(_words, self._proxy.requests()[asked:]))
        rss_mib = self._process.memory_mib("VmRSS")
        wish_s: list[float] = []
        wishes = await self._phase("wishes", self._wish(counts, wish_s, num_wishes))
        relist = await self._phase("relist", self._relist())
        touched = await self._phase("touched", self._touch())
        return Run(
            sum(1 for _ in self._cluster.slice_names()) * NUM_HOSTS,
            self._cluster.pod_bytes(),
            start,
            idle,
            rss_mib,
            sum(calls.values()) * 60 / idle.seconds,
            dict(calls),
            wishes,
            wish_s,
            relist,
            touched,
            self._page.num_scrapes,
            self._page.num_bytes,
        )

    async def _phase(self, name: str, work: Awaitable[None]) -> Phase:
        await work
        done = self._process.phase()
        share = done.cpu_s / done.seconds
        self._report(f"{name}: {done.seconds:.1f} s, CPU {done.cpu_s:.2f} s ({share:.1%}), "
                     f"peak {done.peak_mib:.0f} MiB")  # fmt: skip
        return done

    async def _watches(self) -> None:
        resources = ("pods", "rayclusters", "rayservices")
        await until(
            lambda: all(self._proxy.watches(name) for name in resources), "everything is watched"
        )

    async def _wish(self, counts: Counts, wish_s: list[float], num_wishes: int) -> None:
        draw = random.Random(0)
        for number in range(num_wishes):
            # Anywhere between two looks at the records, and no group twice within its interval.
            await asyncio.sleep(1.5 + draw.random())
            group = self._cluster.groups[number % len(self._cluster.groups)]
            at_s = time.monotonic()
            await self._directory.wait_for(group.compute_class)
            wish_s.append(await counts.changed_after(group.name, at_s))

    async def _relist(self) -> None:
        before = len(self._worker_watches())
        # Of the pods of slices: those of the control plane are watched beside them, and are few.
        self._proxy.inject(Fault("watch", 410, part=_OF_WORKERS))
        self._proxy.cut()
        await until(lambda: len(self._worker_watches()) >= before + 2, "pods are watched again")

    def _worker_watches(self) -> list[Request]:
        return [each for each in self._proxy.watches("pods") if _OF_WORKERS in each.target]

    async def _touch(self) -> None:
        await asyncio.to_thread(self._cluster.touch_pods, "slicewise.io/touched")


def _words(asked: Request) -> str:
    return f"{asked.verb.upper()} {asked.resource}"


@contextmanager
def _control_store() -> Iterator[str]:
    """The address of a Ray head's control store. A process of its own: Ray leaves sockets open."""
    # Ray's sockets lie below it, and their paths may have at most 107 bytes.
    with TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        port, client_port, dashboard_port = free_ports(3)
        head = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
                "--node-ip-address=127.0.0.1",
                *(f"--port={port}", f"--ray-client-server-port={client_port}", "--num-cpus=0"),
                # Ray binds it though no dashboard is wanted.
                f"--dashboard-port={dashboard_port}",
                *("--include-dashboard=false", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
            ],
            # This process asks the store, and has no token of it.
            env=child_environment({**os.environ, "RAY_AUTH_MODE": "disabled"}, folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with head:
            try:
                _wait_for_last_word(head)
                yield f"127.0.0.1:{port}"
            finally:
                head.terminate()


def _wait_for_last_word(head: subprocess.Popen[str]) -> None:
    assert head.stdout is not None
    said = []
    # It comes once everything runs.
    while "will now block" not in (line := head.stdout.readline()):
        said.append(line)
        if not line:
            raise RuntimeError(f"Ray's head ended with {head.wait()}\n{''.join(said)}")


@contextmanager
def _provisioner(
    gcs_address: str, access: KubernetesAccess, port: int, log: Path
) -> Iterator[Process]:
    command = [str(Path(sys.executable).with_name("slicewise")), "provision"]
    command += ["--ray-address", gcs_address, "--application", APPLICATION]
    command += ["--raycluster", CLUSTER, "--namespace", access.namespace]
    command += ["--kubernetes-url", access.base_url, "--token-file", str(access.token_file)]
    command += ["--ca-file", str(access.ca_file)]
    command += ["--metrics-port", str(port), "--installation", INSTALLATION]
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Process(started.pid)
    except TimeoutError as error:
        error.add_note(log.read_text()[-_SHOWN_LOG:])
        raise
    finally:
        started.terminate()
        started.wait(_WITHIN_S)


@asynccontextmanager
async def _counts(access: KubernetesAccess) -> AsyncIterator[Counts]:
    api, counts = KubernetesApi(access, silence_s=_WITHIN_S * 10), Counts()
    try:
        async with _running(counts.follow(api)):
            yield counts
    finally:
        await api.aclose()


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Does `work` meanwhile."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
