"""The part `side-by-side` of `python -m benchmarks`: measures, and writes records and page."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.side_by_side.errors import RecordsDifferError
from benchmarks.side_by_side.loads import COMPARISONS, Comparison
from benchmarks.side_by_side.records import Missing, Pair, Records
from benchmarks.side_by_side.report import RECORDS, REPORT, write_report
from benchmarks.side_by_side.run import head_of, lacking, measure_pairs
from benchmarks.side_by_side.systems import Start, start_of
from tests.e2e.application import PROJECT_ROOT


def compare(num_pairs: int, only: str | None) -> None:
    """Measures what the records lack and writes the page; exits with what is wrong or missing."""
    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}".strip()
    try:
        chosen = chosen_by(only)
        records = Records.open(RECORDS, head_of(PROJECT_ROOT, COMPARISONS, command))
    except RecordsDifferError as error:
        sys.exit(f"{error}\nTo begin anew, move {RECORDS.name} away.")
    except ValueError as error:
        sys.exit(str(error))
    go_on(records, num_pairs, chosen, start_of, REPORT)


def go_on(
    records: Records,
    num_pairs: int,
    chosen: Sequence[Comparison],
    start_of: Callable[[str], Start],
    page: Path,
) -> None:
    """Measures what these records lack; the page is written anew after each pair.

    Exits with what is still missing, if anything is.
    """

    def note(entry: Pair | Missing) -> None:
        print("\n".join(_lines(entry)), flush=True)
        write_report(records, page)

    measure_pairs(records, num_pairs, chosen, start_of, note)
    write_report(records, page)
    print(f"written: {page}")
    if lacks := list(lacking(records, num_pairs, chosen)):
        sys.exit("\n".join(f"missing: {key}: {why}" for key, why in lacks))


def chosen_by(only: str | None) -> Sequence[Comparison]:
    """Returns the comparisons of these keys, with commas between them; all for none.

    Raises:
        ValueError: there is none of that key.
    """
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
