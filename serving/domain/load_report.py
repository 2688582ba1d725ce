"""The report of gateways and the directory to Serve's controller: numbers under names, and back.

Serve carries `{name: number}` from a replica to an autoscaling policy and nothing else. So what is
not a number stands in the name, between bars. No model, compute class or replica id contains a bar:

    load|<model>|<what>                                                         value
    directory|started                                                           when it started
    slice|<model>|<compute class>|<replica>|<state>|<requested>|<held since>|<ends>|<coming since>
         |adopted, or nothing|<engines, with commas between>                    since when so
    lost|<model>|<compute class>|<replica>|<cause>                              when
    order|freeze                                                                since when
    order|pin|<compute class>|<model, or nothing>                               how many, or -1

Times are wall-clock seconds. What a newer report does not repeat is over. Owns the encoding and
both of its ends. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.domain.slice_lifecycle import HELD_STATES, EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.coming import coming_since
from serving.domain.supply.orders import NO_ORDERS, Pin, StandingOrders
from serving.domain.supply.survey import waiting_replicas

_BAR = "|"
_STARTED = f"directory{_BAR}started"
_FREEZE = f"order{_BAR}freeze"
_ADOPTED = "adopted"
# The value of a pin without a number.
_AS_MANY = -1.0
# Ends that a scaling policy did not ask for. An expiry was known before, a release requested.
_LOSSES = frozenset(
    {EndCause.PREEMPTED, EndCause.BOOT_FAILED, EndCause.UNHEALTHY, EndCause.REPLICA_LOST}
)
# Long enough that no policy misses one, short enough to keep a report small after a bad night.
_LOSS_REPORTED_FOR_S = 300.0


class StatsError(ValueError):
    """The stats are not in this form, because another version reports. Hold the last plan."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of one model at one gateway. Rates and means are those of the last half minute.

    It is that of interactive and standard work; what is said of batch work is in fields of its own.
    `input_tokens_mean` excludes the tokens that engines found in their prefix caches. A mean is the
    last known one where the window holds no sample, and `None` until there has been one.
    `full_ratio` is the share of the window, 0 to 1, in which such work waited and no engine took
    another request. The counts of those that met or missed an objective are of first tokens (TTFT)
    and of sequences that ended (TPOT) in the window.
    """

    requests_per_s: float
    num_waiting: int
    oldest_wait_s: float
    num_in_flight: int
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    batch_requests_per_s: float = 0.0
    num_batch_waiting: int = 0
    num_batch_in_flight: int = 0
    full_ratio: float = 0.0
    num_ttft_met: int = 0
    num_ttft_missed: int = 0
    num_tpot_met: int = 0
    num_tpot_missed: int = 0


# Sequences of the window that kept to an objective of the model, and those that did not.
JUDGED = ("num_ttft_met", "num_ttft_missed", "num_tpot_met", "num_tpot_missed")


# The share of requests that misses an objective, of at least so many: five times what an objective
# of 99 % allows.
_MISSED_SHARE, _LEAST_JUDGED = 0.05, 20


def are_too_many(num_missed: int, num_met: int) -> bool:
    """Returns whether so many misses of an objective say that engines have too much to do."""
    judged = num_met + num_missed
    return judged >= _LEAST_JUDGED and num_missed > _MISSED_SHARE * judged


@dataclass(frozen=True, slots=True)
class JudgedRequests:
    """The counts of a `LoadSample` that kept to objectives, and that did not, by themselves."""

    num_ttft_met: int
    num_ttft_missed: int
    num_tpot_met: int
    num_tpot_missed: int


def misses_objectives(judged: LoadSample | JudgedRequests) -> bool:
    """Returns whether interactive and standard work missed its objectives too often lately.

    Never, where a model has none.
    """
    return are_too_many(judged.num_ttft_missed, judged.num_ttft_met) or are_too_many(
        judged.num_tpot_missed, judged.num_tpot_met
    )


@dataclass(frozen=True, slots=True)
class ListedSlice:
    """The entry of one slice replica in the directory.

    `held_since_s` is `None` while it waits. `ends_at_s` is when the maximum run of its slice ends,
    as the hosts tell, or `None`. Of a replica that waits, `coming_since_s` is since when its slice
    is on its way (`supply.coming`); `None` while none is. `is_adopted` says that its engine ran
    before, so that what it took to come was no delivery. `engine_ids` are those on it, once they
    have started.
    """

    model: str
    compute_class: str
    replica_id: str
    state: SliceState
    since_s: float
    requested_at_s: float
    held_since_s: float | None
    ends_at_s: float | None = None
    coming_since_s: float | None = None
    is_adopted: bool = False
    engine_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedLoss:
    """The entry of one life that was cut short, as the directory lists it."""

    model: str
    compute_class: str
    replica_id: str
    cause: EndCause
    at_s: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The report of the directory: the time since which it listens, and its slices and losses.

    `is_frozen` and `pins` are what operators have ordered: a pin is of a compute class, for one
    model or all (`None`), at a number of replicas or at as many as there are (`None`).
    """

    started_at_s: float
    slices: tuple[ListedSlice, ...]
    losses: tuple[ListedLoss, ...]
    is_frozen: bool = False
    pins: tuple[Pin, ...] = ()


