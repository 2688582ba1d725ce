"""The tables of `docs/results/capacity.md`: what each system carried, where it broke, its CPU."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.capacity import MAX_OTHER_CORES, Step
from benchmarks.measured_part import with_measured
from benchmarks.servers import REST

REPORT = Path(__file__).resolve().parents[1] / "docs/results/capacity.md"
_CLIENT = "client"


def write_report(steps: Sequence[Step]) -> None:
    """Puts the tables into `REPORT`; raises as `updated`."""
    REPORT.write_text(updated(REPORT.read_text(encoding="utf-8"), steps), encoding="utf-8")


def updated(page: str, steps: Sequence[Step]) -> str:
    """The page with the tables of `steps` in place of its old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    tables = "\n\n".join((_conditions(), _knees(steps), _ladder(steps), _cpu(steps)))
    return with_measured(page, lambda: tables)


def _conditions() -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"Measured on {today}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}."
    )


def _knees(steps: Sequence[Step]) -> str:
    lines = [
        "| system | round | streams carried | tokens/s | first step not carried | missed there |",
        "|---|---|---|---|---|---|",
    ]
    for system in dict.fromkeys(step.system for step in steps):
        for turn in sorted({step.turn for step in steps}):
            ladder = [step for step in steps if (step.system, step.turn) == (system, turn)]
            lines += [_knee(system, turn, ladder)] if ladder else []
    return "\n".join(lines)


def _knee(system: str, turn: int, ladder: Sequence[Step]) -> str:
    ordered = sorted(ladder, key=lambda step: step.streams)
    broken = next((step for step in ordered if not step.is_carried), None)
    carried = [step for step in ordered if broken is None or step.streams < broken.streams]
    top = f"{carried[-1].streams} | {carried[-1].tokens_per_s:,.0f}" if carried else "0 |"
    end = "none |" if broken is None else f"{broken.streams} | {', '.join(broken.misses)}"
    return f"| {system} | {turn + 1} | {top} | {end} |"


def _ladder(steps: Sequence[Step]) -> str:
    lines = [
        "| system | streams | round | tokens/s | of offered | TTFT p50 / p99 ms "
        "| TPOT p50 / p99 ms | gaps p50 / p99 ms | tokens a chunk | whole / failed "
        "| others' cores | client |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    systems = list(dict.fromkeys(step.system for step in steps))
    for step in sorted(steps, key=lambda each: (systems.index(each.system), each.streams)):
        share = step.tokens_per_s / step.offered_tokens_per_s
        disturbed = " (disturbed)" if step.other_cores > MAX_OTHER_CORES else ""
        client = "; ".join(step.client_faults) or "valid"
        lines.append(
            f"| {step.system} | {step.streams} | {step.turn + 1} "
            f"| {step.tokens_per_s:,.0f} | {share:.0%} "
            f"| {_pair(step.ttft_ms)} | {_pair(step.tpot_ms)} | {_pair(step.gap_ms)} "
            f"| {step.tokens_per_chunk:.2f} "
            f"| {step.ok} / {_failed(step)} | {step.other_cores:.2f}{disturbed} | {client} |"
        )
    return "\n".join(lines)


def _pair(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:,.1f} / {values[1]:,.1f}"


def _failed(step: Step) -> str:
    if not step.errors:
        return "0"
    total = sum(count for _, count in step.errors)
    return f"{total} ({'; '.join(f'{count} {kind}' for kind, count in step.errors)})"


def _cpu(steps: Sequence[Step]) -> str:
    """CPU at the largest number of streams that every system carried: it depends on the load."""
    systems = list(dict.fromkeys(step.system for step in steps))
    carried = [
        {step.streams for step in steps if step.system == system and step.is_carried}
        for system in systems
    ]
    common = set.intersection(*carried) if carried else set()
    if not common:
        return "No number of streams was carried by every system: CPU is not compared."
    lines = [
        "| system | streams | round | CPU µs per token | client | rest of Ray |",
        "|---|---|---|---|---|---|",
    ]
    at_common = [step for step in steps if step.streams == max(common)]
    for step in sorted(at_common, key=lambda each: systems.index(each.system)):
        used = dict(step.cpu_us_per_token)
        client, rest = used.pop(_CLIENT), used.pop(REST, 0.0)
        parts = ", ".join(f"{role} {micros:.0f}" for role, micros in used.items())
        lines.append(
            f"| {step.system} | {step.streams} | {step.turn + 1} "
            f"| {sum(used.values()):.0f} ({parts}) | {client:.0f} | {rest:.0f} |"
        )
    return "\n".join(lines)
