"""Turns the command line into a finished run with its scorecard.

It is the composition root of `slicewise loadtest`: everything is read and refused before anything
is sent.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.chaos.actors import HookActor, SimulationActor
from loadtest.chaos.runner import ChaosRunner
from loadtest.chaos.schedule import load_schedule
from loadtest.client.check_kind import CheckKind
from loadtest.client.prompt_source import find_prompts
from loadtest.client.server_models import choose_models
from loadtest.errors import ExitCode, LoadTestError
from loadtest.planned_request import Api
from loadtest.report.outputs import write_outputs
from loadtest.run.plan import PLAN_FILE, PROMPTS_FILE, RunPlan
from loadtest.run.supervisor import (
    INTERRUPTED,
    RunFailedError,
    RunParts,
    refuse_used_folder,
    run_load,
)
from loadtest.scorecard.prices import read_prices
from loadtest.scorecard.slo import read_slo
from loadtest.workload.build import Workload, build_workload
from loadtest.workload.spec import WorkloadSpec, workload_from_file

# As a shell counts a program that Ctrl-C ended.
INTERRUPTED_CODE = 130
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 256, 128


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The source of requests: exactly one of a rate, users, a trace or a workload's file.

    A rate beside a trace is what the trace is thinned to. Token counts are `None` where they were
    not given; a trace then has its own.
    """

    rate_per_s: float | None = None
    num_users: int | None = None
    trace: Path | None = None
    workload: Path | None = None
    burstiness: float = 1.0
    think_time_s: float = 0.0
    scale: float = 1.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    api: Api = Api.CHAT
    max_context_tokens: int | None = None

    def spec(self) -> WorkloadSpec:
        """The workload it stands for, within the context that the server has.

        Raises:
            LoadTestError: none, or several; a value or file that is not allowed.
        """
        spec = self._spec()
        if self.max_context_tokens is None:
            return spec
        return spec.model_copy(update={"max_context_tokens": self.max_context_tokens})

    def _spec(self) -> WorkloadSpec:
        given = {
            "rate": self.rate_per_s is not None and self.trace is None,
            "users": self.num_users is not None,
            "trace": self.trace is not None,
            "workload": self.workload is not None,
        }
        if sum(given.values()) != 1:
            named = ", ".join(name for name, is_given in given.items() if is_given) or "none"
            msg = f"{named} given; allowed: one of --rate, --users, --trace, --workload"
            raise LoadTestError(msg)
        if self.workload is not None:
            return workload_from_file(self.workload)
        if self.trace is not None:
            return WorkloadSpec.from_trace(
                self.trace,
                scale=self.scale,
                rate_per_s=self.rate_per_s,
                input_tokens=self.input_tokens,
                output_tokens=self.output_tokens,
                api=self.api,
            )
        input_tokens = self.input_tokens or DEFAULT_INPUT_TOKENS
        output_tokens = self.output_tokens or DEFAULT_OUTPUT_TOKENS
        if self.num_users is not None:
            return WorkloadSpec.from_users(
                self.num_users,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                think_time_s=self.think_time_s,
                api=self.api,
            )
        assert self.rate_per_s is not None, "exactly one was given"
        return WorkloadSpec.from_rate(
            self.rate_per_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            burstiness=self.burstiness,
            api=self.api,
        )


@dataclass(frozen=True, slots=True)
class LoadTestOptions:
    """The options of one load test. Paths are `None` where none was given.

    `models` may be empty: then all of the server. `sim_socket` is `None` for the usual one.
    """

    url: str
    source: LoadSource
    duration_s: float
    out_dir: Path
    models: Sequence[str] = ()
    warmup_s: float = 0.0
    drain_s: float = 60.0
    request_s: float = 600.0
    max_retries: int = 0
    num_workers: int = 1
    seed: int = 1
    check: CheckKind = CheckKind.NONE
    answers_file: Path | None = None
    slo: Path | None = None
    prices: Path | None = None
    chaos: Path | None = None
    sim_socket: Path | None = None
    api_key_env: str | None = None


