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
from deployments.first_run.results import StageResult, failed, judged, skipped
from deployments.first_run.stages.near_ties import judged_gaps, near_tie_nats
from deployments.first_run.stages.reference_size import no_room, reference_bytes
from deployments.first_run.stages.served_models import RunModel, run_model
from serving.artifacts.object_store.address import is_bucket

_NUM_TOKENS = 32


def correctness(context: StageContext) -> StageResult:
    """Compares the answers to all prompts, token by token."""
    model = run_model(context)
    name = context.reference or model.config.source
    reason = _no_reference(model, name, context.file.parent)
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
    found = _gaps(name, model.dtype, pairs, context.left_s)
    context.keep("gaps.json", json.dumps(found, indent=1))
    if not isinstance(found, list):
        return failed(RunStage.CORRECTNESS, f"no reference: {found}")
    return judged(RunStage.CORRECTNESS, judged_gaps(found, near_tie_nats(model.dtype), name))


def _no_reference(model: RunModel, name: str, folder: Path) -> str | None:
    """Returns why no reference can be run; `None` if it can. `folder` is that of the file."""
    if model.is_paced:
        return "a paced engine's tokens are made up"
    if is_bucket(name):
        return f"transformers reads no {name}: name a --reference that it can read"
    weights_bytes = reference_bytes(name, model.dtype, [folder / "models", SHIPPED_FACTS])
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
