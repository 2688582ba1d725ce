"""How far other tokens may be off in an engine that is right. Pure.

Logits are rounded, and so are the states behind them, so that two tokens that are nearly as likely
change places (docs/operate/first-run.md#near-ties).
"""

from collections.abc import Sequence

from deployments.first_run.requests.asking import StreamedAnswer
from deployments.first_run.results import Measurement

# What two ways of adding the same numbers may come to: an expectation of 2026-11-22. Logits of
# bfloat16 from 16 to 32 are 0.125 apart, so that one step of the type is a near-tie as well.
_NEAR_TIE_NATS = {"float32": 0.001}
_NEAR_TIE_OTHERWISE_NATS = 0.1
# Hidden states are rounded too, so that a few tokens are further off in an engine that is right. Of
# 640 tokens of a tiny Llama that float32 chose, bfloat16 found four less likely by 0.1 nat or more,
# and none by 8 steps; with weights changed by 0.3 % it was 28 and 11, with attention scaled by 1.05
# 12 and 4 (docs/operate/first-run.md, 2026-11-29).
_MOST_DOUBTFUL = 0.01
_WRONG_STEPS = 8
# Differences of log-probabilities are computed in float32.
_ROUNDING_NATS = 1e-3
# How large the logits were an answer does not tell; those of most models are below 32.
_STEP_NATS = {"float32": 2.0**-19}
_STEP_OTHERWISE_NATS = 0.125
# Of one or two engines at least half of the streams move, and all of those differ where the way of
# resuming is at fault. Of more engines fewer move.
_MOST_DOUBTFUL_STREAMS = 1 / 8


def near_tie_nats(dtype: str) -> float:
    """Returns below how many nats a gap is a near-tie, for a model computed in `dtype`."""
    return _NEAR_TIE_NATS.get(dtype, _NEAR_TIE_OTHERWISE_NATS)


def judged_gaps(
    found: list[list[tuple[float, float]]], limit: float, name: str
) -> list[Measurement]:
    """Judges the gap and the step of every token of every answer; `limit` is in nats.

    A gap is by how much the model `name` finds a token less likely than its own choice, a step how
    far apart logits of that size are in its type.
    """
    flat = [each for gaps in found for each in gaps]
    doubtful = [(gap, step) for gap, step in flat if not _is_near(gap, step, limit)]
    wrong = sum(_is_wrong(gap, step) for gap, step in doubtful)
    near = sum(gap > 0 for gap, _ in flat) - len(doubtful)
    worst = max((gap for gap, _ in flat), default=0.0)
    return [
        Measurement(
            f"tokens that {name} finds less likely by {limit:g} nat or more, "
            f"and by {_WRONG_STEPS} steps of its logits",
            "0",
            f"{wrong} of {len(flat)}, the worst by {worst:.3g} nat",
            is_met=not wrong and bool(flat),
        ),
        Measurement(
            f"tokens that it finds less likely by {limit:g} nat or more",
            f"at most {_MOST_DOUBTFUL:.0%}",
            f"{len(doubtful)} of {len(flat)}",
            is_met=len(doubtful) <= _MOST_DOUBTFUL * len(flat),
        ),
        Measurement("nearly as likely tokens, counted and not failed", "", f"{near}"),
        Measurement(
            "answers that are the reference's in every token",
            "",
            f"{sum(not any(gap for gap, _ in gaps) for gaps in found)} of {len(found)}",
        ),
    ]


def judged_streams(
    before: Sequence[StreamedAnswer], after: Sequence[StreamedAnswer], dtype: str
) -> list[Measurement]:
    """Judges the streams of an engine that died by what the same prompts came to before.

    Behind its first other token a stream has another beginning, so that each has one gap at most.
    """
    limit, step = near_tie_nats(dtype), _STEP_NATS.get(dtype, _STEP_OTHERWISE_NATS)
    gaps = [
        gap for pair in zip(before, after, strict=True) if (gap := first_gap(*pair)) is not None
    ]
    doubtful = [gap for gap in gaps if not _is_near(gap, step, limit)]
    wrong = sum(_is_wrong(gap, step) for gap in doubtful)
    worst = f", the worst by {max(gaps):.3g} nat" if gaps else ""
    most = int(_MOST_DOUBTFUL_STREAMS * len(after))
    return [
        Measurement(
            "streams with a token that was less likely before by "
            f"{max(limit, _WRONG_STEPS * step):g} nat or more",
            "0",
            f"{wrong} of {len(after)}{worst}",
            is_met=not wrong and bool(after),
        ),
        Measurement(
            f"streams with one that was so by {max(limit, step):g} nat or more",
            f"at most {most}",
            f"{len(doubtful)} of {len(after)}",
            is_met=len(doubtful) <= most,
        ),
        Measurement(
            "streams with one that was nearly as likely", "", f"{len(gaps) - len(doubtful)}"
        ),
    ]


def first_gap(before: StreamedAnswer, after: StreamedAnswer) -> float | None:
    """Returns by how many nats the first other token was less likely; `None`: all are the same.

    Infinite where it was not among those that the first answer tells.
    """
    for at, (old, new) in enumerate(zip(before.tokens, after.tokens, strict=False)):
        if old != new:
            told = before.alternatives[at] if at < len(before.alternatives) else {}
            return told.get(old, 0.0) - told[new] if new in told else float("inf")
    return None


def _is_near(gap: float, step: float, limit: float) -> bool:
    return gap < limit or gap <= step + _rounding(step)


def _is_wrong(gap: float, step: float) -> bool:
    """Returns whether a gap that is no near-tie is one of no engine that is right."""
    return gap >= _WRONG_STEPS * step - _rounding(step)


def _rounding(step: float) -> float:
    return min(_ROUNDING_NATS, step)
