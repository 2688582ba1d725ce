"""Prints tables for people as plain lines: one line a row, however narrow the terminal is.

Does not own what is in them.
"""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

# No line of ours is as long, so that rich folds none.
_UNFOLDED = 100_000


def printable(value: object) -> str:
    """Returns the value as text, `-` for `None`.

    What came from elsewhere may not move the cursor or colour the terminal.
    """
    text = "-" if value is None else str(value)
    return "".join(c if c.isprintable() else "?" for c in text)


def build_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], num_text_columns: int
) -> Table:
    """Returns a table without lines; the columns after the first ones hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, heading in enumerate(headings):
        justify: JustifyMethod = "left" if number < num_text_columns else "right"
        table.add_column(heading, justify=justify)
    for row in rows:
        # Text, because rich would read its markup in what came from elsewhere.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def plain_lines(report: RenderableType) -> list[str]:
    """Returns the report as text without colours."""
    console = Console(file=io.StringIO(), width=_UNFOLDED, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(report, soft_wrap=True)
    return [line.rstrip() for line in captured.get().splitlines()]
