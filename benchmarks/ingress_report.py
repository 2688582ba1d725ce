"""The tables of `docs/results/ingress.md`, from the record of a run beside it.

`python -m benchmarks.ingress_report` writes them anew from the record, without a run.
"""

import datetime
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.ingress import TPOT_MS, TTFT_MS, Disturbance, Phase, Run
from benchmarks.ingress_disturbances import Kind
from benchmarks.ingress_polite import NUM_STREAMS, OUTPUT_TOKENS
from benchmarks.measured_part import with_measured

REPORT = Path(__file__).resolve().parents[1] / "docs/results/ingress.md"
RECORD = REPORT.with_suffix(".json")
COMMAND = "python -m benchmarks ingress"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """A run, and what has to be known to read it."""

    date: str
    commit: str
    command: str
    machine: str
    python: str
    run: Run


def present_commit() -> str:
    """Returns the commit that is checked out; `-dirty` follows if files differ from it."""
    ask_git = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return subprocess.run(ask_git, capture_output=True, text=True, check=True).stdout.strip()


def record_of(run: Run, commit: str) -> Record:
    """Returns the record of a run that was made now, here, at this commit."""
    return Record(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        command=COMMAND,
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        python=platform.python_version(),
        run=run,
    )


def read_record() -> Record:
    """Returns the record of the last run."""
    return msgspec.json.decode(RECORD.read_bytes(), type=Record)


def write_record(record: Record) -> None:
    """Writes `RECORD`."""
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def write_report() -> None:
    """Puts the tables of `RECORD` into `REPORT`; raises as `updated`."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, read_record()), encoding="utf-8")


def updated(page: str, record: Record) -> str:
    """Returns the page with the tables of the record in place of its old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    all_of = record.run.disturbances
    tables = (_conditions(record), _ratios(all_of), _became(all_of), _server(all_of))
    return with_measured(page, lambda: "\n\n".join(tables))


def _conditions(record: Record) -> str:
    run = record.run
    fewest, most = run.prompt_tokens
    return (
        f"Measured on {record.date}, {record.machine}, Python {record.python}, commit "
        f"{record.commit}, by `{record.command}`.\n\n"
        f"The ingress said at its start: {run.allowed.max_connections:,} connections accepted, "
        f"{run.allowed.served:,} served, {run.allowed.header_timeout_s} s for a head. "
        f"{NUM_STREAMS} polite streams of {fewest} to {most} prompt and {OUTPUT_TOKENS} output "
        f"tokens, at {TTFT_MS:g} ms and then {TPOT_MS:g} ms a token; {run.scale.num_pairs} pairs "
        f"of phases for each disturbance, in each of which new requests begin for "
        f"{run.scale.window_s:g} s."
    )


def _ratios(all_of: Sequence[Disturbance]) -> str:
    lines = [
        "| disturbed by | TTFT p50, ratio | TTFT p99, ratio | p50 / p99 ms undisturbed "
        "| p50 / p99 ms disturbed | whole, undisturbed / disturbed | refused tries | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in all_of:
        undisturbed = [pair.undisturbed for pair in each.pairs]
        disturbed = [pair.disturbed for pair in each.pairs]
        refused = _total(phase.refusals for phase in undisturbed + disturbed)
        failed = _total(phase.failures for phase in undisturbed + disturbed)
        whole = f"{_num_whole(undisturbed)} / {_num_whole(disturbed)}"
        lines.append(
            f"| {_name(each)} | {_ratio(each, 0)} | {_ratio(each, 1)} | {_ttft(undisturbed)} "
            f"| {_ttft(disturbed)} | {whole} | {_counted(refused)} | {_counted(failed)} |"
        )
    return "\n".join(lines)


def _became(all_of: Sequence[Disturbance]) -> str:
    lines = ["| disturbing requests, all pairs | what became of them |", "|---|---|"]
    for each in all_of:
        became = _total(pair.became for pair in each.pairs)
        lines.append(f"| {_name(each)} | {_counted(became)} |")
    return "\n".join(lines)


def _server(all_of: Sequence[Disturbance]) -> str:
    lines = [
        "| disturbed by | gateway's longest turn ms, before / disturbed "
        "| longest gap of a stream ms, undisturbed / disturbed "
        "| gateway MiB before / most / after | HAProxy MiB before / most / after "
        "| sockets' buffers MiB, undisturbed / disturbed |",
        "|---|---|---|---|---|---|",
    ]
    for each in all_of:
        undisturbed = [pair.undisturbed for pair in each.pairs]
        disturbed = [pair.disturbed for pair in each.pairs]
        turn = _most(disturbed, lambda phase: phase.gateway_turn_ms)
        lines.append(
            f"| {_name(each)} | {undisturbed[0].gateway_turn_ms:,.0f} / {turn} "
            f"| {_most(undisturbed, _gap_ms)} / {_most(disturbed, _gap_ms)} "
            f"| {_memory(each, 'gateway')} | {_memory(each, 'HAProxy')} "
            f"| {_most(undisturbed, lambda phase: phase.tcp_mib)} / "
            f"{_most(disturbed, lambda phase: phase.tcp_mib)} |"
        )
    return "\n".join(lines)


def _name(each: Disturbance) -> str:
    if each.kind in (Kind.BODIES, Kind.SLOW_BODIES):
        return f"{each.count} {each.kind}, of {each.body_bytes / _MIB:.0f} MiB each"
    return f"{each.count:,} {each.kind}"


def _ratio(each: Disturbance, place: int) -> str:
    """The median of the pairs and their range; `-` where no pair has one."""
    ratios = sorted(
        pair.disturbed.ttft_ms[place] / pair.undisturbed.ttft_ms[place]
        for pair in each.pairs
        if pair.disturbed.ttft_ms is not None and pair.undisturbed.ttft_ms is not None
    )
    if not ratios:
        return "-"
    return f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _ttft(phases: Iterable[Phase]) -> str:
    known = [phase.ttft_ms for phase in phases if phase.ttft_ms is not None]
    if not known:
        return "-"
    return " / ".join(f"{statistics.median(values):,.0f}" for values in zip(*known, strict=True))


def _num_whole(phases: Iterable[Phase]) -> int:
    return sum(phase.num_whole for phase in phases)


def _total(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _counted(counts: Counter[str]) -> str:
    named = [f"{count:,} {_escaped(name)}" for name, count in sorted(counts.items()) if count]
    return ", ".join(named) or "0"


def _escaped(name: str) -> str:
    return name.replace("|", "\\|").replace("\n", " ")


def _gap_ms(phase: Phase) -> float:
    return phase.gap_ms or 0.0


def _most(phases: Iterable[Phase], figure: Callable[[Phase], float]) -> str:
    return f"{max(map(figure, phases)):,.0f}"


def _memory(each: Disturbance, role: str) -> str:
    phases = [phase for pair in each.pairs for phase in (pair.undisturbed, pair.disturbed)]
    most = max(phase.memory_mib[role] for phase in phases)
    before, after = each.memory_before_mib[role], each.memory_after_mib[role]
    return f"{before:,.0f} / {most:,.0f} / {after:,.0f}"


if __name__ == "__main__":
    write_report()
