"""Stage `correctness`: greedy answers beside those of transformers, run here for this run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.engine_plan import SHIPPED_FACTS
from deployments.first_run.context import StageContext
from deployments.first_run.hosts.memory import read_host_memory
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import COMPLETIONS, ask, greedy
from deployments.first_run.requests.prompts import PROMPTS
from deployments.first_run.results import Measurement, StageResult, failed, judged, skipped
from deployments.first_run.stages.reference_size import no_room, reference_bytes
from deployments.first_run.stages.served_models import RunModel, run_model
from serving.artifacts.object_store.address import is_bucket

_NUM_TOKENS = 32
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


def correctness(context: StageContext) -> StageResult:
    """Compares the answers to all prompts, token by token."""
    model = run_model(context)
    name = context.reference or model.config.source
    dtype = str(model.engine_args.get("dtype", "auto"))
    reason = _no_reference(model, name, dtype, context.file.parent)
    if reason is not None:
        return skipped(RunStage.CORRECTNESS, reason)
    replies = [
        ask(
            context.served.url,
            COMPLETIONS,
            greedy(model.name, prompt, _NUM_TOKENS),
            max(1.0, context.left_s),
        )
        for prompt in PROMPTS
    ]
    wrong = [reply.complaint() for reply in replies if reply.status != 200]
    if wrong:
        return failed(RunStage.CORRECTNESS, f"{len(wrong)} requests were refused: {wrong[0]}")
    pairs = [_tokens(reply.body) for reply in replies]
    context.keep("answers.json", json.dumps({"prompts": PROMPTS, "pairs": pairs}, indent=1))
    found = _gaps(name, dtype, pairs, context.left_s)
    context.keep("gaps.json", json.dumps(found, indent=1))
    if not isinstance(found, list):
        return failed(RunStage.CORRECTNESS, f"no reference: {found}")
    limit = _NEAR_TIE_NATS.get(dtype, _NEAR_TIE_OTHERWISE_NATS)
    return judged(RunStage.CORRECTNESS, judged_gaps(found, limit, name))


def _no_reference(model: RunModel, name: str, dtype: str, folder: Path) -> str | None:
    """Returns why no reference can be run; `None` if it can. `folder` is that of the file."""
    if model.is_paced:
        return "a paced engine's tokens are made up"
    if is_bucket(name):
        return f"transformers reads no {name}: name a --reference that it can read"
    weights_bytes = reference_bytes(name, dtype, [folder / "models", SHIPPED_FACTS])
    return no_room(name, weights_bytes, read_host_memory().free_bytes)


def _tokens(body: dict[str, Any]) -> tuple[list[int], list[int]]:
    (choice,) = body["choices"]
    return choice["prompt_token_ids"], choice["token_ids"]


def _gaps(
    name: str, dtype: str, pairs: Sequence[tuple[list[int], list[int]]], limit_s: float
) -> list[list[tuple[float, float]]] | str:
    """Returns the gaps and steps, or why there are none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.first_run.requests.reference", name, dtype],
            input=json.dumps(pairs),
            capture_output=True,
            text=True,
            timeout=max(1.0, limit_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not computed within {limit_s:.0f} s"
    sys.stdout.write(done.stderr)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return lines[-1][:500]
    found = json.loads(done.stdout.splitlines()[-1])
    return [[(gap, step) for gap, step in answer] for answer in found]


def judged_gaps(
    found: list[list[tuple[float, float]]], limit: float, name: str
) -> list[Measurement]:
    """Judges the gap and the step of every token of every answer; `limit` is in nats. Pure."""
    flat = [each for gaps in found for each in gaps]
    doubtful = [(gap, step) for gap, step in flat if not _is_near(gap, step, limit)]
    wrong = sum(gap >= _WRONG_STEPS * step - _rounding(step) for gap, step in doubtful)
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


def _is_near(gap: float, step: float, limit: float) -> bool:
    return gap < limit or gap <= step + _rounding(step)


def _rounding(step: float) -> float:
    return min(_ROUNDING_NATS, step)
