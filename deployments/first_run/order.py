"""Defines the stages of a first run, their order, and which may go on after which failure. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from deployments.first_run.results import StageOutcome

# Of all stages together, for a model of 8 billion parameters on one slice: expected, not measured.
TOTAL_S = 30 * 60


class RunStage(StrEnum):
    """The stages, in the order in which they run."""

    DOCTOR = "doctor"
    PROBE = "probe"
    COLD_START = "cold_start"
    EXPORTER = "exporter"
    HBM = "hbm"
    CORRECTNESS = "correctness"
    MIXED_LOAD = "mixed_load"
    THROUGHPUT = "throughput"
    WARM_START = "warm_start"
    RESUME = "resume"
    DRAIN = "drain"
    HOSTS = "hosts"


@dataclass(frozen=True, slots=True)
class StageRule:
    """What a stage needs and how long it may take.

    `needs` are stages that must have passed; `is_served` says that the application must answer.
    `expects` and `sends_back` are sentences for a reader.
    """

    stage: RunStage
    deadline_s: float
    expects: str
    sends_back: str
    needs: tuple[RunStage, ...] = ()
    is_served: bool = False


RULES: tuple[StageRule, ...] = (
    StageRule(
        RunStage.DOCTOR,
        45,
        "`slicewise doctor` finds no error",
        "versions, environment (secrets masked), limits, device nodes and kernel settings",
    ),
    StageRule(
        RunStage.PROBE,
        120,
        "three probes in a row pass, the later ones at most 10 s slower than the first",
        "seconds and checks of each probe, with what JAX says of the devices",
    ),
    StageRule(
        RunStage.COLD_START,
        540,
        "the engines become ready",
        "seconds to ready, memory of the processes, and the application's log",
    ),
    StageRule(
        RunStage.EXPORTER,
        45,
        "the chips are busy while requests run, and every source can be read",
        "the raw answers of libtpu and of the device plugin, idle and busy",
        is_served=True,
    ),
    StageRule(
        RunStage.HBM,
        15,
        "tokens in the key-value cache within 5 % of the plan",
        "the plan, and the blocks that the engine has",
        is_served=True,
    ),
    StageRule(
        RunStage.CORRECTNESS,
        210,
        "each greedy token is the reference's own, or nearly as likely to it",
        "prompts, answers, and the log-probabilities of the reference where they differ",
        is_served=True,
    ),
    StageRule(
        RunStage.MIXED_LOAD,
        120,
        "every kind of request is answered, and none waits for a program to be compiled",
        "status and seconds of each kind of request; programs compiled late",
        is_served=True,
    ),
    StageRule(
        RunStage.THROUGHPUT,
        165,
        "at least 90 % of the published figure for this model on these chips",
        "the load test's scorecard",
        is_served=True,
    ),
    StageRule(
        RunStage.WARM_START,
        240,
        "the second start is ready, and finds its programs in the cache",
        "seconds to ready beside those of the first start, and the application's log",
        needs=(RunStage.COLD_START,),
    ),
    StageRule(
        RunStage.RESUME,
        150,
        "an engine is killed under streams: none fails, and their tokens are those of before",
        "every stream's tokens and its longest pause",
        is_served=True,
    ),
    StageRule(
        RunStage.DRAIN,
        120,
        "a slice is left after its notice: no stream fails",
        "every stream's end, and the seconds until the engine had left",
        is_served=True,
    ),
    StageRule(
        RunStage.HOSTS,
        30,
        "every host of the slices has the same versions and no error",
        "what doctor says on each host",
    ),
)
RULE_OF: Mapping[RunStage, StageRule] = {rule.stage: rule for rule in RULES}


def chosen_stages(only: RunStage | None) -> tuple[RunStage, ...]:
    """Returns the stages to run, in order: all, or one and what has to run before it."""
    if only is None:
        return tuple(rule.stage for rule in RULES)
    rule = RULE_OF[only]
    before = set(rule.needs) | ({RunStage.COLD_START} if rule.is_served else set())
    return tuple(rule.stage for rule in RULES if rule.stage in before | {only})


def obstacle(
    stage: RunStage, outcomes: Mapping[RunStage, StageOutcome], *, is_served: bool
) -> str | None:
    """Returns why a stage cannot run now; `None` if it can.

    A failure stops only what needs what failed: after a failed probe the engine is started all the
    same, because what it says then is evidence too.
    """
    rule = RULE_OF[stage]
    for needed in rule.needs:
        outcome = outcomes.get(needed)
        if outcome != StageOutcome.PASSED:
            return f"{needed} has to pass first, and {_words(outcome)}"
    if not rule.is_served or is_served:
        return None
    starts = (RunStage.WARM_START, RunStage.COLD_START)
    last = next((start for start in starts if start in outcomes), RunStage.COLD_START)
    return f"the application does not answer ({last} {_words(outcomes.get(last))})"


def _words(outcome: StageOutcome | None) -> str:
    return "has not run" if outcome is None else f"{outcome.value}"
