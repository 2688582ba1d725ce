"""Stages `mixed_load` and `throughput`: every kind of request once, then many of one kind."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from deployments.first_run.context import StageContext
from deployments.first_run.hosts.reach import PYTHON, hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import COMPLETIONS, HttpAnswer, ask, metric_sum
from deployments.first_run.results import Measurement, StageResult, failed, judged, skipped
from deployments.first_run.stages.served_models import RunModel, run_model
from serving.tpu.published import PublishedFigure, published_for
from serving.tpu.requirements import is_on

_CHAT = "/v1/chat/completions"
_LATE = "slicewise_programs_late_total"
LATE_PROGRAMS = "programs compiled while serving"
_SKIP = "SKIP_JAX_PRECOMPILE"
_TELL_SKIP = (
    PYTHON,
    "-c",
    f"import json, os; print(json.dumps({{'set': os.environ.get({_SKIP!r}, '')}}))",
)
_ROUNDS = 2
_SCHEMA = {
    "type": "object",
    "properties": {"chips": {"type": "integer"}, "name": {"type": "string", "maxLength": 12}},
    "required": ["chips", "name"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "count_chips", "parameters": _SCHEMA}}
# What may not be there: an engine on TPU refuses what it would ignore, and says so with a 400.
_MAY_REFUSE = ("penalties", "logit_bias", "min_tokens", "seed", "prompt_logprobs", "tools", "json")
# Nor has a paced engine what it would have to compute.
_PACED_MAY_REFUSE = ("logprobs 1", "logprobs 5")
_FEWEST_OF_PUBLISHED = 0.9


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of request."""

    name: str
    path: str
    body: Mapping[str, Any]


def mixed_load(context: StageContext) -> StageResult:
    """Sends each kind alone, then all at once, and counts what was compiled meanwhile."""
    model = run_model(context)
    kinds = list(_kinds(model.name))
    late_before = metric_sum(context.served.url, _LATE)
    alone = {kind.name: _send(context, kind) for kind in kinds}
    with ThreadPoolExecutor(len(kinds) * _ROUNDS) as senders:
        together = list(
            senders.map(lambda kind: (kind.name, _send(context, kind)), kinds * _ROUNDS)
        )
    replies = [*alone.items(), *together]
    told = [
        {"kind": name, "status": reply.status, "wall_s": round(reply.wall_s, 3), "body": reply.body}
        for name, reply in replies
    ]
    context.keep("replies.json", json.dumps(told, indent=1))
    may_refuse = {*_MAY_REFUSE, *(_PACED_MAY_REFUSE if model.is_paced else ())}
    measurements = [
        _of_kind(kind.name, replies, may_refuse=kind.name in may_refuse) for kind in kinds
    ]
    measurements.append(_late_programs(context, model, late_before))
    return judged(RunStage.MIXED_LOAD, measurements)


def _kinds(model: str) -> list[_Kind]:
    text = {"model": model, "prompt": "A slice is", "max_tokens": 16, "temperature": 0}
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "How many chips has a slice?"}],
        "max_tokens": 48,
        "temperature": 0,
    }
    schema = {"type": "json_schema", "json_schema": {"name": "slice", "schema": _SCHEMA}}
    forced = {"type": "function", "function": {"name": "count_chips"}}
    return [
        _Kind("plain", COMPLETIONS, text),
        _Kind("drawn", COMPLETIONS, text | {"temperature": 0.8, "top_p": 0.9, "top_k": 20}),
        _Kind("several", COMPLETIONS, text | {"n": 3, "temperature": 0.7}),
        _Kind("long prompt", COMPLETIONS, text | {"prompt": "chips and hosts " * 10}),
        _Kind("stop", COMPLETIONS, text | {"stop": ["."]}),
        _Kind("logprobs 1", COMPLETIONS, text | {"logprobs": 1}),
        _Kind("logprobs 5", COMPLETIONS, text | {"logprobs": 5}),
        _Kind("prompt_logprobs", COMPLETIONS, text | {"prompt_logprobs": 1}),
        _Kind("penalties", COMPLETIONS, text | {"presence_penalty": 0.5}),
        _Kind("logit_bias", COMPLETIONS, text | {"logit_bias": {"5": -100}}),
        _Kind("min_tokens", COMPLETIONS, text | {"min_tokens": 8}),
        _Kind("seed", COMPLETIONS, text | {"seed": 1, "temperature": 0.8}),
        _Kind("chat", _CHAT, chat),
        _Kind("json", _CHAT, chat | {"response_format": schema}),
        _Kind("tools", _CHAT, chat | {"tools": [_TOOL], "tool_choice": forced}),
    ]


