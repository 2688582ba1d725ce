"""Keeps the decision log: what was observed and planned, so that it can be decided again.

One file of JSON lines. A line `begin` carries everything a policy is made from; each line after it
is one decision: its observation, what other models left to it, and its plan. A restart of the
policy begins anew, with the memory that it had then. `replay_log` runs today's policy on
yesterday's observations and reports where it would plan otherwise. Owns the format; reads and
writes files, decides nothing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.records import NOTHING_SHARED, ChipShare
from autoscaling.policy.rules import Rules
from autoscaling.records import Decision, Fleet, ModelLoad, Observation, Plan, SliceLoss, SliceView
from serving.domain.capacity.batch_due import BatchDue, DueWork
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

FORMAT = 2
# Before memories outlived a restart, there were none at a beginning.
_WITHOUT_MEMORY = 1


class DecisionLogError(ValueError):
    """Reports a log that cannot be read. The message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """The decision that today's policy would take otherwise; targets by compute class."""

    at_s: float
    model: str
    logged: Mapping[str, int]
    today: Mapping[str, int]
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay: decisions in all, and those that differ, in order."""

    num_decisions: int
    differences: tuple[DecisionDifference, ...]


class DecisionLog:
    """Appends decisions to a file as they are taken. One writer; each line is whole or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def begin(
        self,
        model: str,
        profile: CapacityProfile,
        terms: Iterable[ComputeClass],
        rules: Rules,
        memory: PolicyRecord | None,
        profiles: Mapping[str, CapacityProfile],
    ) -> None:
        """Records that a policy of this model starts with that memory; `None`: an empty one.

        `profiles` are of the classes with other slices than `profile` is of.
        """
        self._write(
            {
                "kind": "begin",
                "format": FORMAT,
                "model": model,
                "profile": profile.model_dump(),
                "classes": [asdict(each) for each in terms],
                "rules": asdict(rules),
                "memory": None if memory is None else memory.model_dump(mode="json"),
                "profiles": {name: each.model_dump() for name, each in profiles.items()},
            }
        )

    def decided(self, model: str, observation: Observation, share: ChipShare, plan: Plan) -> None:
        """Records one decision, taken with that share of what models have together."""
        shared = {} if share == NOTHING_SHARED else {"share": _share_to_json(share)}
        self._write(
            {
                "kind": "decision",
                "model": model,
                "observation": observation_to_json(observation),
                **shared,
                "plan": plan_to_json(plan),
            }
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def replay_log(path: Path) -> Replay:
    """Decides anew on every observation of the log, model by model, with today's policy.

    Raises:
        DecisionLogError: the file cannot be read as a decision log.
    """
    policies: dict[str, SlicewisePolicy] = {}
    differences: list[DecisionDifference] = []
    num_decisions = 0
    for number, entry in _entries(path):
        try:
            if entry["kind"] == "begin":
                policies[entry["model"]] = _policy_of(entry)
                continue
            policy = policies[entry["model"]]
            observation = observation_of_json(entry["observation"])
            share = _share_of_json(entry["share"]) if "share" in entry else NOTHING_SHARED
            logged = entry["plan"]["targets"]
        except (KeyError, TypeError, ValueError) as error:
            raise DecisionLogError(f"{path}, line {number}: {error!r}") from error
        num_decisions += 1
        plan = policy.decide(observation, share)
        if dict(plan.targets) != logged:
            differences.append(
                DecisionDifference(plan.at_s, entry["model"], logged, plan.targets, plan.arithmetic)
            )
    return Replay(num_decisions, tuple(differences))


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """Returns the observation as plain JSON values."""
    return asdict(observation)


def observation_of_json(raw: Mapping[str, Any]) -> Observation:
    """Reads what `observation_to_json` returned.

    Raises:
        KeyError, TypeError, ValueError: it is no observation.
    """
    fleet = raw["fleet"]
    return Observation(
        now_s=raw["now_s"],
        load=None if raw["load"] is None else _load_of_json(raw["load"]),
        fleet=Fleet(
            slices=tuple(
                SliceView(**(each | {"state": SliceState(each["state"])}))
                for each in fleet["slices"]
            ),
            targets=fleet["targets"],
            losses=tuple(SliceLoss(**each) for each in fleet["losses"]),
            late=fleet.get("late", ""),
        ),
    )


def _load_of_json(raw: Mapping[str, Any]) -> ModelLoad:
    engines = tuple(EngineRate(**each) for each in raw.get("engines", ()))
    notes = {name: tuple(raw.get(name, ())) for name in ("late", "left_out")}
    due = raw.get("batch_due", {})
    work = tuple(DueWork(**each) for each in due.get("work", ()))
    batch_due = BatchDue(**(dict(due) | {"work": work}))
    return ModelLoad(**(dict(raw) | notes | {"engines": engines, "batch_due": batch_due}))


def _share_to_json(share: ChipShare) -> dict[str, Any]:
    return asdict(share) | {"full": sorted(share.full)}


def _share_of_json(raw: Mapping[str, Any]) -> ChipShare:
    return ChipShare(**(dict(raw) | {"full": frozenset(raw["full"])}))


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain JSON values."""
    return asdict(plan)


def plan_of_json(raw: Mapping[str, Any]) -> Plan:
    """Reads what `plan_to_json` returned.

    Raises:
        KeyError, TypeError: it is no plan.
    """
    changes = {
        name: tuple(Decision(**each) for each in raw[name]) for name in ("decisions", "refusals")
    }
    tuples = {name: tuple(raw[name]) for name in ("drain_order", "alerts")}
    return Plan(**(dict(raw) | changes | tuples))


def _policy_of(entry: Mapping[str, Any]) -> SlicewisePolicy:
    if entry["format"] not in (FORMAT, _WITHOUT_MEMORY):
        raise ValueError(f"format is {entry['format']!r}; allowed: {_WITHOUT_MEMORY}, {FORMAT}")
    memory = None if entry["format"] == _WITHOUT_MEMORY else entry["memory"]
    rules = dict(entry["rules"])
    objectives = Objectives(**rules.pop("objectives"))
    profile = CapacityProfile.model_validate(entry["profile"])
    return SlicewisePolicy(
        profile,
        [ComputeClass(**each) for each in entry["classes"]],
        Rules(objectives, **rules),
        None if memory is None else PolicyRecord.model_validate_json(json.dumps(memory)),
        {
            name: CapacityProfile.model_validate(each)
            for name, each in entry.get("profiles", {}).items()
        },
    )


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields each line with its number; leaves out a last line that was cut short."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise DecisionLogError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DecisionLogError(f"{path}, line {number}: {error}") from error
