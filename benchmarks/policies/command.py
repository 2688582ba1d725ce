"""The part `policies` of `python -m benchmarks`: runs what is not done yet, and writes the page."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.policies.jobs import Part, in_order, parts, together
from benchmarks.policies.records import (
    PolicyRecord,
    PolicyResults,
    append,
    of_code,
    read_lines,
    read_results,
    write_results,
)
from benchmarks.policies.report import RESULTS, write_report
from benchmarks.policies.run import Runner
from benchmarks.policies.sources import fingerprint


def compare_policies(
    lines: Path,
    traces: Path | None,
    *,
    only: str | None,
    cases: str | None,
    names: str | None,
    num_seeds: int | None,
    until: datetime.datetime | None,
) -> None:
    """Runs what the records of this code lack, in order, and publishes all of them.

    `only` has names of parts, `cases` of cases and `names` of policies, with commas between them;
    `num_seeds` leaves out later seeds. No job begins at `until` or after it. Exits with what is
    wrong.
    """
    try:
        chosen = chosen_parts(only)
    except ValueError as error:
        sys.exit(str(error))
    commit = head_commit()
    stored = read_results(RESULTS) if RESULTS.exists() else None
    kept = () if stored is None else stored.records
    done = of_code([*kept, *read_lines(lines)], fingerprint)
    lines.parent.mkdir(parents=True, exist_ok=True)
    runner = Runner(traces, commit, fingerprint)
    named, of_cases = ([] if each is None else each.split(",") for each in (names, cases))
    for job in in_order(chosen):
        if job in done or job.seed > (num_seeds or job.seed):
            continue
        if (named and job.policy not in named) or (of_cases and job.case not in of_cases):
            continue
        if until is not None and datetime.datetime.now(datetime.UTC) >= until:
            print(f"the time is over; `python -m benchmarks policies` goes on with {job}")
            break
        try:
            record = runner.run(job)
        except ValueError as error:
            print(f"left out: {error}", flush=True)
            continue
        append(lines, record)
        done[job] = record
        print(_told(record), flush=True)
    if done:
        publish(with_stored(list(done.values()), kept), commit)


def with_stored(new: Sequence[PolicyRecord], stored: Sequence[PolicyRecord]) -> list[PolicyRecord]:
    """Returns the new records, and of those that are stored what none of them is compared with.

    What is no part of the table any more is left out.
    """
    known = {job for part in parts() for job in part.jobs}
    kept = tuple(each for each in stored if each.job in known)
    for jobs in together(parts()):
        if any(each.job in jobs for each in new):
            kept = tuple(each for each in kept if each.job not in jobs)
    return [*new, *kept]


def publish(records: Sequence[PolicyRecord], commit: str) -> None:
    """Writes results and page of these records; `commit` is the one of the last of them."""
    place = {job: number for number, job in enumerate(in_order(parts()))}
    ordered = sorted(records, key=lambda each: place.get(each.job, len(place)))
    results = PolicyResults(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        python=platform.python_version(),
        records=tuple(ordered),
    )
    write_results(RESULTS, results)
    write_report(results)
    print(f"written: {RESULTS.name} and its page")


def chosen_parts(only: str | None) -> tuple[Part, ...]:
    """Returns the parts of these names, with commas between them; all for none.

    Raises:
        ValueError: there is none of that name.
    """
    by_name = {part.name: part for part in parts()}
    names = only.split(",") if only else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"no part {', '.join(unknown)}; allowed: {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def head_commit() -> str:
    """Returns the commit of the working tree; `-dirty` follows if files differ."""
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _told(record: PolicyRecord) -> str:
    cost = "" if record.cost_usd is None else f" {record.cost_usd:,.0f} USD"
    slo = "" if record.slo_ratio is None else f", {record.slo_ratio:.2%} within the objectives"
    knob = "" if record.value is None else f" at {record.value:g}"
    return (
        f"{record.case}, {record.world}, {record.policy}{knob}, seed {record.seed}:{cost}{slo} "
        f"({record.wall_s:.0f} s)"
    )
