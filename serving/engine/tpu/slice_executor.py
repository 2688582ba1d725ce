"""The executor of an engine over several hosts: one worker on each, the end of any ends the engine.

It adds three things to tpu-inference 0.32.0's second executor, by which workers are placed here.
That one tells no worker where the one of the pipeline stage before it is: each looks for it on its
own host, and the first step waits for ever. What it does about a worker that has ended comes late
(`worker_watch`). And nobody learns what workers on other hosts compile (`remote_reports`).
"""

import logging
import os
import signal

from tpu_inference.executors.ray_distributed_executor_v2 import RayDistributedExecutorV2

from serving.directory.ray_hosts import own_address, own_node_id
from serving.engine.remote_reports import ReportRelay
from serving.engine.tpu.worker_watch import watch_workers
from serving.engine.worker_reports import report_worker_ended

logger = logging.getLogger(__name__)


class SliceExecutor(RayDistributedExecutorV2):
    """Runs one worker on each host of a slice, or of slices that are joined."""

    def _post_init_executor(self) -> None:
        relay = ReportRelay(own_address())
        self.collective_rpc("report_compiles", args=(relay.address, own_node_id()))
        if self.parallel_config.pipeline_parallel_size == 1:
            return
        addresses = self.collective_rpc("stage_address")
        for rank in range(1, self.world_size):
            self.collective_rpc("join_stages", args=(addresses,), unique_reply_rank=rank)

    def start_worker_monitor(self, inline: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Ends the engine core, and so the engine, once a worker has ended by itself."""
        runs = {
            each.run_ref: f"worker {each.rank} on Ray node {each.node_id}"
            for each in self.ray_worker_handles
            if each.run_ref is not None
        }
        # `shutdown` joins it by this name.
        self._monitor_thread = watch_workers(runs, lambda: self.shutting_down, _end_engine)


def _end_engine(worker: str) -> None:
    reason = f"{worker} ended"
    logger.error("worker_ended reason=%r", reason)
    report_worker_ended(reason)
    # Nothing of this process is of use without it, and whatever it waits for may never come. Its
    # other workers are Ray actors, which end with it.
    os.kill(os.getpid(), signal.SIGKILL)
