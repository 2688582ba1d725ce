"""The directory's book of slices: the records of all incarnations, and what is held against them.

Owns the last survey and the faults. Does not own the observation of hosts and pods, nor where
faults are stored. Pure: callers pass `now_s`, wall-clock seconds since the epoch.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from serving.domain.inventory import ObservedHost, Slice, SliceRequest
from serving.domain.slice_lifecycle import EndCause, SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import (
    ABSOLVE_AFTER_S,
    FailedHosts,
    FaultCause,
    SliceFaults,
)
from serving.domain.supply.found import FoundSlice, SliceMatches, find_slices, match_slices
from serving.domain.supply.orders import OrderKind, StandingOrders
from serving.domain.supply.pods import GroupPods
from serving.domain.supply.records import SupplyRecord, SupplyState
from serving.domain.supply.survey import failed_hosts, survey

logger = logging.getLogger(__name__)

# Ends that are held against the slice.
_FAILURES = frozenset({EndCause.BOOT_FAILED, EndCause.UNHEALTHY})
# What keeps replicas off a slice that Ray finds free.
_BARRED = frozenset({SupplyState.QUARANTINED, SupplyState.CONDEMNED})


class SupplyBook:
    """The slices as they are known now."""

    def __init__(self, faults: SliceFaults) -> None:
        self.faults = faults
        self.records: tuple[SupplyRecord, ...] = ()
        self.found: list[FoundSlice] = []
        self.orders = StandingOrders()
        self._leave_reasons: dict[str, str] = {}

    def look(
        self,
        hosts: Iterable[ObservedHost],
        groups: Iterable[GroupPods],
        lives: Sequence[SliceRecord],
        now_s: float,
    ) -> None:
        """Makes all records anew; `lives` are the replicas' own records."""
        before = {record.incarnation: record for record in self.records}
        self._condemn_what_was_left(lives, now_s)
        self.found = find_slices(hosts, groups)
        self._obey(before, now_s)
        self.records = survey(self.found, lives, self.faults, before, now_s)
        asked = {
            each.incarnation: each.pods.leave_reason
            for each in self.found
            if each.pods is not None and each.pods.leave_reason is not None
        }
        self._leave_reasons = {
            record.holder.life_id: asked[record.incarnation]
            for record in self.records
            if record.holder is not None and record.incarnation in asked
        }
        self._leave_reasons |= {
            record.holder.life_id: self.orders.of_slices[record.incarnation].words
            for record in self.records
            if record.holder is not None and self._has_to_go(record)
        }
        self._condemn_what_did_not_boot(before, now_s)
        self._absolve(lives, now_s)
        self.faults.forget(now_s)

    def leave_reasons(self) -> Mapping[str, str]:
        """Returns why replicas are to leave slices that they have, by replica."""
        return self._leave_reasons

    def match(self, request: SliceRequest, now_s: float) -> SliceMatches:
        """Returns the slices of the requested kind, as of the last look."""
        barred = {
            record.incarnation: _why_barred(record, now_s)
            for record in self.records
            if record.state in _BARRED
        }
        return match_slices(self.found, request, barred)

    def leave_reason(self, life_id: str) -> str | None:
        """Returns why a replica is to leave a slice that it has; `None` if it may stay."""
        return self._leave_reasons.get(life_id)

    def failed_at_s(self) -> dict[frozenset[str], float]:
        """Returns when slices failed last, by their nodes in Ray."""
        return {
            record.node_ids: record.failed_at_s
            for record in self.records
            if record.failed_at_s is not None
        }

    def note_failure(
        self,
        whole: Slice,
        suspects: frozenset[str],
        cause: FaultCause,
        reason: str,
        now_s: float,
        *,
        life_id: str = "",
    ) -> None:
        """Holds a failure against a slice; `suspects` are the nodes to blame in Ray."""
        self._note(whole.node_ids, whole.name, suspects, cause, reason, now_s, life_id=life_id)

    def note_leaving(self, whole: Slice, ends_at_s: float, reason: str, now_s: float) -> None:
        """Condemns a slice that is taken away: Ray finds it whole and free until it has ended."""
        hosts = self._hosts_of(whole.node_ids, whole.name, frozenset())
        self.faults.condemn(hosts, reason, now_s, ends_at_s)
        logger.info("slice_condemned slice=%s reason=%r", whole.name, reason)

    def note_end(self, ended: SliceRecord, now_s: float) -> None:
        """Holds against a slice that an engine did not start on it, or died on it."""
        if ended.life.cause not in _FAILURES or not ended.hosts:
            return
        self._note(
            frozenset(host.node_id for host in ended.hosts),
            ended.life.slice_name or ended.replica_id,
            frozenset(),
            FaultCause.ENGINE,
            ended.life.reason,
            now_s,
            model=ended.model,
            life_id=life_key(ended),
        )

    def _note(
        self,
        node_ids: frozenset[str],
        name: str,
        suspects: frozenset[str],
        cause: FaultCause,
        reason: str,
        now_s: float,
        *,
        model: str = "",
        life_id: str = "",
    ) -> None:
        def works_elsewhere(model: str) -> bool:
            return any(
                record.holder is not None
                and record.holder.model == model
                and record.holder.state == SliceState.READY
                and record.node_ids != node_ids
                for record in self.records
            )

        fault = self.faults.note_failure(
            self._hosts_of(node_ids, name, suspects),
            cause,
            reason,
            now_s,
            model=model,
            life_id=life_id,
            works_elsewhere=works_elsewhere,
        )
        logger.warning(
            "slice_failed slice=%s cause=%s times=%d kept_off_s=%.0f condemned=%s reason=%r",
            name, cause, fault.count, fault.until_s - now_s, fault.is_condemned, fault.reason,
        )  # fmt: skip

    def _hosts_of(
        self, node_ids: frozenset[str], name: str, suspects: frozenset[str]
    ) -> FailedHosts:
        for record in self.records:
            if record.node_ids and record.node_ids >= node_ids:
                return failed_hosts(record, suspects)
        # The hosts have gone already, or the directory has just started.
        incarnation = f"node-{min(node_ids)}"
        return FailedHosts(incarnation, name, node_ids, suspects=suspects & node_ids)

    def _obey(self, before: Mapping[str, SupplyRecord], now_s: float) -> None:
        """Does what operators have ordered of slices that are here."""
        for incarnation, order in self.orders.of_slices.items():
            record = before.get(incarnation)
            if record is not None and self.faults.obey(order, failed_hosts(record), now_s):
                logger.warning("slice_order_obeyed slice=%s order=%r", record.name, order.words)

    def _has_to_go(self, record: SupplyRecord) -> bool:
        """Returns whether whoever has a slice is to leave it by an order that it has not obeyed."""
        order = self.orders.of_slices.get(record.incarnation)
        return order is not None and order.kind != OrderKind.RELEASE

    def _condemn_what_was_left(self, lives: Iterable[SliceRecord], now_s: float) -> None:
        """Condemns what is taken away and was left without a word, as by a process that died."""
        held = {life.replica_id for life in lives if life.hosts}
        for record in self.records:
            holder = record.holder
            if holder is None or not holder.is_leaving or holder.life_id in held:
                continue
            hosts = failed_hosts(record)
            fault = self.faults.of(hosts.incarnation, hosts.node_ids, hosts.machines)
            if fault is None or fault.at_s < record.since_s:
                reason = "it is taken away, and its replica has left it"
                self.faults.condemn(hosts, reason, now_s, holder.drain_deadline_s)

    def _condemn_what_did_not_boot(self, before: dict[str, SupplyRecord], now_s: float) -> None:
        for record in self.records:
            was = before.get(record.incarnation)
            if (
                record.state == SupplyState.CONDEMNED
                and was is not None
                and was.state == SupplyState.BOOTING
                and was.until_s is not None
                and now_s >= was.until_s
            ):
                hosts = failed_hosts(record)
                self.faults.note_failure(hosts, FaultCause.BOOT, record.reason, now_s)
                self.faults.condemn(hosts, record.reason, now_s)
                logger.warning("slice_condemned slice=%s reason=%r", record.name, record.reason)

    def _absolve(self, lives: Iterable[SliceRecord], now_s: float) -> None:
        """Forgets what was held against slices on which an engine has served for long."""
        if not self.faults.all():
            return
        for life in lives:
            if life.state == SliceState.READY and now_s - life.life.entered_at_s >= ABSOLVE_AFTER_S:
                self.faults.absolve(frozenset(host.node_id for host in life.hosts))


def _why_barred(record: SupplyRecord, now_s: float) -> str:
    if record.until_s is not None:
        return f"in quarantine for another {record.until_s - now_s:.0f} s: {record.reason}"
    return f"condemned: {record.reason}"


def life_key(record: SliceRecord) -> str:
    """Returns the id of one life of a replica; one replica may fail on several slices."""
    return f"{record.life_id} {record.life.transitions[0].at_s:.3f}"