def load_stats(model: str, sample: LoadSample) -> dict[str, float]:
    """Returns one model's load at a gateway, without the values that are not known."""
    values = {
        "requests_per_s": sample.requests_per_s,
        "num_waiting": sample.num_waiting,
        "oldest_wait_s": sample.oldest_wait_s,
        "num_in_flight": sample.num_in_flight,
        "input_tokens_mean": sample.input_tokens_mean,
        "output_tokens_mean": sample.output_tokens_mean,
        "batch_requests_per_s": sample.batch_requests_per_s,
        "num_batch_waiting": sample.num_batch_waiting,
        "num_batch_in_flight": sample.num_batch_in_flight,
        "full_ratio": sample.full_ratio,
    } | {what: getattr(sample, what) for what in JUDGED}
    return {
        _BAR.join(("load", model, what)): float(value)
        for what, value in values.items()
        if value is not None
    }


def load_of_stats(model: str, stats: Mapping[str, float]) -> LoadSample | None:
    """Returns the model's load; `None` where the stats do not have it.

    A gateway of an earlier build says nothing of batch work: it is in the other numbers there.
    """

    def value(what: str) -> float | None:
        return stats.get(_BAR.join(("load", model, what)))

    rate, waiting, oldest_s, in_flight = (
        value(what) for what in ("requests_per_s", "num_waiting", "oldest_wait_s", "num_in_flight")
    )
    if rate is None or waiting is None or oldest_s is None or in_flight is None:
        return None
    return LoadSample(
        requests_per_s=rate,
        num_waiting=round(waiting),
        oldest_wait_s=oldest_s,
        num_in_flight=round(in_flight),
        input_tokens_mean=value("input_tokens_mean"),
        output_tokens_mean=value("output_tokens_mean"),
        batch_requests_per_s=value("batch_requests_per_s") or 0.0,
        num_batch_waiting=round(value("num_batch_waiting") or 0.0),
        num_batch_in_flight=round(value("num_batch_in_flight") or 0.0),
        full_ratio=value("full_ratio") or 0.0,
        **{what: round(value(what) or 0.0) for what in JUDGED},
    )