def _send(context: StageContext, kind: _Kind) -> HttpAnswer:
    return ask(context.served.url, kind.path, kind.body, max(1.0, context.left_s))


def _of_kind(name: str, replies: list[tuple[str, HttpAnswer]], *, may_refuse: bool) -> Measurement:
    of_kind = [reply for kind, reply in replies if kind == name]
    longest_s = max(reply.wall_s for reply in of_kind)
    bad = [reply for reply in of_kind if reply.status != 200]
    is_met = not bad or (may_refuse and all(reply.status == 400 for reply in bad))
    expected = "200, or 400 with a reason" if may_refuse else "200"
    words = bad[0].complaint() if bad else f"{len(of_kind)} answered"
    return Measurement(name, expected, f"{words}, at most {longest_s:.2f} s", is_met=is_met)


def _late_programs(context: StageContext, model: RunModel, before: float | None) -> Measurement:
    after = metric_sum(context.served.url, _LATE)
    what = LATE_PROGRAMS
    if before is None or after is None:
        if model.config.is_on_tpu:
            return Measurement(what, "0", f"not told ({_LATE})", is_met=False)
        return Measurement(what, "", f"not told ({_LATE}: engines on TPU only)")
    told = [answer.last_json() or {} for answer in hosts_of(context.address).run(_TELL_SKIP, 30)]
    switch = no_warm_up(model, [each.get("set", "") for each in told])
    if switch is not None:
        words = f"{after - before:.0f}, because {switch} switches the warm-up off"
        return Measurement(what, "", words)
    return Measurement(what, "0", f"{after - before:.0f}", is_met=after == before)


def no_warm_up(model: RunModel, on_hosts: Sequence[str]) -> str | None:
    """Returns what keeps engines from compiling before they are ready; `None`: nothing. Pure.

    `on_hosts` is what each host has for `SKIP_JAX_PRECOMPILE`; that of the file goes before it.
    """
    if model.engine_args.get("enforce_eager") is True:
        return "enforce_eager"
    given = model.config.engine_env.get(_SKIP)
    values = on_hosts if given is None else [given]
    return _SKIP if any(is_on({_SKIP: value}, _SKIP) for value in values) else None


def throughput(context: StageContext) -> StageResult:
    """Sends the load of a published figure, where there is one for this model on these chips."""
    model = run_model(context)
    published = published_figure(model)
    if isinstance(published, str):
        return skipped(RunStage.THROUGHPUT, published)
    out = context.scratch / "throughput"
    duration_s = max(20.0, context.left_s * 0.7)
    command = [
        sys.executable, "-m", "deployments.cli", "loadtest", "--url", context.served.url,
        "--duration", f"{duration_s:.0f}", "--warmup", f"{duration_s / 4:.0f}", "--drain", "0",
        "--users", f"{published.concurrency}", "--model", model.name,
        "--input-tokens", f"{published.input_tokens}",
        "--output-tokens", f"{published.output_tokens}", "--out", str(out),
    ]  # fmt: skip
    subprocess.run(command, check=False)
    try:
        card = json.loads((out / "scorecard.json").read_text())
    except (OSError, ValueError) as error:
        return failed(RunStage.THROUGHPUT, f"the load test has no scorecard: {error}")
    context.keep("scorecard.json", json.dumps(card, indent=1))
    return judged(RunStage.THROUGHPUT, [_beside(card, published)])


def published_figure(model: RunModel) -> PublishedFigure | str:
    """Returns what others have published for all engines of a model, or why nothing holds. Pure."""
    if model.slice is None or not model.config.is_on_tpu:
        return "no chips: no published figure holds here"
    deployments = model.config.deployments
    if len(deployments) > 1:
        return f"{len(deployments)} deployments: no published figure holds for several together"
    shape = model.slice.engine_shape
    # Of a deployment that scales one at least takes requests.
    num_engines = max(1, deployments[0].replicas or 0) * model.slice.num_engines
    figure = published_for(model.config.source, shape.generation, shape.num_chips)
    if isinstance(figure, str):
        return figure
    # It is of one engine; all others do as much each.
    return replace(
        figure,
        requests_per_s=num_engines * figure.requests_per_s,
        concurrency=num_engines * figure.concurrency,
    )


def _beside(card: Mapping[str, Any], published: PublishedFigure) -> Measurement:
    rate = float(card["throughput"]["requests_per_s"])
    wanted = published.requests_per_s
    return Measurement(
        f"requests per second, {published.input_tokens} tokens in, {published.output_tokens} out",
        f"at least {_FEWEST_OF_PUBLISHED:.0%} of {wanted:g} ({published.source})",
        f"{rate:.2f}",
        is_met=rate >= _FEWEST_OF_PUBLISHED * wanted,
    )
