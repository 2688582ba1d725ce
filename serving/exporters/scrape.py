"""Makes one scrape: every collector at once, one deadline, and a page of the answers.

Owns the threads, the clock and what outlives a scrape: the numbering of devices and the counts of
errors. Does not own what a page shows (`compose`). A collector that hangs costs one scrape its
budget. Until it comes back it is reported as hanging at once and not started again.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from serving.exporters.chips import DeviceMap
from serving.exporters.collector import AnyRaw, Code, CollectError, Collector, CollectorSample
from serving.exporters.compose import CollectorOutcome, HostDescription, compose_page
from serving.exporters.series import Series, SeriesCollector

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

# Shares of a scrape's budget: a collector's timeout, after which it still has time to return, and
# the instant at which it is given up. The rest is for composing and sending the page.
_COLLECTOR_SHARE = 0.8
_PATIENCE_SHARE = 0.9


class _Collection:
    def __init__(self, collector: Collector, budget_s: float, clock: Clock) -> None:
        self.started_s = clock()
        self.deadline_s = self.started_s + budget_s * _PATIENCE_SHARE
        self.is_done = threading.Event()
        self.sample: CollectorSample | None = None
        self._collector = collector
        self._clock = clock
        threading.Thread(
            target=self._collect,
            args=(budget_s * _COLLECTOR_SHARE,),
            name=f"collect {collector.name}",
            daemon=True,
        ).start()

    def _collect(self, timeout_s: float) -> None:
        raw: AnyRaw | None = None
        code, reason = str(Code.OK), ""
        try:
            raw = self._collector.collect(timeout_s)
        except CollectError as error:
            code, reason = error.code, error.reason
        except Exception as error:
            logger.exception("collector_crashed collector=%s", self._collector.name)
            code, reason = Code.CRASHED, f"{error!r}"
        duration_s = self._clock() - self.started_s
        name, target = self._collector.name, self._collector.target
        self.sample = CollectorSample(name, target, duration_s, code, raw, reason)
        self.is_done.set()


class _Slot:
    """The collector and its present run; it has one run at a time."""

    def __init__(self, collector: Collector, clock: Clock) -> None:
        self.collector = collector
        self._clock = clock
        self._lock = threading.Lock()
        self._run: _Collection | None = None

    def begin(self, budget_s: float) -> _Collection:
        """Returns a new run, or the present one, so that two scrapes ask the source once."""
        with self._lock:
            if self._run is None or self._run.is_done.is_set():
                self._run = _Collection(self.collector, budget_s, self._clock)
            return self._run

    def finish(self, run: _Collection, deadline_s: float) -> CollectorSample:
        """Returns the run's sample; if there is none by the earlier deadline, one that says so."""
        run.is_done.wait(max(0.0, min(deadline_s, run.deadline_s) - self._clock()))
        if run.sample is not None:
            return run.sample
        return CollectorSample(
            self.collector.name,
            self.collector.target,
            self._clock() - run.started_s,
            Code.DEADLINE_EXCEEDED,
            reason="it does not return",
        )


class Exporter:
    """The collectors of a host, the preferred ones first.

    `budget_s` is the longest that a scrape may take. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        collectors: Iterable[Collector],
        facts: HostDescription,
        version: str,
        budget_s: float = 2.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.facts = facts
        self._slots = [_Slot(collector, clock) for collector in collectors]
        self._version = version
        self._budget_s = budget_s
        self._clock = clock
        self._lock = threading.Lock()
        self._devices = DeviceMap()
        self._errors: Counter[tuple[str, str, str]] = Counter()
        self._codes: dict[tuple[str, str], tuple[str, ...]] = {}

    def collect(self, budget_s: float | None = None) -> tuple[CollectorSample, ...]:
        """Returns every collector's sample within the lesser of our budget and the asker's."""
        budget_s = self._budget_s if budget_s is None else min(budget_s, self._budget_s)
        deadline_s = self._clock() + budget_s * _PATIENCE_SHARE
        runs = [(slot, slot.begin(budget_s)) for slot in self._slots]
        return tuple(slot.finish(run, deadline_s) for slot, run in runs)

    def scrape(self, budget_s: float | None = None) -> tuple[Series, ...]:
        """Returns the present page, with the exporter's own series."""
        samples = self.collect(budget_s)
        with self._lock:
            page = compose_page(samples, self.facts, self._devices)
            self._devices = page.devices
            for outcome in page.outcomes:
                for code, count in outcome.problems.items():
                    self._errors[outcome.collector, outcome.target, code] += count
            self._log_changes(page.outcomes, samples)
            return (*page.series, *self._own_series(page.outcomes))

    def _own_series(self, outcomes: Sequence[CollectorOutcome]) -> tuple[Series, ...]:
        collected = SeriesCollector(self.facts.identity.labels)
        collected.add_own("tpu_exporter_build_info", 1, version=self._version)
        for outcome in outcomes:
            scope = {"collector": outcome.collector, "target": outcome.target}
            collected.add_own("tpu_scrape_collector_success", float(outcome.is_success), **scope)
            collected.add_own("tpu_scrape_collector_duration_seconds", outcome.duration_s, **scope)
        for (collector, target, code), count in self._errors.items():
            scope = {"collector": collector, "target": target, "code": code}
            collected.add_own("tpu_scrape_collector_errors_total", count, **scope)
        return collected.series

    def _log_changes(
        self, outcomes: Sequence[CollectorOutcome], samples: Sequence[CollectorSample]
    ) -> None:
        for outcome, sample in zip(outcomes, samples, strict=True):
            scope = (outcome.collector, outcome.target)
            codes = tuple(sorted(outcome.problems))
            if self._codes.get(scope, ()) != codes:
                logger.info(
                    "collector_changed collector=%s target=%s codes=%s reason=%r",
                    *scope,
                    ",".join(codes) or Code.OK,
                    sample.reason,
                )
            self._codes[scope] = codes
