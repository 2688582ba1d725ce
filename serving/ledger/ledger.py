"""Adds up every chip-second of the fleet, each once, in exactly one state.

A slice that is divided among engines is counted by their parts: one may serve while another idles.

Owns the sums and the instant up to which each life has been counted. Does not own the lives (the
directory does), nor prices (`gateway.metrics`). It has no clock: callers pass wall-clock
milliseconds.

The identity of a life is its replica and its start. A directory that restarts shows fewer lives for
a moment and the same ones later: what was counted is not counted again, and the gap is filled in
from the life's own transitions. The sums begin at zero where the ledger does, as those of any
counter do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.records import SupplyRecord
from serving.domain.topology import slice_shape
from serving.ledger.states import LedgerState, spans, state_of, state_of_supply, to_ms

# Lives no longer listed that are remembered, so that one which comes back is not counted twice:
# many times what the directory keeps of them, in a few megabytes.
MAX_UNLISTED = 10_000
# Batches whose cost is remembered: many times what runs at once.
MAX_BATCHES = 1000
# The tenant of serving that is attributed to nobody.
UNATTRIBUTED = "unattributed"
# What a tenant has besides its batches.
_NO_BATCH = ""
# The model and the class of slices that nobody has, and whose hosts name no class.
NO_MODEL = NO_CLASS = ""


@dataclass(frozen=True, slots=True)
class LedgerSum:
    """The sum of one state, of a compute class (`slice_name` is `None`) or of one slice.

    `amount` is in chip-milliseconds, or in chips for the present state.
    """

    model: str
    compute_class: str
    state: LedgerState
    amount: int
    slice_name: str | None = None


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """The part of one tenant: chip-milliseconds of serving, and output tokens."""

    model: str
    compute_class: str
    tenant: str
    chip_ms: int
    tokens: int


# By tenant, something of each of its batches.
OfBatches = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class BatchUse:
    """The part of batches in the use of an engine; the fields are those of `EngineUse`.

    A batch whose tokens are missing has had none for a while: it begins at zero again.
    """

    tokens: OfBatches = field(default_factory=dict)
    sequences: OfBatches = field(default_factory=dict)
    in_flight: OfBatches = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The tenants that use an engine.

    `tokens` are output tokens since the engine's start, `sequences` are those it has now, both as
    the engine reported them; `None` until it has. `in_flight` are the sequences that this gateway
    has on it. Of all of them, `batches` are those of batches.
    """

    tokens: Mapping[str, int] | None = None
    sequences: Mapping[str, int] | None = None
    in_flight: Mapping[str, int] = field(default_factory=dict)
    batches: BatchUse = BatchUse()


NO_USE = EngineUse()


@dataclass(slots=True)
class _Account:
    """The counts of one engine's part of a life so far; a divided slice has several parts.

    `ready_as` is the state that its READY time counts as, `number` the place of the engine.
    `until_ms` is the end of the counted time. `tokens` are those of its engine that have been
    counted, `None` before it reported any. `weights` are the shares of serving, empty where nothing
    is known, and `batch_weights` those of batches in them.
    """

    record: SliceRecord
    num_chips: int
    until_ms: int
    number: int = 0
    ready_as: LedgerState = LedgerState.IDLE
    chip_ms: Counter[LedgerState] = field(default_factory=Counter)
    tokens: Mapping[str, int] | None = None
    batch_tokens: OfBatches = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    batch_weights: OfBatches = field(default_factory=dict)

    @property
    def engine_id(self) -> str:
        """The id of its engine; empty before that has started."""
        if self.number == 0:
            return self.record.engine_id or ""
        engine_ids = self.record.engine_ids
        return engine_ids[self.number] if self.number < len(engine_ids) else ""


_LifeKey = tuple[str, float]


