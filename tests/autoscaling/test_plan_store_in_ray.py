"""What policies learned, in the key-value store of a real Ray head."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from test_plan_store import NOW_S, OTHER, SETTINGS, learned

from autoscaling.plan_store import (
    read_policy_memory,
    recall_memories,
    write_plan_report,
    write_policy_memory,
)
from autoscaling.policy.memory import PolicyRecord
from serving.domain.plan_report import REPORT_KEY, PlanReport, decode_report

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray, which ends its own processes
]


@pytest.fixture(autouse=True)
def head() -> Iterator[None]:
    # The other process cannot import this file.
    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(here)


@ray.remote(num_cpus=0, max_restarts=0)
class Controller:
    """A process that decides and writes, as Serve's controller does."""

    def remember(self, record: PolicyRecord) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(write_policy_memory, "m", record).result()
            report = PlanReport(written_at_s=NOW_S, models=())
            executor.submit(write_plan_report, report).result()


def test_memory_outlives_the_process_that_wrote_it() -> None:
    controller = Controller.remote()  # type: ignore[attr-defined]
    ray.get(controller.remember.remote(learned()))
    ray.kill(controller)
    with ThreadPoolExecutor(1) as executor:
        assert recall_memories([SETTINGS, OTHER], NOW_S, executor) == {"m": learned()}
    assert read_policy_memory("other") is None
    text = ray.experimental.internal_kv._internal_kv_get(REPORT_KEY)
    assert decode_report(text) == PlanReport(written_at_s=NOW_S, models=())