def launch(
    options: LoadTestOptions, environ: Mapping[str, str], show: Callable[[str], None]
) -> int:
    """Runs the load test, writes its results, and returns the exit code of the command.

    `show` takes lines for the user who waits.

    Raises:
        LoadTestError: it cannot be run as asked. Nothing was sent.
    """
    level = None if options.slo is None else read_slo(options.slo)
    prices = None if options.prices is None else read_prices(options.prices)
    try:
        reason = run_options(options, environ, show)
    except RunFailedError as error:
        show(str(error))
        return ExitCode.FAILED
    if reason is not None:
        show(f"the run was cut short: {reason}")
    code = write_outputs(options.out_dir, level, prices)
    return INTERRUPTED_CODE if reason == INTERRUPTED else code


def run_options(
    options: LoadTestOptions, environ: Mapping[str, str], show: Callable[[str], None]
) -> str | None:
    """Runs it and leaves its records unjudged; returns why it was cut short, or `None`.

    Raises:
        LoadTestError: it cannot be run as asked. Nothing was sent.
        RunFailedError: its workers did not come up. Nothing was sent.
    """
    chaos = None
    if options.chaos is not None:
        actor = HookActor(SimulationActor(options.sim_socket or default_sim_socket()))
        chaos = ChaosRunner(load_schedule(options.chaos), actor, options.seed)
    api_key = read_api_key(options.api_key_env, environ)
    plan = _plan(options, api_key)
    # Built here as well as in each worker: a fault in it is reported before anything starts.
    built = build_workload(
        plan.workload, models=plan.models, duration_s=plan.duration_s, seed=plan.seed
    )
    refuse_used_folder(options.out_dir)
    _write_files(plan, options.out_dir, api_key, show)
    return run_load(plan, RunParts(options.out_dir, api_key, _offsets_s(built), chaos, show))


def read_api_key(name: str | None, environ: Mapping[str, str]) -> str | None:
    """The key in the variable of this name; `None` for none.

    Raises:
        LoadTestError: there is no such variable, or it is empty.
    """
    if name is None:
        return None
    key = environ.get(name)
    if not key:
        raise LoadTestError(f"api_key_env={name} is not set; allowed: a variable with the key")
    return key


def default_sim_socket() -> Path:
    """Returns where `slicewise sim up` listens by default."""
    return Path(tempfile.gettempdir()) / f"slicewise-sim-{os.getuid()}" / "control.sock"


def _plan(options: LoadTestOptions, api_key: str | None) -> RunPlan:
    spec = options.source.spec()
    # Models that the workload names need not be base models.
    requested = options.models or tuple(dict.fromkeys(entry.model for entry in spec.mix))
    return RunPlan.of(
        url=options.url.rstrip("/"),
        workload=spec,
        models=choose_models(options.url, api_key, requested),
        duration_s=options.duration_s,
        warmup_s=options.warmup_s,
        drain_s=options.drain_s,
        seed=options.seed,
        num_workers=options.num_workers,
        limits={"request_s": options.request_s, "max_retries": options.max_retries},
        check=options.check,
        answers_file=options.answers_file,
        api_key_env=options.api_key_env,
    )


def _offsets_s(built: Workload) -> list[float] | None:
    if built.num_users is not None:
        return None
    return [request.offset_s for request in built.requests if request.offset_s is not None]


def _write_files(
    plan: RunPlan, out_dir: Path, api_key: str | None, show: Callable[[str], None]
) -> None:
    prompts = find_prompts(plan.url, plan.models, api_key)
    guessed = [model for model, prompt in prompts.models.items() if not prompt.is_exact]
    if guessed:
        names = ", ".join(guessed)
        show(f"prompt lengths of {names} are estimates: the server's tokenizer did not answer")
    plan.write(out_dir / PLAN_FILE)
    (out_dir / PROMPTS_FILE).write_text(prompts.model_dump_json() + "\n", encoding="utf-8")
