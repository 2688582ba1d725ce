"""The comparison as an HTML page, light and dark. Its words and order are `page.html`'s."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autoscaling.simulator.bounds.yardsticks import SERVICE_LEVEL
from autoscaling.simulator.comparison import PolicyComparison, PolicyResult, SeedSpread
from autoscaling.simulator.policies import SLICEWISE
from autoscaling.simulator.report.plots import draw_plots
from autoscaling.simulator.tables import price_lines
from loadtest.report.plot_style import THEME_CSS

_FOLDER = Path(__file__).parent
# Every decision is shown. Of refusals there may be ten times as many, mostly alike.
_MOST_REFUSALS = 2000


@dataclass(frozen=True, slots=True)
class _DecisionRow:
    at: str
    change: str
    reason: str
    is_refusal: bool


def report_page(comparison: PolicyComparison) -> str:
    """The page as text. It shows our policy's run, or the first policy's if ours is not there."""
    names = [each.name for each in comparison.policies]
    shown = comparison.policy(SLICEWISE if SLICEWISE in names else names[0])
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = sorted(_rows(shown), key=lambda row: row.at)
    return environment.get_template("page.html").render(
        comparison=comparison,
        shown=shown,
        least=SeedSpread.of([each.lower_bound_usd for each in comparison.yardsticks]),
        kept=_kept(comparison),
        service_level=SERVICE_LEVEL,
        plots=[Markup(svg) for svg in draw_plots(comparison, shown)],
        decisions=rows,
        num_left_out=max(0, len(shown.course.timeline.refusals) - _MOST_REFUSALS),
        prices=list(price_lines(comparison.prices)),
        theme=Markup(THEME_CSS),
    )


def _kept(comparison: PolicyComparison) -> SeedSpread | None:
    """Returns the cost of the plan with hindsight that keeps the level; `None` if a seed failed."""
    costs = [each.cost_usd for each in comparison.yardsticks if each.cost_usd is not None]
    return SeedSpread.of(costs) if len(costs) == len(comparison.yardsticks) else None


def _rows(result: PolicyResult) -> Iterator[_DecisionRow]:
    timeline = result.course.timeline
    refusals = timeline.refusals[:_MOST_REFUSALS]
    for place, noted in enumerate((*timeline.decisions, *refusals)):
        minutes, seconds = divmod(round(noted.at_s), 60)
        hours, minutes = divmod(minutes, 60)
        yield _DecisionRow(
            f"{hours:02d}:{minutes:02d}:{seconds:02d}",
            f"{noted.decision.compute_class} {noted.decision.delta:+d}",
            noted.decision.reason,
            is_refusal=place >= len(timeline.decisions),
        )
