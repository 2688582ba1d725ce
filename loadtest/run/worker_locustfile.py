"""The Locust file of a worker of `slicewise loadtest`, which starts it; not to be run by hand.

Its only user is the dispatcher: Locust's own users wait for answers and start in bursts.
"""

import logging
import os
from argparse import ArgumentParser
from pathlib import Path

import gevent.socket
from locust import User, events, task
from locust.exception import StopUser

from loadtest.records import RequestRecord
from loadtest.run.locust_events import fire_request
from loadtest.run.plan import PLAN_FILE, RunPlan
from loadtest.run.worker import run_worker

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def _add_arguments(parser: ArgumentParser, **_: object) -> None:
    parser.add_argument("--run-dir", type=Path, required=True, include_in_web_ui=False)
    parser.add_argument("--run-worker", type=int, required=True, include_in_web_ui=False)
    parser.add_argument("--control-fd", type=int, required=True, include_in_web_ui=False)


class PlannedLoad(User):
    """Sends by the plan's arrival process, as the only Locust user of each worker."""

    fixed_count = 1

    @task
    def run_plan(self) -> None:
        """Does the worker's part of the run and ends Locust."""
        options = self.environment.parsed_options
        plan = RunPlan.read(options.run_dir / PLAN_FILE)
        api_key = None if plan.api_key_env is None else os.environ[plan.api_key_env]

        def on_end(record: RequestRecord) -> None:
            fire_request(self.environment.events.request, record)

        out_dir, number = options.run_dir, options.run_worker
        try:
            with gevent.socket.socket(fileno=options.control_fd) as control:
                run_worker(plan, out_dir, number, api_key, control, on_end)
        except Exception:
            logger.exception("worker_failed number=%s", number)
            self.environment.process_exit_code = 1
        else:
            # Locust's own verdict is that any failed request is an error of the process.
            self.environment.process_exit_code = 0
        self.environment.runner.quit()
        raise StopUser