class Ledger:
    """The sums of all observed lives, from `started_at_ms` on."""

    def __init__(self, started_at_ms: int) -> None:
        self.started_at_ms = started_at_ms
        self._snapshot: Snapshot | None = None
        self._listed: dict[_LifeKey, list[_Account]] = {}
        # The latest to leave the list stands last.
        self._unlisted: dict[_LifeKey, list[_Account]] = {}
        self._chip_ms: Counter[tuple[str, str, LedgerState]] = Counter()
        self._tenant_ms: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        # By batch and class; the batch that was charged last stands last.
        self._batch_ms: dict[str, Counter[str]] = {}
        self._supply: tuple[SupplyRecord, ...] = ()
        # Up to when slices that nobody has were counted.
        self._supply_until_ms = started_at_ms

    def observe(
        self,
        snapshot: Snapshot,
        is_busy: Mapping[str, bool],
        now_ms: int,
        uses: Mapping[str, EngineUse] = MappingProxyType({}),
    ) -> None:
        """Counts the time since the last call.

        `is_busy` has every engine that can be reached, by id; its present report stands for the
        time since the last call. `uses` has their tenants, by the same id. A snapshot is read anew
        only if it is another object. Slices that nobody has count from when the directory saw them
        in their present state.
        """
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._take(snapshot.records, snapshot.ended)
            self._supply = snapshot.supply
        self._advance_supply(now_ms)
        for account in self._accounts():
            record = account.record
            if record.state is SliceState.READY:
                account.ready_as = _ready_as(account, is_busy)
            use = uses.get(account.engine_id, NO_USE)
            # A multislice has one engine: its tokens count once, its time on each of its slices.
            self._take_use(account, use if record.has_engine else replace(use, tokens=None))
            self._advance(account, now_ms)

    def totals(self) -> list[LedgerSum]:
        """Returns the chip-milliseconds by model, compute class and state."""
        return [LedgerSum(*key, amount) for key, amount in sorted(self._chip_ms.items())]

    def tenants(self) -> list[TenantEntry]:
        """Returns serving and tokens by model, class and tenant; serving sums to all of it."""
        keys = sorted(self._tenant_ms.keys() | self._tokens.keys())
        return [TenantEntry(*key, self._tenant_ms[key], self._tokens[key]) for key in keys]

    def batch(self, batch_id: str) -> Mapping[str, int]:
        """Returns the chip-milliseconds of one batch by compute class: its part of its tenant's."""
        return dict(self._batch_ms.get(batch_id, {}))

    def slices(self) -> list[LedgerSum]:
        """Returns the chip-milliseconds of the lives that are listed and have a slice."""
        chip_ms: Counter[tuple[str, str, LedgerState, str]] = Counter()
        for account in self._accounts():
            record = account.record
            if (name := record.life.slice_name) is not None:
                for state, amount in account.chip_ms.items():
                    chip_ms[record.model, record.compute_class, state, name] += amount
        return [
            LedgerSum(model, compute_class, state, amount, name)
            for (model, compute_class, state, name), amount in sorted(chip_ms.items())
        ]

    def chips(self) -> list[LedgerSum]:
        """Returns the chips in each state at the last observation."""
        chips: Counter[tuple[str, str, LedgerState]] = Counter()
        for account in self._accounts():
            record = account.record
            state = state_of(record.life, account.ready_as)
            if state is not None:
                chips[record.model, record.compute_class, state] += account.num_chips
        for supply in self._supply:
            if (state := state_of_supply(supply)) is not None:
                chips[NO_MODEL, supply.compute_class or NO_CLASS, state] += supply.num_chips
        return [LedgerSum(*key, amount) for key, amount in sorted(chips.items())]

    def _advance_supply(self, now_ms: int) -> None:
        for record in self._supply:
            state = state_of_supply(record)
            length_ms = now_ms - max(self._supply_until_ms, to_ms(record.since_s))
            if state is not None and length_ms > 0:
                key = NO_MODEL, record.compute_class or NO_CLASS, state
                self._chip_ms[key] += length_ms * record.num_chips
        self._supply_until_ms = max(self._supply_until_ms, now_ms)

    def _take(self, records: Iterable[SliceRecord], ended: Iterable[SliceRecord]) -> None:
        before, self._listed = self._listed, {}
        self._unlisted |= before
        for record in ended:
            if accounts := self._accounts_of(record):
                for account in accounts:
                    self._advance(account, to_ms(record.life.entered_at_s))
                self._unlisted[_key_of(record)] = accounts
        for record in records:
            if accounts := self._accounts_of(record):
                self._listed[_key_of(record)] = accounts
        while len(self._unlisted) > MAX_UNLISTED:
            del self._unlisted[next(iter(self._unlisted))]

    def _accounts(self) -> Iterator[_Account]:
        """Yields the accounts of all lives that are listed."""
        return chain.from_iterable(self._listed.values())

    def _accounts_of(self, record: SliceRecord) -> list[_Account]:
        """Returns the life's accounts, taken out of the unlisted; none without chips (`local`)."""
        if record.generation is None or record.topology is None:
            return []
        accounts = self._unlisted.pop(_key_of(record), None)
        if accounts is None:
            num_chips = slice_shape(record.generation, record.topology).num_chips
            began_ms = max(to_ms(record.life.transitions[0].at_s), self.started_at_ms)
            num_engines = record.num_engines
            return [
                _Account(record, num_chips // num_engines, began_ms, number)
                for number in range(num_engines)
            ]
        for account in accounts:
            account.record = record
        return accounts

    def _take_use(self, account: _Account, use: EngineUse) -> None:
        given: dict[str, int] = {}
        of_batches: OfBatches = {}
        batches = use.batches
        if use.tokens is not None:
            # Tokens from before this ledger began are not counted here.
            is_older = to_ms(account.record.life.entered_at_s) < self.started_at_ms
            if account.tokens is None and is_older:
                account.tokens, account.batch_tokens = use.tokens, batches.tokens
            given = _increase(use.tokens, account.tokens or {})
            of_batches = {
                tenant: _increase(tokens, account.batch_tokens.get(tenant, {}))
                for tenant, tokens in batches.tokens.items()
            }
            account.tokens, account.batch_tokens = dict(use.tokens), batches.tokens
            record = account.record
            for tenant, count in given.items():
                self._tokens[record.model, record.compute_class, tenant] += count
        if given:
            account.weights, account.batch_weights = given, of_batches
        elif use.sequences:
            account.weights, account.batch_weights = use.sequences, batches.sequences
        else:
            account.weights, account.batch_weights = use.in_flight, batches.in_flight

    def _advance(self, account: _Account, now_ms: int) -> None:
        record = account.record
        for state, length_ms in spans(record.life, account.until_ms, now_ms, account.ready_as):
            amount = length_ms * account.num_chips
            account.chip_ms[state] += amount
            self._chip_ms[record.model, record.compute_class, state] += amount
            if state is LedgerState.SERVING:
                for tenant, share in shares(amount, account.weights).items():
                    self._tenant_ms[record.model, record.compute_class, tenant] += share
                    self._charge_batches(account, tenant, share)
            account.until_ms += length_ms

    def _charge_batches(self, account: _Account, tenant: str, share: int) -> None:
        """Divides a tenant's share among its batches and what else it has."""
        if not (weights := account.batch_weights.get(tenant)):
            return
        rest = max(0, account.weights.get(tenant, 0) - sum(weights.values()))
        for batch_id, part in shares(share, {**weights, _NO_BATCH: rest}).items():
            if batch_id in weights:
                charged = self._batch_ms.pop(batch_id, None) or Counter()
                charged[account.record.compute_class] += part
                self._batch_ms[batch_id] = charged
        while len(self._batch_ms) > MAX_BATCHES:
            del self._batch_ms[next(iter(self._batch_ms))]


def _ready_as(account: _Account, is_busy: Mapping[str, bool]) -> LedgerState:
    busy = is_busy.get(account.engine_id)
    if busy is None:
        return LedgerState.LOST
    return LedgerState.SERVING if busy else LedgerState.IDLE


def _increase(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Returns what has come to counts that rise; one that is lower than before has begun anew."""
    return {
        name: count - before.get(name, 0)
        for name, count in counts.items()
        if count > before.get(name, 0)
    }


def shares(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Returns `amount` in whole parts by weight; without any weight all of it is `UNATTRIBUTED`.

    The parts sum to `amount`: what rounding leaves over goes to the largest, the first by name
    among equals.
    """
    total = sum(weights.values())
    if not total:
        return {UNATTRIBUTED: amount}
    parts = {tenant: amount * weight // total for tenant, weight in sorted(weights.items())}
    largest = max(parts, key=lambda tenant: weights[tenant])
    parts[largest] += amount - sum(parts.values())
    return {tenant: part for tenant, part in parts.items() if part}


def _key_of(record: SliceRecord) -> _LifeKey:
    return record.replica_id, record.life.transitions[0].at_s
