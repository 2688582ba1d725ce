"""Defines `slicewise batches`: how far the batches of a key's tenant are, and what went wrong.

Owns the command line and the table. What it reads is what OpenAI's clients read.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.status.durations import format_duration
from deployments.status.gateway import (
    DEFAULT_URL,
    ApiKeyOption,
    FleetUnavailableError,
    fetch_batches,
)
from deployments.terminal import build_table, plain_lines, printable

_PERIOD_S = 2.0
_UNUSABLE = 2
_BAR_WIDTH = 24
_HEADER = (
    "BATCH",
    "STATE",
    "PROGRESS",
    "LINES",
    "FAILED",
    "TOKENS",
    "CHIP-S",
    "USD",
    "AGE",
    "LEFT",
)
_NUM_TEXTS = 3
# Of the faults of one file the first are shown.
_MOST_FAULTS = 5
_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class _Reported(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ReportedCounts(_Reported):
    """The lines of one batch: all, those with status 200, and the other ones that are done."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class ReportedUsage(_Reported):
    """The tokens of the answers of one batch."""

    total_tokens: int = 0


class ReportedCost(_Reported):
    """What the lines of one batch have cost on engines; `usd` is `None` without a price."""

    chip_seconds: float = 0.0
    usd: float | None = None


class ReportedFault(_Reported):
    """What is wrong with a line of a file; `line` is `None` for the whole file."""

    code: str | None = None
    line: int | None = None
    message: str | None = None


class ReportedFaults(_Reported):
    """What is wrong with a file."""

    data: tuple[ReportedFault, ...] = ()


class ReportedBatch(_Reported):
    """One batch, as OpenAI's clients read it. Times are Unix seconds."""

    id: str
    status: str
    created_at: int
    expires_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    request_counts: ReportedCounts = ReportedCounts()
    usage: ReportedUsage = ReportedUsage()
    cost: ReportedCost | None = None
    errors: ReportedFaults | None = None

    @property
    def ended_at(self) -> int | None:
        """When it ended; `None` if it has not."""
        ends = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((end for end in ends if end is not None), None)


class ReportedBatches(_Reported):
    """The newest batches of a tenant."""

    data: tuple[ReportedBatch, ...]
    has_more: bool = False


def batches_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The newest so many.")] = 20,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", help="Print it again every 2 s until all have ended.")
    ] = False,
) -> None:
    """Show the batches of the API key's tenant: state, progress, lines, tokens, cost and time left.

    Exits with 2 if no gateway answers, or none that serves batches.
    """

    def fetch() -> str:
        return fetch_batches(url, limit, api_key, timeout_s)

    try:
        if is_watching:
            _watch(lambda: parse_batches(fetch()))
            return
        body = fetch()
        batches = parse_batches(body)
    except FleetUnavailableError as error:
        typer.echo(f"slicewise batches: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    typer.echo(body if as_json else "\n".join(batch_lines(batches, time.time())))


def parse_batches(body: str) -> ReportedBatches:
    """Returns the batches in the JSON text `body`.

    Raises:
        FleetUnavailableError: it is not a list of batches.
    """
    try:
        return ReportedBatches.model_validate_json(body)
    except ValidationError as error:
        raise FleetUnavailableError(
            "the answer is no list of batches; is that address a Slicewise gateway?"
        ) from error


def batch_lines(batches: ReportedBatches, now_s: float) -> list[str]:
    """Returns the table of batches, the newest first, and below it what is wrong with files."""
    if not batches.data:
        return ["no batches"]
    rows = [_cells(batch, now_s) for batch in batches.data]
    lines = plain_lines(build_table(_HEADER, rows, _NUM_TEXTS))
    if batches.has_more:
        lines.append("older ones are left out: --limit")
    for batch in batches.data:
        lines += _fault_lines(batch)
    return lines


def _cells(batch: ReportedBatch, now_s: float) -> tuple[object, ...]:
    counts = batch.request_counts
    ended_at = batch.ended_at
    left = None
    if ended_at is None and batch.expires_at is not None:
        left = format_duration(max(0.0, batch.expires_at - now_s))
    return (
        batch.id,
        batch.status,
        progress_bar(counts.completed + counts.failed, counts.total),
        counts.total,
        counts.failed,
        batch.usage.total_tokens,
        *_cost_cells(batch.cost),
        format_duration(max(0.0, (ended_at or now_s) - batch.created_at)),
        left,
    )


def _cost_cells(cost: ReportedCost | None) -> tuple[object, object]:
    """Returns chip-seconds and dollars; nothing where no slice has been paid for."""
    if cost is None or not cost.chip_seconds:
        return None, None
    return f"{cost.chip_seconds:.1f}", None if cost.usd is None else f"{cost.usd:.4f}"


def progress_bar(num_done: int, num_all: int) -> str:
    """Returns a bar of fixed width and the share that is done, rounded down."""
    share = min(1.0, num_done / num_all) if num_all else 0.0
    num_full = int(share * _BAR_WIDTH)
    return f"[{'#' * num_full}{'.' * (_BAR_WIDTH - num_full)}] {int(share * 100):3d}%"


def _fault_lines(batch: ReportedBatch) -> Iterator[str]:
    faults = batch.errors.data if batch.errors is not None else ()
    if not faults:
        return
    yield ""
    what = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    yield f"{printable(batch.id)}: {what}"
    for fault in faults[:_MOST_FAULTS]:
        where = "" if fault.line is None else f"line {fault.line}: "
        yield f"  {where}{printable(fault.message or fault.code)}"
    if len(faults) > _MOST_FAULTS:
        yield f"  and {len(faults) - _MOST_FAULTS} more"


def _watch(fetch: Callable[[], ReportedBatches]) -> None:
    """Prints the table until all batches have ended, or Ctrl-C: on a terminal in place."""
    console = Console(highlight=False)
    try:
        batches = fetch()
        with ExitStack() as stack:
            live = None
            if console.is_terminal:
                live = stack.enter_context(Live(console=console, auto_refresh=False))
            while True:
                text = "\n".join(batch_lines(batches, time.time()))
                if live is None:
                    typer.echo(text)
                else:
                    live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                if _have_ended(batches.data):
                    return
                time.sleep(_PERIOD_S)
                batches = fetch()
    except KeyboardInterrupt:
        return


def _have_ended(batches: Iterable[ReportedBatch]) -> bool:
    return all(batch.status in _ENDED for batch in batches)
