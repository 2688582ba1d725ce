"""Stages `exporter` and `hbm`: what the chips report beside an engine, and the cache they hold."""

import json
import re
import time
from pathlib import Path
from typing import Any

from deployments.engine_plan import SHIPPED_FACTS, plan_deployment, plan_json
from deployments.first_run.context import StageContext
from deployments.first_run.hosts.reach import PYTHON, HostAnswer, hosts_of
from deployments.first_run.order import RunStage
from deployments.first_run.requests.asking import Streams
from deployments.first_run.requests.prompts import PROMPTS
from deployments.first_run.results import Measurement, StageResult, judged, skipped
from deployments.first_run.stages.served_models import RunModel, run_model
from serving.config.slices import SliceConfig
from serving.slices.probe import SIMULATED_VARIABLE
from serving.tpu.chips import METRICS_PORTS, metrics_ports

_CAPTURE = (PYTHON, "-m", "deployments.first_run.hosts.capture_here")
_CAPTURE_S = 15.0
_ASKED_S = 30.0
# Whether a host's chips are made up: by `serving.engine.tpu_sim`, or for the probe alone.
_IS_SIMULATED = (
    PYTHON,
    "-c",
    "import os, sys; sys.exit(os.environ.keys().isdisjoint("
    f"('SLICEWISE_TPU_SIM', '{SIMULATED_VARIABLE}')))",
)
_NUM_STREAMS, _NUM_TOKENS = 8, 128
_DUTY, _USED, _CHIPS = "tpu_duty_cycle_ratio", "tpu_hbm_used_bytes", "tpu_chips_detected"
# As vLLM's own log has it, once an engine.
_CACHE_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_TOLERANCE = 0.05


def exporter(context: StageContext) -> StageResult:
    """Captures every host idle with an engine on it, and while requests run."""
    hosts = hosts_of(context.address)
    model = run_model(context)
    environment = _runtimes(model)
    idle = hosts.run(_CAPTURE, _CAPTURE_S, environment)
    context.keep("idle.json", _text(idle))
    # No more than this model may hold at once, and long enough for a capture.
    streams = Streams(
        context.served.url,
        model.name,
        PROMPTS[:_NUM_STREAMS],
        _NUM_TOKENS,
        context.left_s,
        has_alternatives=not model.is_paced,
    )
    has_begun = streams.wait_begun(time.monotonic() + context.left_s / 2)
    busy = hosts.run(_CAPTURE, _CAPTURE_S, environment)
    context.keep("busy.json", _text(busy))
    answers = streams.wait(context.until_s)
    errors = [answer.error for answer in answers if answer.error is not None]
    measurements = [
        Measurement(
            "streams beside it",
            "all end well",
            errors[0] if errors else f"{len(answers)} did",
            is_met=not errors and has_begun,
        )
    ]
    are_real = model.slice is not None and not _are_simulated(context)
    for answer in busy:
        measurements += measured_on_host(answer, model.slice, are_real=are_real)
    return judged(RunStage.EXPORTER, measurements)


def _are_simulated(context: StageContext) -> bool:
    """Whether the chips of a host are made up; of all then, since one engine is on them."""
    answers = hosts_of(context.address).run(_IS_SIMULATED, _ASKED_S)
    return any(answer.status == 0 for answer in answers)


def _runtimes(model: RunModel) -> dict[str, str]:
    """Returns what tells the exporter of every engine on a host; nothing where there is one."""
    if model.slice is None or model.slice.num_engines == 1:
        return {}
    ports = metrics_ports(model.slice.shape, model.slice.num_engines)
    return {METRICS_PORTS: ",".join(map(str, ports))}


def measured_on_host(
    answer: HostAnswer, wanted: SliceConfig | None, *, are_real: bool = True
) -> list[Measurement]:
    """Returns what a capture beside streams shows, of a host of `wanted`. Pure.

    Chips that are real and of which no source tells are a fault. Where engines share a host, each
    of its chips has to be in use: else two engines have one chip, or the exporter takes the chips
    of two for the same.
    """
    told = answer.last_json()
    if told is None:
        return [
            Measurement(f"capture on {answer.host}", "an answer", answer.complaint(), is_met=False)
        ]
    readings = told["capture"]["readings"]
    sources = ", ".join(f"{each['collector']} {each['code']}" for each in readings)
    found = [Measurement(f"capture on {answer.host}", "an answer", sources, is_met=True)]
    duty = told["values"].get(_DUTY, [])
    if not any(told["values"].get(_CHIPS, [])) and not duty:
        what = f"chips on {answer.host}"
        if wanted is not None and are_real:
            words = "no source tells of any; is libtpu's metrics service reached?"
            return [*found, Measurement(what, "told of", words, is_met=False)]
        return [*found, Measurement(what, "", "none: chip capture is skipped")]
    found.append(
        Measurement(
            f"busiest chip on {answer.host}",
            "above 0",
            f"{max(duty):.0%}" if duty else "no duty cycle told",
            is_met=bool(duty) and max(duty) > 0,
        )
    )
    used = told["values"].get(_USED, [])
    words = f"{max(used) / 2**30:.1f} GiB" if used else "not told"
    found.append(Measurement(f"memory used of the fullest chip on {answer.host}", "", words))
    if wanted is not None and wanted.num_engines > 1:
        num_chips, num_used = wanted.shape.chips_per_host, sum(each > 0 for each in used)
        found.append(
            Measurement(
                f"chips on {answer.host} with memory in use, over all engines",
                f"{num_chips}",
                f"{num_used}",
                is_met=num_used == num_chips,
            )
        )
    return found


def _text(answers: list[HostAnswer]) -> str:
    told: list[dict[str, Any]] = [
        {"host": answer.host, "told": answer.last_json(), "errors": answer.errors[-2000:]}
        for answer in answers
    ]
    return json.dumps(told, indent=1)


def hbm(context: StageContext) -> StageResult:
    """Compares the tokens that the cache has room for with those of the plan."""
    model = run_model(context)
    if not model.config.is_on_tpu or model.slice is None:
        return skipped(RunStage.HBM, "no chips: there is no plan of their memory")
    plan = plan_deployment(
        model.config, model.config.deployments[0], [context.file.parent / "models", SHIPPED_FACTS]
    )
    context.keep("plan.json", json.dumps(plan_json(plan), indent=1))
    text = Path(context.served.log).read_text(errors="replace")
    told = [int(found.replace(",", "")) for found in _CACHE_TOKENS.findall(text)]
    if plan.budget is None:
        return skipped(RunStage.HBM, f"the plan is not counted: {plan.uncounted}", told=told)
    if _are_simulated(context):
        return skipped(RunStage.HBM, "simulated chips have no memory of their own", told=told)
    wanted = plan.budget.cache_tokens
    measurements = [
        Measurement(
            "tokens in the key-value cache",
            f"{wanted} within {_TOLERANCE:.0%}",
            ", ".join(map(str, told)) or "not told in the application's log",
            is_met=bool(told) and all(abs(each / wanted - 1) <= _TOLERANCE for each in told),
        )
    ]
    return judged(RunStage.HBM, measurements, plan=wanted, told=told)
