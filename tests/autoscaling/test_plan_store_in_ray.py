"""What policies learned, in the key-value store of a real Ray head."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from test_model_scaler import Sink
from test_plan_store import NOW_S, OTHER, SETTINGS, half_as_good, learned, recalled
from test_serve_policy import MODEL, RESERVED, SPOT, by_name, contexts
from test_serve_policy import SETTINGS as IN_SERVE

from autoscaling.model_scaler import ModelScaler
from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy_config import read_policy_settings
from autoscaling.serve_policy import SlicePolicy
from autoscaling.storage.plan_store import (
    PlanStore,
)
from serving.directory.plan_store import read_plan_report
from serving.domain.plan_report import PlanReport

STORE = PlanStore("slicewise")

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
            executor.submit(STORE.write_memory, "m", record).result()
            report = PlanReport(written_at_s=NOW_S, models=())
            executor.submit(STORE.write_report, report).result()


def test_memory_outlives_the_process_that_wrote_it() -> None:
    controller = Controller.remote()  # type: ignore[attr-defined]
    ray.get(controller.remember.remote(learned()))
    ray.kill(controller)
    with ThreadPoolExecutor(1) as executor:
        assert recalled([SETTINGS, OTHER], executor, STORE.read_memory) == {"m": learned()}
    assert STORE.read_memory("other") is None
    assert read_plan_report("slicewise") == PlanReport(written_at_s=NOW_S, models=())
    # Another application of the cluster has its own.
    assert PlanStore("other").read_memory("m") is None
    assert read_plan_report("other") is None


def test_new_controller_plans_in_serve_with_what_the_one_before_had_learned() -> None:
    now_s = time.time()
    assert by_name(SlicePolicy(**IN_SERVE)(contexts(now_s))[0]) == {RESERVED: 2, SPOT: 3}
    (settings,) = read_policy_settings(IN_SERVE).models
    # What it learned is by its profile, whatever the model is called.
    before = ModelScaler(replace(settings, model="m"), Sink())
    record = before.to_record(half_as_good(before, now_s - 900.0))
    assert record is not None
    STORE.write_memory(MODEL, record)
    # Five slices' work, of slices that carry half.
    assert by_name(SlicePolicy(**IN_SERVE)(contexts(now_s))[0]) == {RESERVED: 2, SPOT: 7}
