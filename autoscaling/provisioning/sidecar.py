"""The provisioner as a process beside a cluster's head: reads the directory, patches KubeRay.

Owns the wiring and the end. Imports Ray; `command` imports this only when it runs.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from autoscaling.provisioning.errors import RecordsUnavailableError
from autoscaling.provisioning.fence import RayFence
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from serving.domain.slice_records import SliceRecord

logger = logging.getLogger(__name__)

DIRECTORY = "directory"
# The directory answers in milliseconds; Serve restarts a lost one within seconds.
_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """The options of `slicewise provision`. `interval_s` is between two rounds."""

    ray_address: str
    raycluster: str
    application: str
    access: KubernetesAccess
    rules: ProvisioningRules
    interval_s: float


class DirectoryRecords:
    """The records in the fleet directory of a Serve application, read anew at each call."""

    def __init__(self, application: str) -> None:
        self._application = application
        # Each handle has a router of its own in this process; one follows every redeployment.
        self._handle: DeploymentHandle | None = None

    async def __call__(self) -> Iterable[SliceRecord]:
        """Returns all current records.

        Raises:
            RecordsUnavailableError: the application is not there, or its directory does not answer.
        """
        try:
            if self._handle is None:
                self._handle = serve.get_deployment_handle(DIRECTORY, self._application)
            # No directory has this version, so it answers at once.
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                snapshot = await self._handle.watch.remote("", 0.0)
        # Serve raises KeyError for a deployment that it does not know.
        except (RayServeException, ray.exceptions.RayError, KeyError, TimeoutError) as error:
            name = f"{DIRECTORY} of application {self._application}"
            raise RecordsUnavailableError(f"{name}: {type(error).__name__}: {error}") from error
        records: tuple[SliceRecord, ...] = snapshot.records
        return records


def run_sidecar(options: SidecarOptions) -> None:
    """Provisions until SIGTERM or Ctrl-C. Needs a Ray node on this machine or in this pod."""
    ray.init(
        address=options.ray_address,
        # Handles of Serve are looked up in its namespace.
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        asyncio.run(_provision(options))
    finally:
        ray.shutdown()


async def _provision(options: SidecarOptions) -> None:
    api = KubernetesApi(options.access)
    try:
        reconciler = Reconciler(
            DirectoryRecords(options.application),
            KubeRayProvisioner(api, options.raycluster),
            options.rules,
            fence=RayFence(ray.get_runtime_context().gcs_address),
            interval_s=options.interval_s,
        )
        running = asyncio.create_task(reconciler.run(), name="reconcile")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        logger.info("provisioning raycluster=%s every_s=%g", options.raycluster, options.interval_s)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        logger.info("provisioning_ended raycluster=%s", options.raycluster)
    finally:
        await api.aclose()
