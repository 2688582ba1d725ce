"""The provisioner as a process beside a cluster's head: reads the directory, patches KubeRay.

Owns the wiring and the end. It is a client of Ray's head and no driver: it needs no raylet in its
container, no shared memory and no Serve. Imports Ray; `command` imports this only when it runs.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs

from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from autoscaling.provisioning.sidecar.conditions import ConditionWatch
from autoscaling.provisioning.sidecar.directory import DirectoryRoad
from autoscaling.provisioning.sidecar.fence import RayFence
from autoscaling.provisioning.sidecar.metrics import (
    ProvisionerCollector,
    ProvisionerState,
    asked_of,
    served_page,
)
from autoscaling.provisioning.sidecar.rounds import RoundLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """The options of `slicewise provision`. `interval_s` is the longest time between two rounds.

    `metrics_port` is where the page for Prometheus is; `None`: there is none. `installation` is the
    name under which the cluster was rendered; `None`: nothing around the slices is watched.
    """

    ray_address: str
    raycluster: str
    application: str
    access: KubernetesAccess
    rules: ProvisioningRules
    interval_s: float
    metrics_port: int | None = None
    installation: str | None = None


def run_sidecar(options: SidecarOptions) -> None:
    """Provisions until SIGTERM or Ctrl-C. Needs Ray's head; waits for it while it is away."""
    asyncio.run(_provision(options))


async def _provision(options: SidecarOptions) -> None:
    gcs = GcsClient(address=canonicalize_bootstrap_address_or_die(options.ray_address))
    road = DirectoryRoad(gcs, options.application)
    api = KubernetesApi(options.access)
    changed = asyncio.Event()
    watched = WatchedCluster(api, options.raycluster, changed.set)
    rounds = RoundLog()
    try:
        reconciler = Reconciler(
            road.read_supply,
            KubeRayProvisioner(api, options.raycluster, watched),
            options.rules,
            fence=RayFence(gcs),
            report_pods=road.report_pods,
            interval_s=options.interval_s,
            changed=changed,
            observer=rounds,
        )
        running = asyncio.create_task(reconciler.run(), name="reconcile")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        logger.info("provisioning raycluster=%s every_s=%g", options.raycluster, options.interval_s)
        async with watched, _shown(options, api, rounds, road):
            with contextlib.suppress(asyncio.CancelledError):
                await running
        logger.info("provisioning_ended raycluster=%s", options.raycluster)
    finally:
        await api.aclose()


@contextlib.asynccontextmanager
async def _shown(
    options: SidecarOptions, api: KubernetesApi, rounds: RoundLog, road: DirectoryRoad
) -> AsyncIterator[None]:
    """Has Prometheus shown what happens, if anybody wants to know."""
    if options.metrics_port is None:
        yield
        return
    watch, following = None, None
    if options.installation is not None:
        watch = ConditionWatch(api, options.raycluster, options.installation)
        following = asyncio.create_task(watch.follow(), name="conditions")

    def read() -> ProvisionerState:
        conditions = None if watch is None else watch.current()
        return ProvisionerState(rounds.so_far(), road.silence_s, conditions)

    collector = ProvisionerCollector(asked_of(asyncio.get_running_loop(), read), time.time)
    try:
        with served_page(collector, options.metrics_port) as port:
            logger.info("metrics port=%d", port)
            yield
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
