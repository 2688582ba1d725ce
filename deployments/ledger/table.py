"""The ledger as a table, read back from the metrics pages of gateways. Pure.

Owns how pages of several gateways become one: each counts the chips of the whole fleet and the
tokens of its own requests. A page that was read twice counts once.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.table import Table

from deployments.terminal import build_table
from serving.ledger.states import LedgerState
from serving.telemetry.metric_names import GATEWAY_LABEL

_CHIP_SECONDS = "slicewise_ledger_chip_seconds_total"
_COST = "slicewise_ledger_cost_usd_total"
_STARTED = "slicewise_ledger_start_time_seconds"
_TOKENS = "slicewise_output_tokens_total"
_S_PER_HOUR = 3600
_MILLION = 1_000_000
_STATES = tuple(LedgerState)
# For people, the chips that no replica has are one column.
_HELD_STATES = tuple(state for state in LedgerState if state.is_held)


class LedgerPageError(ValueError):
    """The page is no metrics page of a gateway with a ledger. Give a gateway's address."""


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """The ledger of one gateway. Sums are by model and class; `usd` has priced classes only."""

    gateway_id: str
    started_at_s: float
    chip_seconds: dict[tuple[str, str], dict[LedgerState, float]]
    usd: dict[tuple[str, str], float]
    output_tokens: dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Row:
    """The fleet's chip-seconds of one model and class since `started_at_s` (since the epoch).

    `usd` is `None` without a price. `output_tokens` are those of the gateways that were read.
    """

    model: str
    compute_class: str
    started_at_s: float
    chip_seconds: dict[LedgerState, float]
    usd: float | None
    output_tokens: float

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """The price of a million output tokens; `None` without a price or without a token."""
        if self.usd is None or not self.output_tokens:
            return None
        return self.usd / self.output_tokens * _MILLION


def parse_page(text: str) -> LedgerPage:
    """The ledger on a gateway's metrics page.

    Raises:
        LedgerPageError: there is none, or it is of another version.
    """
    try:
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        started = [sample for sample in samples if sample.name == _STARTED]
        if len(started) != 1:
            raise LedgerPageError(f"{_STARTED} is there {len(started)} times, not once")
        page = LedgerPage(
            started[0].labels.get(GATEWAY_LABEL, ""),
            started[0].value,
            defaultdict(dict),
            defaultdict(float),
            defaultdict(float),
        )
        for sample in samples:
            _take(page, sample)
    except LedgerPageError:
        raise
    except (ValueError, KeyError) as error:
        raise LedgerPageError(f"not a metrics page of this version: {error}") from error
    return page


def _take(page: LedgerPage, sample: Sample) -> None:
    if sample.name not in (_CHIP_SECONDS, _COST, _TOKENS):
        return
    key = (sample.labels["model"], sample.labels["compute_class"])
    if sample.name == _CHIP_SECONDS:
        page.chip_seconds[key][LedgerState(sample.labels["state"])] = sample.value
    elif sample.name == _COST:
        page.usd[key] += sample.value
    else:
        page.output_tokens[key] += sample.value


def merge(pages: Iterable[LedgerPage]) -> list[Row]:
    """The rows: chips of the gateway that counts longest, tokens of all. Needs a page at least."""
    by_gateway = {page.gateway_id: page for page in pages}
    longest = min(by_gateway.values(), key=lambda page: page.started_at_s)
    return [
        Row(
            model=key[0],
            compute_class=key[1],
            started_at_s=longest.started_at_s,
            chip_seconds=dict(seconds),
            usd=longest.usd.get(key),
            output_tokens=sum(page.output_tokens.get(key, 0.0) for page in by_gateway.values()),
        )
        for key, seconds in sorted(longest.chip_seconds.items())
    ]


def to_csv(rows: Iterable[Row], read_at_s: float) -> str:
    """The rows for pandas, DuckDB and the like: one line each, sums since `started_at_s`.

    What is not known is empty. Of lines appended day by day, the difference of two is a day's use.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    states = [f"{state}_chip_seconds" for state in _STATES]
    head = ["read_at_s", "started_at_s", "model", "compute_class", *states]
    writer.writerow([*head, "usd", "output_tokens", "usd_per_million_output_tokens"])
    for row in rows:
        seconds = [row.chip_seconds.get(state, 0.0) for state in _STATES]
        keys = [f"{read_at_s:.3f}", f"{row.started_at_s:.3f}", row.model, row.compute_class]
        price = row.usd_per_million_output_tokens
        writer.writerow([*keys, *seconds, row.usd, round(row.output_tokens), price])
    return text.getvalue()


def hours_table(rows: Iterable[Row]) -> Table:
    """Returns the rows for people, in chip-hours."""
    head = ["MODEL", "COMPUTE CLASS", *(state.upper() for state in _HELD_STATES), "NOBODY'S"]
    return build_table([*head, "USD", "USD/M OUTPUT TOKENS"], map(_cells, rows), 2)


def _cells(row: Row) -> list[str | None]:
    hours = [row.chip_seconds.get(state, 0.0) / _S_PER_HOUR for state in _HELD_STATES]
    hours.append((sum(row.chip_seconds.values()) / _S_PER_HOUR) - sum(hours))
    price = row.usd_per_million_output_tokens
    return [
        row.model or None,
        row.compute_class,
        *(f"{abs(value):.2f}" for value in hours),
        None if row.usd is None else f"{row.usd:.2f}",
        None if price is None else f"{price:.2f}",
    ]
