"""`make bench`: Slicewise beside others at the same work, written to `docs/results/benchmarks.md`.

That is the part `side-by-side`. `--pairs` says how many pairs there are to be in its records, and
`--only` of which comparisons. The other parts run where they are named: `pause`, `calibration` and
`clients` write a page of that name in `docs/results`; `--guidellm` names guidellm's command,
without which it is left out of `clients`. `metrics` only prints. `provisioner` takes three
quarters of an hour and needs `KUBEBUILDER_ASSETS`, `ingress` half an hour. `requests` prints what a
request costs besides its tokens; `--base` names another checkout, whose gateway is measured beside.
`request-start` prints what of it comes before the first token in the whole application.
`dispatch` replays a trace of conversations, which `--trace` names, in simulated time, and prints.
`dispatch-loads` does so with made-up loads, and an engine that comes to a long line. `choice`
prints what choosing an engine costs.
`conversations` sends some to real gateways and engines, and writes the page of that name; `--only`
is `paced`, beside which the simulation is held, or `vllm`, beside a07807c. `one-fleet` simulates
two models that have chips together, and one with slices of two shapes; `--only` is `quotas` or
`shapes`. It writes the page of that name.

`policies` simulates autoscaling policies beside each other, for hours, and writes the page of that
name. It goes on where it was broken off: `--lines` is the file of its records. `--traces` is the
folder of the recorded traces, without which their days are left out; `--only` names parts of the
table, `--cases` its days, `--names` policies, `--seeds` how many seeds, `--until` an instant after
which nothing begins. `steady` tries, with the same `--traces`, how many slices each case would take
at a load that never changes, and writes the page `steady-load`.
"""

import argparse
import asyncio
import datetime
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import uvloop

from benchmarks import (
    calibration,
    calibration_report,
    choice_cost,
    clients,
    clients_report,
    dispatch_loads,
    dispatch_trace,
    floods,
    ingress,
    ingress_report,
    metrics,
    metrics_share,
    pause,
    pause_report,
    provisioner,
    provisioner_report,
    request_cost,
    request_start,
)
from benchmarks.conversations.command import run_parts
from benchmarks.ingress_disturbances import Kind
from benchmarks.one_fleet import report as one_fleet_report
from benchmarks.policies import steady
from benchmarks.policies.command import compare_policies
from benchmarks.side_by_side.command import compare
from benchmarks.side_by_side.loads import NUM_PAIRS

_SIDE_BY_SIDE = "side-by-side"
_PARTS = (
    *(_SIDE_BY_SIDE, "pause", "metrics", "calibration", "clients", "provisioner", "ingress"),
    *("requests", "request-start", "dispatch", "dispatch-loads", "choice", "floods", "policies"),
    *("conversations", "one-fleet", "steady"),
)


def _run_pause() -> None:
    pause_report.write_report(uvloop.run(pause.run()))
    print(f"written: {pause_report.REPORT}")


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


def _run_dispatch(trace: Path, skip: int, count: int | None) -> None:
    rows = dispatch_trace.read_trace(trace, skip, count)
    outcomes = []
    for num_gateways in (1, 4, 16):
        known = (dispatch_trace.ALL_KNOWN,) if num_gateways == 1 else ()
        for kind in (*dispatch_trace.KINDS, *known):
            outcomes.append(dispatch_trace.run(kind, num_gateways, rows))
            print(dispatch_trace.table(outcomes[-1:]), flush=True)
    print(dispatch_trace.table(outcomes))
    print(f"one cache of all engines' size would have found {dispatch_trace.pooled(rows):.3f}")
    least = ", ".join(f"{each:.2f}" for each in dispatch_trace.least_ttft_s(rows))
    print(f"no way to choose comes below p50, p90 and p99 of {least} s")


def main() -> None:
    """Runs one part, in a session of its own (see `servers`)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("part", nargs="?", choices=_PARTS, default=_SIDE_BY_SIDE)
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="of each comparison")
    parser.add_argument("--only", help="keys of comparisons, or parts of a part")
    parser.add_argument("--base", type=Path, help="another checkout, for `requests`")
    parser.add_argument("--trace", type=Path, help="of Mooncake's form, for `dispatch`")
    parser.add_argument("--skip", type=int, default=0, help="so many of its requests")
    parser.add_argument("--count", type=int, help="take so many of the others, not all")
    parser.add_argument("--traces", type=Path, help="folder of recorded traces, for `policies`")
    parser.add_argument("--lines", type=Path, default=Path(".bench/policies.jsonl"))
    parser.add_argument("--cases", help="of `policies`, with commas between them")
    parser.add_argument("--names", help="policies of `policies`, likewise")
    parser.add_argument("--seeds", type=int, help="so many of each part of `policies`")
    parser.add_argument("--until", type=datetime.datetime.fromisoformat, help="2026-11-26T23:10Z")
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), help="its command")
    given = parser.parse_args()
    if os.getpid() != os.getsid(0):
        os.setsid()
    # Ended so, it ends what it has started: by itself Python would leave that behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if given.part == _SIDE_BY_SIDE:
        compare(given.pairs, given.only)
    if given.part == "pause":
        _run_pause()
    if given.part == "metrics":
        print(metrics.report(uvloop.run(metrics.run())))
        print(metrics_share.report(uvloop.run(metrics_share.run())))
    if given.part == "calibration":
        _run_calibration()
    if given.part == "clients":
        _run_clients(given.guidellm)
    if given.part == "provisioner":
        _run_provisioner()
    if given.part == "requests":
        print(request_cost.report(uvloop.run(request_cost.run(given.base))))
    if given.part == "request-start":
        print("\n".join(request_start.report(request_start.run())))
    if given.part == "ingress":
        _run_ingress()
    if given.part == "dispatch-loads":
        print(dispatch_loads.HEAD)
        dispatch_loads.outcomes(lambda outcome: print(dispatch_loads.row(outcome), flush=True))
        print(dispatch_loads.LATE_HEAD)
        for kind in ("fewest requests", "room and cache"):
            print(dispatch_loads.late_row(dispatch_loads.late_engine(kind)), flush=True)
    if given.part == "floods":
        print(floods.HEAD)
        floods.rows(lambda row: print(row, flush=True))
    if given.part == "policies":
        compare_policies(
            given.lines,
            given.traces,
            only=given.only,
            cases=given.cases,
            names=given.names,
            num_seeds=given.seeds,
            until=given.until,
        )
    if given.part == "steady":
        steady.measure(given.traces, lambda line: print(line, flush=True))
    if given.part == "conversations":
        run_parts(given.only, lambda line: print(line, flush=True))
    if given.part == "one-fleet":
        one_fleet_report.run_parts(given.only, lambda line: print(line, flush=True))
    if given.part == "choice":
        print(choice_cost.table(choice_cost.run()))
    if given.part == "dispatch":
        if given.trace is None:
            parser.error("--trace names the trace for dispatch")
        _run_dispatch(given.trace, given.skip, given.count)


if __name__ == "__main__":
    main()
