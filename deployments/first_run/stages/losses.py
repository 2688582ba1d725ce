"""Stages `resume` and `drain`: an engine that dies, and a slice that is left, under streams."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from deployments.first_run.application import (
    fleet_of,
    processes_of,
    wait_linked,
)
from deployments.first_run.context import StageContext
from deployments.first_run.hosts.kill import ENGINE_CORE
from deployments.first_run.hosts.node_processes import OF_THIS_NODE
from deployments.first_run.hosts.reach import PYTHON, hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import StreamedAnswer, Streams
from deployments.first_run.requests.prompts import PROMPTS
from deployments.first_run.results import Measurement, StageResult, failed, judged, skipped
from deployments.first_run.stages.near_ties import judged_streams
from deployments.first_run.stages.served_models import RunModel, run_model

_NUM_STREAMS, _NUM_TOKENS = 16, 128
_HOST_S = 30.0
# As a pod's hook on a spot node: 30 s to leave.
_NOTICE_S = 30
# On the only slice there is a stream has nowhere to go, and is to end within half of the notice.
# How long a token takes there is seen by short streams before; none is shorter than those.
_LEAST_TOKENS = 16
_TELL_AGENT = (PYTHON, "-I", "-m", "serving.slices.local.tell_agent")


def resume(context: StageContext) -> StageResult:
    """Kills an engine core under greedy streams, and compares their tokens with those of before."""
    model = run_model(context)
    if model.is_paced:
        return skipped(RunStage.RESUME, "a paced engine has no process of its own to kill")
    reason = wait_linked(context.served, model.num_engines, context.until_s)
    if reason is not None:
        return failed(RunStage.RESUME, reason)
    calm = _streams(context, model).wait(context.until_s)
    _keep(context, "before.json", calm)
    streams = _streams(context, model)
    if not streams.wait_begun(context.until_s):
        return failed(RunStage.RESUME, _not_begun(streams))
    killed = _kill(context)
    if killed is None:
        return failed(RunStage.RESUME, f"no process {ENGINE_CORE} on any host to be killed")
    answers = streams.wait(context.until_s)
    _keep(context, "after.json", answers)
    back = wait_linked(context.served, model.num_engines, context.until_s)
    return judged(
        RunStage.RESUME,
        [
            *_ends(answers),
            *judged_streams(calm, answers, model.dtype),
            Measurement(
                "engines ready again",
                f"{model.num_engines}",
                back or f"{model.num_engines}",
                is_met=back is None,
            ),
        ],
        killed=killed,
    )


def drain(context: StageContext) -> StageResult:
    """Announces the end of a slice under streams; without slices one engine fewer is deployed."""
    model = run_model(context)
    reason = wait_linked(context.served, model.num_engines, context.until_s)
    if reason is not None:
        return failed(RunStage.DRAIN, reason)
    if model.slice is None and model.config.deployments[0].replicas < 2:
        return skipped(RunStage.DRAIN, "one engine without a slice: its streams had nowhere to go")
    engines_before = _engine_ids(context)
    num_tokens = _num_tokens_of_drain(context, model)
    streams = _streams(context, model, num_tokens)
    if not streams.wait_begun(context.until_s):
        return failed(RunStage.DRAIN, _not_begun(streams))
    began_s = time.monotonic()
    problem = _tell_hosts(context) if model.slice is not None else _deploy_fewer(context)
    if problem is not None:
        return failed(RunStage.DRAIN, problem)
    gone_s = _wait_gone(context, streams, engines_before)
    answers = streams.wait(context.until_s)
    _keep(context, "streams.json", answers)
    left_s = (gone_s or time.monotonic()) - began_s
    words = f"not within {left_s:.1f} s" if gone_s is None else f"after {left_s:.1f} s"
    return judged(
        RunStage.DRAIN,
        [
            *_ends(answers, num_tokens),
            Measurement("tokens of a stream", "", f"{num_tokens}"),
            Measurement("an engine has left", "yes", words, is_met=gone_s is not None),
        ],
    )


def _wait_gone(context: StageContext, streams: Streams, before: set[str]) -> float | None:
    """Waits for the streams' ends and an engine's; returns when one of `before` was gone.

    In monotonic time; `None`: none was, before the stage is over.
    """
    gone_s = None
    while context.left_s > 0 and (gone_s is None or not streams.are_over):
        if gone_s is None and before - _engine_ids(context):
            gone_s = time.monotonic()
        time.sleep(0.2)
    return gone_s


def tokens_within(answers: Sequence[StreamedAnswer], limit_s: float) -> int:
    """Returns how many tokens streams like these end with in time: 16 to 128. Pure."""
    paces_s = [
        (answer.arrivals_s[-1] - answer.arrivals_s[0]) / (len(answer.arrivals_s) - 1)
        for answer in answers
        if len(answer.arrivals_s) > 1
    ]
    slowest_s = max(paces_s, default=0.0)
    most = int(limit_s / slowest_s) if slowest_s > 0 else _NUM_TOKENS
    return max(_LEAST_TOKENS, min(_NUM_TOKENS, most))


def _num_tokens_of_drain(context: StageContext, model: RunModel) -> int:
    if model.num_replicas > 1:
        return _NUM_TOKENS
    calm = _streams(context, model, _LEAST_TOKENS).wait(context.until_s)
    return tokens_within(calm, _NOTICE_S / 2)


def _streams(context: StageContext, model: RunModel, num_tokens: int = _NUM_TOKENS) -> Streams:
    prompts = PROMPTS[:_NUM_STREAMS]
    return Streams(
        context.served.url,
        model.name,
        prompts,
        num_tokens,
        context.left_s,
        has_alternatives=not model.is_paced,
    )


def _not_begun(streams: Streams) -> str:
    waiting = [answer.error for answer in streams.answers if not answer.tokens]
    reason = waiting[0] if waiting else "all have by now, too late"
    return f"{len(waiting)} of {len(streams.answers)} streams did not begin in time: {reason}"


def _engine_ids(context: StageContext) -> set[str]:
    fleet = fleet_of(context.served)
    models = () if fleet is None else fleet.models
    return {str(each.engine_id) for model in models for each in model.engines if each.linked}


def _kill(context: StageContext) -> str | None:
    """Kills one engine core, and returns where; `None` if there is none on any host."""
    place = OF_THIS_NODE if context.address is not None else f"{context.served.folder}/"
    program = (PYTHON, "-m", "deployments.first_run.hosts.kill", ENGINE_CORE, place)
    hosts = hosts_of(context.address)
    # One at a time: only one may die.
    for host in [answer.host for answer in hosts.run((PYTHON, "-c", ""), _HOST_S)]:
        for answer in hosts.run(program, _HOST_S, host=host):
            told = answer.last_json() or {}
            if told.get("killed") is not None:
                return f"{host}, process {told['killed']}"
    return None


def _tell_hosts(context: StageContext) -> str | None:
    """Tells the agents of one host that its pod ends, as its hook does; returns why not."""
    hosts = hosts_of(context.address)
    names = [answer.host for answer in hosts.run((PYTHON, "-c", ""), _HOST_S)]
    environment = {"SLICEWISE_END_WITHIN_S": f"{_NOTICE_S}"}
    for answer in hosts.run(_TELL_AGENT, _NOTICE_S + _HOST_S, environment, names[0]):
        if answer.status != 0:
            return (
                f"{answer.host} could not be told ({answer.complaint()});"
                " set SLICEWISE_RUN_DIR to a folder of the host before `ray start`"
            )
    return None


def _deploy_fewer(context: StageContext) -> str | None:
    """Deploys the application with an engine fewer; returns why not, if it could not."""
    settings = yaml.safe_load(Path(context.served.config).read_text())
    deployment = settings["applications"][0]["args"]["models"][0]["deployments"][0]
    deployment["replicas"] -= 1
    path = context.scratch / "fewer.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    log = Path(context.served.log).read_text(errors="replace")
    found = re.search(r"View the dashboard at .*?((?:127\.0\.0\.1|localhost):\d+)", log)
    environment = next((process.environ() for process in processes_of(context.served)), None)
    if found is None or environment is None:
        return "Ray's dashboard, through which Serve deploys, was not found"
    # That of `serve run` has `local`, which is for a cluster that is started with it.
    environment = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("serve")), "deploy", str(path)],
        env={**environment, "RAY_DASHBOARD_ADDRESS": f"http://{found[1]}"},
        capture_output=True,
        text=True,
        timeout=max(1.0, context.left_s),
        check=False,
    )
    sys.stdout.write(done.stdout + done.stderr)
    return None if done.returncode == 0 else f"serve deploy: {done.stderr.strip()[-300:]}"


def _keep(context: StageContext, name: str, answers: Sequence[StreamedAnswer]) -> None:
    told: list[dict[str, Any]] = [
        asdict(answer) | {"longest_gap_s": answer.longest_gap_s} for answer in answers
    ]
    context.keep(name, json.dumps(told, indent=1))


def _ends(answers: Sequence[StreamedAnswer], num_tokens: int = _NUM_TOKENS) -> list[Measurement]:
    errors = [answer.error for answer in answers if answer.error is not None]
    whole = sum(len(answer.tokens) == num_tokens for answer in answers)
    longest_s = max(answer.longest_gap_s for answer in answers)
    return [
        Measurement(
            "streams that ended with an error",
            "0",
            f"{len(errors)} of {len(answers)}" + (f": {errors[0]}" if errors else ""),
            is_met=not errors,
        ),
        Measurement(
            "streams with all of their tokens",
            f"{len(answers)}",
            f"{whole}",
            is_met=whole == len(answers),
        ),
        Measurement("longest pause of a stream", "", f"{longest_s:.2f} s"),
    ]
