"""The first run on real TPU hardware: what is there, how long an engine takes, and a capture of it.

    python -m scripts.first_tpu_run deployments/tpu/v6e-2x2-llama-3.1-8b.yaml --out first-run

On a machine without a TPU it goes as far as it can and says what is missing. It writes one folder
to send back: report.json (versions, chips, plan, timings, memory) and chips.json (the exporter's
raw answers). Weights and compilation are timed apart, and what compiles after them is counted. The
plan holds what FILE sets in engine_args and engine_env: keep secrets out of it.

The steps after `chips` start the engine of FILE alone, on this host, without Ray Serve: FILE has to
have one model on a slice of one host.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.engine_plan import plan_json, plan_serve_config
from serving.config.sections import load_yaml
from serving.config.vllm_args import installed_vllm_args
from serving.domain.slice_lifecycle import LoadStage
from serving.engine.load_stage import stages_reported_to
from serving.tpu.plan import EnginePlan

PACKAGES = ("vllm-tpu", "tpu_inference", "jax", "jaxlib", "libtpu", "torch", "ray", "slicewise")
_PROMPT_TOKENS, _OUTPUT_TOKENS = 512, 64


class MissingError(RuntimeError):
    """Something a later step needs is not here."""


def main() -> int:
    """Exit status: 0 a whole run, 1 it ended early and says where, 2 FILE is of no use."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a serve config with one vllm-tpu model")
    parser.add_argument("--out", type=Path, default=Path("first-run"), help="folder to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    raw = load_yaml(options.file.read_text(encoding="utf-8"))
    planned = plan_serve_config(raw, installed_vllm_args(), [options.file.parent / "models"])
    if planned.problems or len(planned.plans) != 1 or not planned.can_start:
        sys.stderr.write("\n".join(planned.problems or ("needed: one model that fits",)) + "\n")
        return 2
    (plan,) = planned.plans
    report: dict[str, Any] = {"plan": plan_json(plan), "is_complete": False}
    steps: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "host": host_facts,
        "chips": lambda: chips(options.out / "chips.json"),
        "devices": lambda: devices(plan),
        "engine": lambda: asyncio.run(run_engine(plan)),
        "chips_after": lambda: chips(options.out / "chips_after.json"),
    }
    try:
        for name, step in steps.items():
            print(f"{name} ...", flush=True)
            report[name] = step()
        report["is_complete"] = True
    except MissingError as error:
        report["missing"] = f"{name}: {error}"
        print(f"ended at {name}: {error}")
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.out / 'report.json'}; send the folder {options.out} back")
    return 0 if report["is_complete"] else 1


def versions() -> dict[str, str | None]:
    """The installed version of each package, `None` where there is none."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def host_facts() -> dict[str, Any]:
    """What this host is; of the environment only which TPU variables are set."""
    names = ("TPU_", "JAX_", "XLA_", "LIBTPU_", "MEGASCALE_", "VLLM_")
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "chip_files": sorted(str(path) for path in Path("/dev").glob("accel*"))
        + sorted(str(path) for path in Path("/dev/vfio").glob("[0-9]*")),
        "variables": sorted(name for name in os.environ if name.startswith(names)),
    }


def chips(path: Path) -> str:
    """The exporter's raw answers, from what runs on this host now."""
    command = [sys.executable, "-m", "deployments.cli", "tpu-exporter", "--dump-raw", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def devices(plan: EnginePlan) -> dict[str, Any]:
    """What JAX sees, asked of a process that ends: only one at a time may hold the chips.

    Raises:
        MissingError: no TPU, or another number of devices than the slice has.
    """
    for package in ("vllm-tpu", "libtpu"):
        if versions()[package] is None:
            raise MissingError(f"{package} is not installed; pip install vllm-tpu==0.32.0")
    program = (
        "import json, jax; ds = jax.devices(); print(json.dumps({'platform': ds[0].platform,"
        "'kind': ds[0].device_kind, 'count': len(ds), 'memory': (ds[0].memory_stats() or {})}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MissingError(f"JAX does not start: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["platform"] != "tpu":
        raise MissingError(f"JAX shows {found['platform']}, no TPU")
    if found["count"] != plan.requirements.shape.num_devices:
        raise MissingError(
            f"JAX shows {found['count']} devices,"
            f" the slice has {plan.requirements.shape.num_devices}"
        )
    return found


def load_times(started_s: float, compiling_s: float | None, ready_s: float) -> dict[str, Any]:
    """Seconds to a ready engine, and of them for weights and for compilation with warm-up.

    Arguments are moments on one clock; `compiling_s` of `None`: the worker did not tell, and the
    two are not known apart.
    """
    return {
        "ready_s": ready_s - started_s,
        "weights_s": None if compiling_s is None else compiling_s - started_s,
        "compile_s": None if compiling_s is None else ready_s - compiling_s,
    }


async def run_engine(plan: EnginePlan) -> dict[str, Any]:
    """Seconds to a ready engine, to a first token and per token, for one request alone.

    Raises:
        MissingError: the engine did not start, or it is over more than one host.
    """
    if plan.requirements.num_hosts > 1:
        raise MissingError("an engine over several hosts is started by `slicewise serve FILE`")
    os.environ.update(plan.settings.environment)
    # After the environment: what vLLM and tpu-inference read at import has to stand.
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    from serving.engine.vllm.engine import engine_config  # noqa: PLC0415

    arguments: dict[str, Any] = plan.settings.engine_args
    reached_s: dict[LoadStage, float] = {}

    def start() -> AsyncLLM:
        # With our worker, which tells when it has its weights, and our scheduler, whose numbers no
        # log of vLLM's knows.
        config = engine_config(plan.requirements.model, arguments)
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    started_s = time.monotonic()
    try:
        with stages_reported_to(lambda stage: reached_s.setdefault(stage, time.monotonic())):
            llm = await asyncio.to_thread(start)
    except (RuntimeError, ValueError, OSError) as error:
        raise MissingError(f"the engine does not start: {error}") from error
    try:
        found = load_times(started_s, reached_s.get(LoadStage.COMPILING), time.monotonic())
        await llm.collective_rpc("watch_compilations")
        config = llm.vllm_config
        found["num_blocks"] = config.cache_config.num_gpu_blocks
        found["block_size"] = config.cache_config.block_size
        vocab = config.model_config.get_vocab_size()
        params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
        for run in ("first_request", "second_request"):
            # Not the same prompt: the prefix cache would answer.
            first = 1000 if run == "first_request" else 2000
            tokens = [number % vocab for number in range(first, first + _PROMPT_TOKENS)]
            prompt = TokensPrompt(prompt_token_ids=tokens)
            asked_s = time.monotonic()
            arrivals_s = [
                time.monotonic() - asked_s async for _ in llm.generate(prompt, params, run)
            ]
            found[run] = {
                "ttft_s": arrivals_s[0],
                "tpot_s": (arrivals_s[-1] - arrivals_s[0]) / (_OUTPUT_TOKENS - 1),
            }
        # Programs that warm-up had missed: each made a request wait.
        found["compiled_after_warm_up"] = await llm.collective_rpc("num_compilations")
        return found
    finally:
        llm.shutdown()


if __name__ == "__main__":
    sys.exit(main())
