"""Prints a scorecard in 80 columns: the verdict first, then what led to it."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from loadtest.errors import ExitCode
from loadtest.scorecard.formats import (
    DASH,
    format_number,
    format_ratio,
    format_seconds,
    format_usd,
)
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.slo import Objective
from loadtest.scorecard.spread import Spread

_STYLES = {ExitCode.OK: "bold green", ExitCode.CLIENT_INVALID: "bold magenta"}


def print_scorecard(card: Scorecard, console: Console) -> None:
    """Prints `card` as wide as `console` is, up to 100 columns."""
    console.print(scorecard_table(card), width=min(console.width, 100), highlight=False)


def scorecard_table(card: Scorecard) -> RenderableType:
    """Returns `card` in a form to print."""
    code = ExitCode(card.verdict.exit_code)
    headline = Text(f"{format_verdict(code)}: ", style=_STYLES.get(code, "bold red"))
    headline.append(card.verdict.sentence, style="default not bold")
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in card.warnings]
    parts: list[RenderableType] = [headline, *warnings, _latencies(card)]
    if card.slo.objectives:
        parts.append(_objectives(card.slo.objectives))
    if card.events:
        parts.append(_events(card))
    parts += [Padding(Text(line), (0, 0, 0, 1)) for line in _facts(card)]
    return Group(*parts)


def format_verdict(code: ExitCode) -> str:
    """The verdict in one word or two."""
    words = {
        ExitCode.OK: "OK",
        ExitCode.FAILED: "FAILED",
        ExitCode.USAGE: "REFUSED",
        ExitCode.OBJECTIVE_MISSED: "OBJECTIVE MISSED",
        ExitCode.CLIENT_INVALID: "INVALID",
    }
    return words[code]


def format_objective(objective: Objective) -> tuple[str, str]:
    """Returns its value and its limit, in the unit of its name."""
    shown = format_number
    if "_s." in objective.metric:
        shown = format_seconds
    elif "ratio" in objective.metric:
        shown = format_ratio
    elif "usd" in objective.metric:
        shown = format_usd
    sign = "≥" if objective.is_floor else "≤"
    return shown(objective.value), f"{sign} {shown(objective.limit)}"


def latency_rows(card: Scorecard) -> tuple[tuple[str, Spread], ...]:
    """The latencies worth a row each, by name."""
    return (
        ("TTFT, scheduled", card.ttft_scheduled_s),
        ("TTFT, from send", card.ttft_s),
        ("TPOT", card.tpot_s),
        ("E2E, scheduled", card.e2e_scheduled_s),
        ("E2E, from send", card.e2e_s),
        ("NTPOT", card.ntpot_s),
        ("ICL", card.icl_s),
        ("longest gap", card.longest_gap_s),
        ("schedule lag", card.schedule_lag_s),
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=True, padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=bool(index))
    return table


def _latencies(card: Scorecard) -> Table:
    table = _table("", "p50", "p90", "p95", "p99", "max", "mean", "n")
    for name, spread in latency_rows(card):
        points = (spread.p50, spread.p90, spread.p95, spread.p99, spread.max, spread.mean)
        table.add_row(name, *map(format_seconds, points), f"{spread.n:,}")
    return table


def _objectives(objectives: tuple[Objective, ...]) -> Table:
    table = _table("objective", "measured", "allowed", "")
    for objective in objectives:
        outcome = Text("met", style="green") if objective.ok else Text("missed", style="bold red")
        table.add_row(objective.name, *format_objective(objective), outcome)
    return table


def _events(card: Scorecard) -> Table:
    table = _table("event", "at", "in flight", "failed", "longest gap", "added")
    for event in card.events:
        name = f"{event.number} {event.action} {event.target}"
        table.add_row(
            f"{name} (not done)" if event.error is not None else name,
            format_seconds(event.at_s),
            str(event.in_flight),
            str(event.failed),
            format_seconds(event.longest_gap_s),
            format_seconds(event.added_s),
        )
    return table


def _facts(card: Scorecard) -> Iterator[str]:
    requests, rates, tokens = card.requests, card.throughput, card.tokens
    failed = f"{requests.failed:,} failed"
    if requests.errors:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in requests.errors.items())
        failed += f" ({kinds})"
    resent = f", {requests.retried:,} sent again" if requests.retried else ""
    yield f"requests    {requests.total:,}, {failed}{resent}"
    yield (
        f"rate        asked {format_number(rates.asked_requests_per_s)}/s, "
        f"achieved {format_number(rates.achieved_requests_per_s)}/s"
    )
    yield f"throughput  {format_number(rates.output_tokens_per_s)} output tokens/s"
    if card.goodput is not None:
        limits = ", ".join(
            f"{name.removesuffix('_s').upper()} ≤ {format_seconds(limit)}"
            for name, limit in card.goodput.limits.items()
        )
        yield (
            f"goodput     {format_number(card.goodput.requests_per_s)}/s, "
            f"{format_ratio(card.goodput.ratio)} of those scheduled ({limits})"
        )
    yield (
        f"tokens      {_or_dash(tokens.input)} in ({_or_dash(tokens.cached)} cached), "
        f"{_or_dash(tokens.output)} out"
    )
    if card.correctness.checked:
        found = card.correctness
        yield (
            f"answers     {found.checked:,} checked: {_or_dash(found.lost_tokens)} lost, "
            f"{_or_dash(found.repeated_tokens)} repeated, {_or_dash(found.foreign_tokens)} foreign"
        )
    if card.cost.usd_per_million_output_tokens is not None:
        yield (
            f"cost        {format_usd(card.cost.usd_per_million_output_tokens)} per million output "
            f"tokens, {format_number(card.cost.chip_hours)} chip-hours"
        )
    elif card.fleet:
        hours = format_number(card.cost.chip_hours)
        yield f"cost        {hours} chip-hours, not priced: {card.cost.reason or 'no tokens'}"


def _or_dash(count: int | None) -> str:
    return DASH if count is None else f"{count:,}"
