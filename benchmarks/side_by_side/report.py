"""The tables of `docs/results/benchmarks.md`, from the raw records beside it.

`python -m benchmarks.side_by_side.report` writes them anew from the records, without a run.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measured_part import with_measured
from benchmarks.side_by_side.cells import table
from benchmarks.side_by_side.engine_tables import engine_tables
from benchmarks.side_by_side.loads import Comparison
from benchmarks.side_by_side.paced_tables import paced_tables
from benchmarks.side_by_side.reading import Reading
from benchmarks.side_by_side.records import Records
from benchmarks.side_by_side.run import MAX_OTHER_CORES

REPORT = Path(__file__).resolve().parents[2] / "docs/results/benchmarks.md"
RECORDS = REPORT.with_suffix(".jsonl")
_REASON_CHARACTERS = 200


def write_report(records: Records, page: Path) -> None:
    """Puts the tables of the records into the page; raises as `updated`."""
    page.write_text(updated(page.read_text(encoding="utf-8"), records), encoding="utf-8")


def updated(page: str, records: Records) -> str:
    """Returns the page with the tables of the records in place of its old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    settings = records.head.settings
    naps, spins = (_named(settings, key) for key in ("vllm-naps", "vllm-spins"))
    with_paced = [each for each in settings if each not in (naps, spins)]
    parts = [_conditions(records), "### Pairs", _pairs(records), *_lacking(records)]
    parts += ["## With a paced engine", *paced_tables(records, with_paced)]
    parts += ["## Beside vLLM's own server, with vLLM's engine"]
    parts += engine_tables(records, naps, spins)
    return with_measured(page, lambda: "\n\n".join(parts))


def _named(settings: Sequence[Comparison], key: str) -> Comparison:
    return next(each for each in settings if each.key == key)


def _conditions(records: Records) -> str:
    head = records.head
    times = [each.at for each in records.all_pairs()]
    commits = ", ".join(dict.fromkeys(each.commit for each in records.all_pairs()))
    when = f"from {times[0]} to {times[-1]}" if times else "not yet"
    versions = ", ".join(f"{name} {number}" for name, number in head.versions.items())
    return (
        f"Measured {when} by `{head.command}` at commit {commits or head.commit}: {head.machine}, "
        f"Python {head.python}, {versions}. Median of the pairs (smallest to largest); in square "
        f"brackets the interval that has the true median with a probability of 95 %."
    )


def _pairs(records: Records) -> str:
    head = ("key", "ours", "theirs", "pairs", f"loads beside more than {MAX_OTHER_CORES} cores")
    return table((*head, "failed requests, ours", "theirs"), _pair_rows(records))


def _pair_rows(records: Records) -> list[list[str]]:
    rows = []
    for comparison in records.head.settings:
        pairs = records.pairs(comparison.key)
        sides = [[pair.ours for pair in pairs], [pair.theirs for pair in pairs]]
        readings = [[each for visit in side for each in visit.readings] for side in sides]
        together = readings[0] + readings[1]
        disturbed = sum(each.other_cores > MAX_OTHER_CORES for each in together)
        failed = [_failed(_errors(side)) for side in readings]
        row = [comparison.key, comparison.ours, comparison.theirs, str(len(pairs))]
        rows.append([*row, f"{disturbed} of {len(together)}", *failed])
    return rows


def _errors(readings: Sequence[Reading]) -> Counter[str]:
    total: Counter[str] = Counter()
    for reading in readings:
        total.update(reading.errors)
    return total


def _failed(errors: Counter[str]) -> str:
    if not errors:
        return "0"
    words = "; ".join(f"{count} {_one_line(kind)}" for kind, count in errors.most_common())
    return f"{errors.total()} ({words})"


def _lacking(records: Records) -> list[str]:
    """What a reader has to know before the tables; nothing where every pair is there."""
    lines = []
    for comparison in records.head.settings:
        count, wanted = len(records.pairs(comparison.key)), comparison.num_pairs
        if count < wanted:
            missing = records.missing(comparison.key, wanted)
            why = "" if missing is None else f" {missing.summary}"
            lines.append(f"- {comparison.key}: {count} of {wanted} pairs.{why}")
    return ["**Pairs are missing. This is no result yet.**", "\n".join(lines)] if lines else []


def _one_line(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")[:_REASON_CHARACTERS]


if __name__ == "__main__":
    write_report(Records.read(RECORDS), REPORT)
