"""What a tenant that floods costs two others, in simulated time: the table of ADR 28."""

from collections.abc import Callable, Sequence

from serving.engine.paced.config import PacedConfig
from tests.gateway.dispatch.floods import APART, AT_ANY, AT_ONE, BOUNDED, beside_a_flood
from tests.gateway.dispatch.simulated_fleet import CHIP, quantile

# The settings were chosen on the first two.
SEEDS = (4, 104, 204, 304, 404)
_FLOODS = {None: "alone", 500: "beside prompts of 500 tokens", 4000: "of 4,000 tokens"}
HEAD = f"| tenants ask | {' | '.join(_FLOODS.values())} |\n|---|{'---|' * len(_FLOODS)}"


def rows(tell: Callable[[str], None]) -> None:
    """Tells each row: p50 / p90 / p99 of the others in ms, the least and most of all runs."""
    for kind in (AT_ONE, AT_ANY, APART):
        tell(_row(kind, kind))
    for kind in (AT_ONE, AT_ANY, APART):
        tell(_row(f"{kind}, steps with 512 tokens of a prompt", kind, engine=BOUNDED))
    tell(first_come_row())


def first_come_row() -> str:
    """Returns the row of one gateway that serves who comes first: one run, for it takes longer."""
    name = f"{AT_ONE}, who comes first is first"
    return _row(name, AT_ONE, SEEDS[:1], knows_tenants=False)


def _row(
    name: str,
    kind: str,
    seeds: Sequence[int] = SEEDS,
    *,
    knows_tenants: bool = True,
    engine: PacedConfig = CHIP,
) -> str:
    cells = []
    for flood_tokens in _FLOODS:
        runs = [
            beside_a_flood(kind, flood_tokens, seed, knows_tenants=knows_tenants, engine=engine)[0]
            for seed in seeds
        ]
        cells.append(_cell(runs))
    return f"| {name} | {' | '.join(cells)} |"


def _cell(runs: Sequence[list[float]]) -> str:
    spans = []
    for share in (0.5, 0.9, 0.99):
        found_ms = sorted(round(1000 * quantile(others, share)) for others in runs)
        spans.append(f"{found_ms[0]:,} to {found_ms[-1]:,}")
    return " / ".join(spans)
