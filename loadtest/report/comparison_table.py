"""Prints a comparison in 80 columns: first what it is worth, then a row per metric."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.scorecard.compare import (
    Comparison,
    ComparisonOutcome,
    format_interval,
    format_value,
)

_STYLES = {ComparisonOutcome.BETTER: "green", ComparisonOutcome.WORSE: "red"}
_WORDS = {
    ComparisonOutcome.BETTER: "better",
    ComparisonOutcome.WORSE: "worse",
    ComparisonOutcome.NO_DIFFERENCE_SHOWN: "not shown",
    ComparisonOutcome.NOT_JUDGED: "not judged",
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints `comparison` as wide as `console` is, up to 100 columns."""
    width = min(console.width, 100)

    def write_line(words: str, style: str = "") -> None:
        console.print(Text(words, style=style), width=width)

    write_line(f"A {comparison.a}")
    write_line(f"B {comparison.b}")
    if comparison.invalid:
        write_line("INVALID: the numbers describe the client, nothing is judged", "bold magenta")
        for reason in comparison.invalid:
            write_line(f"  {reason}")
    for caution in comparison.cautions:
        write_line(f"warning: {caution}", "yellow")
    console.print(_table(comparison), width=width, highlight=False)


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for column in ("A", "B", "95 % interval of B less A", "B is"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in comparison.differences:
        table.add_row(
            found.metric,
            format_value(found.a, found.unit),
            format_value(found.b, found.unit),
            format_interval(found),
            Text(_WORDS[found.outcome], style=_STYLES.get(found.outcome, "")),
        )
    return table
