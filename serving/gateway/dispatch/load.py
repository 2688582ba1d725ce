"""The load of one model at one gateway, over all of its versions."""

from collections.abc import Sequence
from dataclasses import replace

from serving.domain.load_report import LoadSample
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import AdmissionQueue
from serving.gateway.dispatch.dispatcher import Dispatcher


def load_of(dispatchers: Sequence[Dispatcher], queue: AdmissionQueue, now_s: float) -> LoadSample:
    """Returns the load of one model over all its versions, which share `queue`.

    `now_s` is monotonic.
    """
    num_waiting = queue.num_waiting + sum(each.num_waiting for each in dispatchers)
    num_batch_waiting = queue.num_batch_waiting + sum(
        each.num_waiting_of[ServiceClass.BATCH] for each in dispatchers
    )
    num_in_flight = sum(each.num_in_flight - each.num_waiting for each in dispatchers)
    num_batch_in_flight = sum(each.num_batch_on_engines for each in dispatchers)
    first_s = min((each.first_waiting_since_s(now_s) for each in dispatchers), default=now_s)
    # The first in the queue has waited longest of those there.
    oldest_wait_s = now_s - min(first_s, queue.first_since_s(now_s))
    telemetry = queue.telemetry
    batch = telemetry.batch_load.sample(now_s, num_waiting=0, oldest_wait_s=0, num_in_flight=0)
    urgent = telemetry.load.sample(
        now_s,
        num_waiting=num_waiting - num_batch_waiting,
        oldest_wait_s=oldest_wait_s,
        num_in_flight=num_in_flight - num_batch_in_flight,
    )
    return replace(
        urgent,
        batch_requests_per_s=batch.requests_per_s,
        num_batch_waiting=num_batch_waiting,
        num_batch_in_flight=num_batch_in_flight,
        full_ratio=max((each.full_ratio(now_s) for each in dispatchers), default=0.0),
    )
