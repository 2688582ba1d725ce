"""Plans one conversation of a workload: its model, its prompts, and the lengths of its answers.

Each conversation draws from a generator of its own, seeded with the run's seed and the
conversation's number: one's draws do not depend on another's, nor on the process. Pure.
"""

import json
import random
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

from loadtest.errors import LoadTestError
from loadtest.planned_request import Api, PlannedRequest, PromptBlock
from loadtest.workload.arrival_laws import ClosedArrivals
from loadtest.workload.prompts import first_tokens
from loadtest.workload.schedule import Unit
from loadtest.workload.spec import Lengths, SharedPrefixes, WorkloadSpec
from loadtest.workload.traces import TraceRow

T = TypeVar("T")


def seed_of(seed: int, purpose: str) -> int:
    """The seed of one purpose's generator; the same in any process."""
    return int.from_bytes(blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class _Weighted(Generic[T]):
    """The values, each chosen in proportion to its weight."""

    values: tuple[T, ...]
    summed: tuple[float, ...]

    @classmethod
    def of(cls, weighted: Iterable[tuple[T, float]]) -> "_Weighted[T]":
        values, weights = zip(*weighted, strict=True)
        return cls(tuple(values), tuple(accumulate(weights)))

    def draw(self, rng: random.Random) -> T:
        # The last may be missed by rounding.
        index = bisect(self.summed, rng.random() * self.summed[-1])
        return self.values[min(index, len(self.values) - 1)]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn, before it belongs to a conversation.

    `text` stands instead of the blocks, which then give its length where that is known.
    """

    blocks: tuple[PromptBlock, ...]
    output_tokens: int
    think_time_s: float
    text: str | None = None

    @property
    def input_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes conversations by their number.

    `key` begins every request id and content id. `units` are the rows of `lengths.trace` in the
    order they are taken, `None` without one.
    """

    spec: WorkloadSpec
    seed: int
    key: str
    targets: _Weighted[tuple[str, Api]]
    tenants: _Weighted[str] | None
    priorities: _Weighted[int] | None
    prefixes: _Weighted[PromptBlock] | None
    units: tuple[Unit, ...] | None

    def rows_of(self, index: int) -> tuple[Unit | None, int]:
        """The trace's rows for a conversation, and how often they have been taken before."""
        if self.units is None:
            return None, 0
        return self.units[index % len(self.units)], index // len(self.units)

    def conversation(
        self,
        index: int,
        offset_s: float | None,
        unit: Unit | None,
        playing: int,
        scale: float = 1.0,
    ) -> tuple[PlannedRequest, ...]:
        """The requests of one conversation; `scale` is how much faster the trace's time runs."""
        rng = random.Random(seed_of(self.seed, f"conversation {index}"))
        model, api = self.targets.draw(rng)
        tenant = self.tenants.draw(rng) if self.tenants else None
        priority = self.priorities.draw(rng) if self.priorities else 0
        if unit is None:
            turns = self._drawn_turns(index, rng)
        else:
            turns = self._trace_turns(index, unit, playing, scale, rng)
        turns = self._within_context(turns)
        is_session = len(turns) > 1
        name = f"{self.key}-{index:06d}"
        return tuple(
            PlannedRequest(
                request_id=f"{name}-{number}",
                offset_s=offset_s if number == 0 else None,
                model=model,
                api=api,
                blocks=turn.blocks,
                output_tokens=turn.output_tokens,
                session_id=name if is_session else None,
                turn=number,
                think_time_s=turn.think_time_s,
                tenant=tenant,
                priority=priority,
                text=turn.text,
            )
            for number, turn in enumerate(turns)
        )

    def _drawn_turns(self, index: int, rng: random.Random) -> list[_Turn]:
        lengths, sessions = self.spec.lengths or Lengths(), self.spec.sessions
        if lengths.input is None or lengths.output is None:
            raise AssertionError("a workload without rows has laws of lengths")
        turns = []
        prefix = self._prefix(rng)
        for number in range(sessions.turns.draw(rng) if sessions else 1):
            own = self._own_block(index, number, lengths.input.draw(rng))
            output_tokens = lengths.output.draw(rng)
            later_s = sessions.think_time_s.draw(rng) if sessions and number else None
            think_time_s = self._first_think_time_s(rng) if later_s is None else later_s
            turns.append(_Turn((*prefix, own), output_tokens, think_time_s))
            prefix = ()
        return turns

    def _trace_turns(
        self, index: int, unit: Unit, playing: int, scale: float, rng: random.Random
    ) -> list[_Turn]:
        turns = []
        before: TraceRow | None = None
        prefix = self._prefix(rng)
        for number, row in enumerate(unit):
            think_time_s = (
                self._first_think_time_s(rng)
                if before is None
                else _think_time_s(before, row) / scale
            )
            output_tokens = self._output_tokens(row, rng)
            blocks, text = self._prompt(index, number, row, playing, rng)
            turns.append(_Turn((*prefix, *blocks), output_tokens, think_time_s, text))
            before, prefix = row, ()
        return turns

    def _prompt(
        self, index: int, number: int, row: TraceRow, playing: int, rng: random.Random
    ) -> tuple[tuple[PromptBlock, ...], str | None]:
        lengths = self.spec.lengths
        if lengths is not None and lengths.input is not None:
            return (self._own_block(index, number, lengths.input.draw(rng)),), None
        if row.text is not None and self.prefixes is not None:
            raise LoadTestError("prefixes beside a trace's texts; allowed: beside lengths only")
        if row.blocks:
            shared = (
                replace(block, content_id=f"{self.key}/{playing}/{block.content_id}")
                for block in row.blocks
            )
            return tuple(shared), row.text
        if row.input_tokens is None:
            return (), row.text
        return (self._own_block(index, number, row.input_tokens),), row.text

    def _output_tokens(self, row: TraceRow, rng: random.Random) -> int:
        lengths = self.spec.lengths
        if lengths is not None and lengths.output is not None:
            return lengths.output.draw(rng)
        if row.output_tokens is None:
            raise LoadTestError("a row of the trace has no output_tokens; allowed: lengths.output")
        return row.output_tokens

    def _own_block(self, index: int, number: int, num_tokens: int) -> PromptBlock:
        return PromptBlock(f"{self.key}/{index}/{number}", num_tokens)

    def _prefix(self, rng: random.Random) -> tuple[PromptBlock, ...]:
        return (self.prefixes.draw(rng),) if self.prefixes is not None else ()

    def _first_think_time_s(self, rng: random.Random) -> float:
        law = self.spec.arrivals
        return law.think_time_s.draw(rng) if isinstance(law, ClosedArrivals) else 0.0

    def _within_context(self, turns: list[_Turn]) -> list[_Turn]:
        """The turns that a server of a short context takes; prompts are cut at their end."""
        limit = self.spec.max_context_tokens
        if limit is None:
            return turns
        kept: list[_Turn] = []
        room = limit
        for turn in turns:
            output_tokens = min(turn.output_tokens, limit // 2)
            if kept and turn.input_tokens + output_tokens > room:
                break
            blocks = first_tokens(turn.blocks, room - output_tokens)
            kept.append(replace(turn, blocks=blocks, output_tokens=output_tokens))
            room -= kept[-1].input_tokens + output_tokens
        return kept


def planner(
    spec: WorkloadSpec, models: Sequence[str], seed: int, units: tuple[Unit, ...] | None
) -> Planner:
    """Returns the planner of `spec` against `models`; `units` are those of `lengths.trace`.

    Raises:
        LoadTestError: no model, or one of the mix that is not among them.
    """
    if not models:
        raise LoadTestError("there are no models; allowed: at least one")
    for entry in spec.mix:
        if entry.model not in models:
            raise LoadTestError(f"mix has {entry.model!r}; allowed: {', '.join(sorted(models))}")
    mix = [((entry.model, entry.api or spec.api), entry.weight) for entry in spec.mix]
    key = _key(spec, seed)
    return Planner(
        spec=spec,
        seed=seed,
        key=key,
        targets=_Weighted.of(mix or [((model, spec.api), 1.0) for model in models]),
        tenants=_Weighted.of(spec.tenants.items()) if spec.tenants else None,
        priorities=_Weighted.of(spec.priorities.items()) if spec.priorities else None,
        prefixes=_prefixes(spec.prefixes, key, seed) if spec.prefixes else None,
        units=units,
    )


def _prefixes(prefixes: SharedPrefixes, key: str, seed: int) -> _Weighted[PromptBlock]:
    rng = random.Random(seed_of(seed, "prefixes"))
    return _Weighted.of(
        (PromptBlock(f"{key}/prefix/{rank}", prefixes.tokens.draw(rng)), rank**-prefixes.zipf)
        for rank in range(1, prefixes.count + 1)
    )


def _key(spec: WorkloadSpec, seed: int) -> str:
    """Returns a short key for workload and seed. For traces the name counts, not the folder."""
    said = json.dumps(spec.model_dump(), sort_keys=True, default=_file_name)
    return blake2b(f"{seed}/{said}".encode(), digest_size=5).hexdigest()


def _file_name(value: object) -> str:
    if not isinstance(value, Path):
        raise TypeError(f"a workload has no {type(value).__name__}")
    return value.name


def _think_time_s(before: TraceRow, row: TraceRow) -> float:
    """Returns the trace's think time, else the time between the rows: ends are not known."""
    if row.think_time_s is not None:
        return row.think_time_s
    if row.offset_s is None or before.offset_s is None:
        return 0.0
    return row.offset_s - before.offset_s
