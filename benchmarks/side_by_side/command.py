"""The part `side-by-side` of `python -m benchmarks`: measures, and writes records and page."""

import shlex
import sys
from collections.abc import Iterator, Sequence

from benchmarks.side_by_side.errors import RecordsDifferError
from benchmarks.side_by_side.loads import COMPARISONS, Comparison
from benchmarks.side_by_side.records import Missing, Pair, Records
from benchmarks.side_by_side.report import RECORDS, REPORT, write_report
from benchmarks.side_by_side.run import head_of, lacking, measure_pairs
from benchmarks.side_by_side.systems import start_of
from tests.e2e.application import PROJECT_ROOT


def compare(num_pairs: int, only: str | None) -> None:
    """Measures what the records lack and writes the page; exits with what is still missing.

    `only` are keys of comparisons, with commas between them; all by default.
    """
    try:
        chosen = _chosen(only)
        command = f"python -m benchmarks {shlex.join(sys.argv[1:])}"
        records = Records.open(RECORDS, head_of(PROJECT_ROOT, COMPARISONS, command))
    except (RecordsDifferError, ValueError) as error:
        advice = f"To begin anew, move {RECORDS.name} away."
        sys.exit(f"{error}\n{advice}" if isinstance(error, RecordsDifferError) else str(error))

    def note(entry: Pair | Missing) -> None:
        print("\n".join(_lines(entry)), flush=True)
        write_report(records)

    measure_pairs(records, num_pairs, chosen, start_of, note)
    write_report(records)
    print(f"written: {REPORT}")
    if lacks := list(lacking(records, num_pairs, chosen)):
        sys.exit("\n".join(f"missing: {key}: {why}" for key, why in lacks))


def _chosen(only: str | None) -> Sequence[Comparison]:
    if not only:
        return COMPARISONS
    by_key = {each.key: each for each in COMPARISONS}
    keys = only.split(",")
    if unknown := [key for key in keys if key not in by_key]:
        raise ValueError(f"no comparison {', '.join(unknown)}; allowed: {', '.join(by_key)}")
    return [by_key[key] for key in keys]


def _lines(entry: Pair | Missing) -> Iterator[str]:
    if isinstance(entry, Missing):
        yield f"{entry.at} {entry.comparison} {entry.turn + 1}: no {entry.system}: {entry.reason}"
        return
    for ours, theirs in zip(entry.ours.readings, entry.theirs.readings, strict=True):
        yield (
            f"{entry.at} {entry.comparison} {entry.turn + 1}, {ours.load}: "
            f"{ours.tokens_per_s:,.0f} tokens/s beside {theirs.tokens_per_s:,.0f}"
        )
