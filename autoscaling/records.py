"""Defines the inputs and outputs of a scaling decision: the seam of policy, adapter, simulator.

Owns the nouns. Decides nothing. Pure data: times are seconds on one clock of the caller's choice
(wall-clock time in production, simulated time in the simulator), rates are per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from serving.domain.capacity.batch_due import NOTHING_DUE, BatchDue
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.slice_lifecycle import SliceState


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The measured load of one model over the last window before `at_s`.

    It is that of interactive and standard work; what is said of batch work is in fields of its own.
    `requests_per_s` counts arrivals, answered or not. The token means are per request, of those
    that arrived and of those that finished; `input_tokens_mean` without what a prefix cache saves.
    `num_waiting` have no engine yet, the oldest of them since `oldest_wait_s`; `num_in_flight` are
    on engines. `full_ratio` is the share of the window, 0 to 1, in which work waited and no engine
    took more. `engines` are those whose work is known.

    `batch_due` is batch work by when it has to be done, most of it not at any gateway yet.

    `num_ttft_met` and `num_ttft_missed` are first tokens of the window that kept to the objective
    of their prompt and that did not; `num_tpot_met` and `num_tpot_missed` are answers that ended.

    `late` says, in words, which gateways have not told theirs in time: what others told is then the
    least that there is. `left_out` says which have been silent for so long that they do not count.
    """

    at_s: float
    requests_per_s: float
    input_tokens_mean: float
    output_tokens_mean: float
    num_waiting: int = 0
    oldest_wait_s: float = 0.0
    num_in_flight: int = 0
    batch_requests_per_s: float = 0.0
    num_batch_waiting: int = 0
    num_batch_in_flight: int = 0
    batch_due: BatchDue = NOTHING_DUE
    full_ratio: float = 0.0
    num_ttft_met: int = 0
    num_ttft_missed: int = 0
    num_tpot_met: int = 0
    num_tpot_missed: int = 0
    engines: tuple[EngineRate, ...] = ()
    late: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def has_work(self) -> bool:
        """True if there is any work at all, batch work included."""
        return (
            self.requests_per_s > 0
            or self.batch_requests_per_s > 0
            or self.num_waiting + self.num_in_flight > 0
            or self.num_batch_waiting + self.num_batch_in_flight > 0
        )


@dataclass(frozen=True, slots=True)
class SliceView:
    """The slice that a replica has or waits for; `slice_id` is the replica's life.

    `since_s` is when it entered its state, `requested_at_s` when it was requested.
    `num_in_flight` is how many requests are on it, lately; 0 where nobody tells of any.
    `expires_at_s` is when its maximum run duration ends, `None` without one. Of a replica that
    waits, `coming_since_s` is since when the machines of its slice are there; `None` while they
    are not. `is_adopted` says that its engine ran before: nobody delivered it.
    """

    slice_id: str
    compute_class: str
    state: SliceState
    since_s: float
    requested_at_s: float
    num_in_flight: int = 0
    expires_at_s: float | None = None
    coming_since_s: float | None = None
    is_adopted: bool = False


@dataclass(frozen=True, slots=True)
class SliceLoss:
    """The loss of a slice since the decision before; `cause` is a value of `EndCause`.

    It was taken away, or its engine failed on it, or its replica fell silent.
    """

    slice_id: str
    compute_class: str
    at_s: float
    cause: str


@dataclass(frozen=True)  # without slots, for what it keeps
class Fleet:
    """The slices of one model, and how many each compute class was last asked for.

    `late` says, in words, why the slices are not known now; empty while they are. They are then
    those that were known last.
    """

    slices: tuple[SliceView, ...]
    targets: Mapping[str, int]
    losses: tuple[SliceLoss, ...] = ()
    late: str = ""

    def of_class(self, name: str) -> tuple[SliceView, ...]:
        """Returns its slices from one compute class."""
        return self._by_class.get(name, ())

    @cached_property
    def _by_class(self) -> Mapping[str, tuple[SliceView, ...]]:
        found: dict[str, list[SliceView]] = {}
        for each in self.slices:
            found.setdefault(each.compute_class, []).append(each)
        return {name: tuple(slices) for name, slices in found.items()}


@dataclass(frozen=True, slots=True)
class Observation:
    """The inputs of a policy at `now_s`. `load` is `None` when it is missing; it may be stale."""

    now_s: float
    load: ModelLoad | None
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Decision:
    """The change of one class: `delta` slices more (or fewer, negative), and why."""

    compute_class: str
    delta: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of slices that each compute class is to have.

    `targets` names every class. `drain_order` are slices in the order in which to give them up
    where a target falls below what there is. `refusals` name what was wanted and not planned.
    `demand_slices` is the demand before asking what exists, `None` where a policy has no such
    notion. `next_slice_at_s` is when one more slice is expected to be ready, `None` when none is on
    its way. `arithmetic` shows the sums behind the numbers, for a reader.
    """

    at_s: float
    targets: Mapping[str, int]
    decisions: tuple[Decision, ...] = ()
    refusals: tuple[Decision, ...] = ()
    drain_order: tuple[str, ...] = ()
    demand_slices: float | None = None
    next_slice_at_s: float | None = None
    arithmetic: str = ""
    alerts: tuple[str, ...] = field(default_factory=tuple)


class Policy(Protocol):
    """Decides again and again; remembers what it needs, reads no clock and draws no chance."""

    @property
    def name(self) -> str:
        """The name of the policy in reports."""
        ...

    def decide(self, observation: Observation) -> Plan:
        """The plan for `observation`; times never run backwards from one call to the next."""
        ...