def directory_stats(
    snapshot: Snapshot, started_at_s: float, now_s: float, orders: StandingOrders = NO_ORDERS
) -> dict[str, float]:
    """Returns all slices that stand for an engine, the losses of five minutes, and the orders."""
    stats = {_STARTED: started_at_s}
    coming_s = coming_since(waiting_replicas(snapshot.records), snapshot.supply)
    ends_s = _ends_s(snapshot)
    # A policy counts what engines own: a multislice is one.
    stats |= {
        _slice_name(
            record, ends_s.get(record.life_id), coming_s.get(record.life_id)
        ): record.life.entered_at_s
        for record in snapshot.records
        if record.has_engine
    }
    stats |= {
        _BAR.join(
            ("lost", record.model, record.compute_class, record.life_id, str(record.life.cause))
        ): record.life.entered_at_s
        for record in snapshot.ended
        if record.life.cause in _LOSSES and now_s - record.life.entered_at_s <= _LOSS_REPORTED_FOR_S
    }
    if orders.freeze is not None:
        stats[_FREEZE] = orders.freeze.at_s
    for pin in orders.pins:
        name = _BAR.join(("order", "pin", pin.about, pin.model or ""))
        stats[name] = _AS_MANY if pin.num_replicas is None else float(pin.num_replicas)
    return stats


def fleet_report_of_stats(stats: Mapping[str, float]) -> FleetReport | None:
    """Returns the report of the directory; `None` where the stats hold none.

    Raises:
        StatsError: a name is not in the form of this version.
    """
    if _STARTED not in stats:
        return None
    slices: list[ListedSlice] = []
    losses: list[ListedLoss] = []
    pins: list[Pin] = []
    for name, value in stats.items():
        kind, *fields = name.split(_BAR)
        try:
            if kind == "slice":
                slices.append(_slice_of(fields, value))
            elif kind == "lost":
                model, compute_class, replica_id, cause = fields
                loss = ListedLoss(model, compute_class, replica_id, EndCause(cause), value)
                losses.append(loss)
            elif kind == "order" and name != _FREEZE:
                _, compute_class, pinned = fields
                number = None if value == _AS_MANY else round(value)
                pins.append((compute_class, pinned or None, number))
        except ValueError as error:
            raise StatsError(f"the stat {name!r} is not in this version's form: {error}") from error
    is_frozen = _FREEZE in stats
    return FleetReport(stats[_STARTED], tuple(slices), tuple(losses), is_frozen, tuple(pins))


def _ends_s(snapshot: Snapshot) -> dict[str, float]:
    """Returns when the first slice of each life ends, of those whose end is known."""
    lives = {record.replica_id: record.life_id for record in snapshot.records}
    ends_s: dict[str, float] = {}
    for record in snapshot.supply:
        if record.ends_at_s is not None and record.holder is not None:
            life_id = lives.get(record.holder.life_id)
            if life_id is not None:
                ends_s[life_id] = min(record.ends_at_s, ends_s.get(life_id, record.ends_at_s))
    return ends_s


def _slice_name(record: SliceRecord, ends_at_s: float | None, coming_since_s: float | None) -> str:
    return _BAR.join(
        (
            "slice",
            record.model,
            record.compute_class,
            record.replica_id,
            str(record.state),
            _optional(record.life.transitions[0].at_s),
            _optional(_held_since_s(record.life)),
            _optional(ends_at_s),
            _optional(coming_since_s),
            _ADOPTED if record.is_adopted else "",
            ",".join(record.engine_ids),
        )
    )


def _optional(time_s: float | None) -> str:
    return "" if time_s is None else f"{time_s:.3f}"


def _slice_of(fields: list[str], since_s: float) -> ListedSlice:
    model, compute_class, replica_id, state, requested_at_s, *optional, adopted, engines = fields
    held_since_s, ends_at_s, coming_since_s = (float(each) if each else None for each in optional)
    return ListedSlice(
        model,
        compute_class,
        replica_id,
        SliceState(state),
        since_s,
        float(requested_at_s),
        held_since_s,
        ends_at_s,
        coming_since_s,
        adopted == _ADOPTED,
        tuple(engines.split(",")) if engines else (),
    )


def _held_since_s(life: SliceLifecycle) -> float | None:
    return next(
        (transition.at_s for transition in life.transitions if transition.state in HELD_STATES),
        None,
    )
