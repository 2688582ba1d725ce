"""Makes the pages of a run and of a comparison from the templates in `page/`."""

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loadtest.errors import ExitCode
from loadtest.report.comparison_plot import draw_comparison
from loadtest.report.plot_style import THEME_CSS
from loadtest.report.plots import draw_plots
from loadtest.report.table import format_objective, format_verdict, latency_rows
from loadtest.scorecard import formats
from loadtest.scorecard.compare import Comparison, format_interval, format_signed, format_value
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.stored_run import StoredRun, plan_lines

_FOLDER = Path(__file__).parent / "page"


def report_page(card: Scorecard, run: StoredRun) -> str:
    """The report of one run as HTML."""
    page = _environment().get_template("report.html")
    groups = {
        "Models": card.by_model,
        "Tenants": card.by_tenant,
        "Priorities": card.by_priority,
    }
    return page.render(
        card=card,
        code=ExitCode(card.verdict.exit_code),
        started_at=f"{datetime.fromtimestamp(card.run.at_unix_s, UTC):%Y-%m-%d %H:%M:%S UTC}",
        latencies=latency_rows(card),
        plan=list(plan_lines(card.run.plan)),
        plots=draw_plots(card, run),
        groups=[(title, group) for title, group in groups.items() if len(group) > 1],
    )


def comparison_page(comparison: Comparison) -> str:
    """Returns a comparison of two runs as HTML."""
    page = _environment().get_template("comparison.html")
    return page.render(comparison=comparison, plot=draw_comparison(comparison))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": formats.format_seconds,
        "number": formats.format_number,
        "ratio": formats.format_ratio,
        "usd": formats.format_usd,
        "count": lambda number: formats.DASH if number is None else f"{number:,}",
        "objective": format_objective,
        "latency": lambda name: str(name).removesuffix("_s").upper(),
        "value": format_value,
        "signed": format_signed,
        "interval": format_interval,
        "verdict": format_verdict,
        # Drawn by us, with every name in it escaped.
        "drawing": Markup,
    }
    # Written by us: no value of a run is in it.
    environment.globals["theme_css"] = Markup(THEME_CSS)
    return environment
