"""`docs/results/calibration.md` and its plot: both sides of every comparison, and the error.

Owns tables, plot and words. Measures nothing.
"""

import datetime
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.calibration import (
    STATIC_S,
    ClassTimes,
    Course,
    ScaledRun,
    StaticRun,
    rate_of_law,
    short_conversations,
)
from benchmarks.calibration_live import PACE, TPOT_OBJECTIVE_S, TTFT_OBJECTIVE_S, Step
from loadtest.report.plot_style import (
    PATTERNS,
    SERIES,
    THEME_CSS,
    add_legend,
    colour,
    new_figure,
    styled,
    time_axis,
    to_svg,
)
from serving.domain.slice_lifecycle import HELD_STATES, SliceState

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
REPORT, PLOT = RESULTS / "calibration.md", RESULTS / "calibration.svg"
_PANEL_IN = 1.5
# Further apart than this, two changes are not one decision taken earlier or later.
_SAME_DECISION_S = 45.0

_TEXT = """# The simulator beside the live platform

Written by `python -m benchmarks calibration` on {date}, {cpus} CPU cores ({machine}), Python
{python}: client, gateway, engines and Ray share those cores. One run; latencies of engines are
inputs, so nothing here says how fast a TPU is.

Both sides have the same engines ({pace}), the same requests (arrivals
and lengths like those of Azure's conversations, a tenth as long: {input_tokens:.0f} prompt and
{output_tokens:.0f} output tokens on average) and the same policy object. The simulation is told
when each request was really sent, so that an error is not one of chance. Every answer was checked,
token by token.

That the simulator obeys the law of the paced engine needs no cluster:
`tests/autoscaling/simulator/test_simulator_calibration.py` plays both and finds the same instants
for every token, with the gateway's own choice of engines. What is left besides is what the law
leaves out: HTTP, tokenizer, the way to the engine and back, and the times of Ray.

## Engines without a policy

{static_s:.0f} s each. One engine carries {rate:.2f} of these requests per second at a TPOT of
{tpot_ms:.0f} ms by the law. Each cell is measured / simulated (error of the simulation), in
milliseconds; *added* is what the same request took longer than simulated, the median. Other
processes of the machine used up to {static_others:.2f} cores.

{static}

## Under the policy

The shipped scaling application on its simulated cluster (`deployments/sim/autoscaling.yaml`,
single-host slices: one reserved, up to three of spot, up to two of flex-start), from zero slices:
1.5 requests per second, a rise to 12 and down to 2, {num_requests} requests in all. Objectives:
TTFT {ttft_s:g} s, TPOT {tpot_ms:.0f} ms. The simulation is told how slices came in the live run:
per class the median time from the decision until a slice is held, and from there until its engine
is ready. When to ask for which class it has to find out by itself. The last column is simulated,
too, but follows the live decisions. Others used {scaled_others:.2f} cores, replicas that ended
included.

{scaled}

![Requests waiting, requests on engines and ready slices over time](calibration.svg)

Every change of the plan, one slice at a time; targets changed in {changes} decisions:

{decisions}

What the simulation was told: seconds after the decision, median (range).

{times}

A time below zero is that of a slice that was to go and stays.

The policy was shown a load that it had first seen {report_age_s:.1f} s before, the median; so is
the simulated one. How much older it was when a gateway told it is not in that: a live decision
knows of a change a report's period later, some seconds, than a simulated one.

## Where the errors come from

{causes}
"""
_CAUSES = """- **The way to the engine and back**: HTTP, tokenizer, gateway and link on shared
  cores. It is *added* above: milliseconds to a first token, nothing to the pace. A profile that
  `slicewise profile` measured has it in `ttft_floor_s`; this one is the law alone. A request that
  comes those milliseconds later may be routed to another engine or join another step, which moves
  single answers either way; the p95 of a short run is a few of them.
- **The policy's inputs.** Gateways and the directory report every two seconds, so the live policy
  sees a load and slices that are one to three seconds old; the simulated one sees a load of one age
  every second and slices as they are. A decision moves by a second or two, and in the plot slices
  are ready two or three seconds later where they were reported.
- **The first slice.** Each slice comes after the median time of its class, whatever it took live.
  Requests that wait for a model's first engine show it most: they all wait for one slice.
- **What goes.** The simulator holds a slice that is given up for the whole grace; the platform
  gives it back as soon as it is empty. That is seconds of cost, on the safe side."""

# One number of a course at each of its steps.
_Count = Callable[[Step], float]


def write_report(static: Sequence[StaticRun], scaled: ScaledRun) -> None:
    """Writes both files."""
    lengths = short_conversations()
    report = _TEXT.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        cpus=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        pace=", ".join(f"`{key}: {value}`" for key, value in PACE.items()),
        input_tokens=float(lengths.input_tokens.mean()),
        output_tokens=float(lengths.output_tokens.mean()),
        rate=rate_of_law(lengths),
        tpot_ms=TPOT_OBJECTIVE_S * 1e3,
        ttft_s=TTFT_OBJECTIVE_S,
        static_s=STATIC_S,
        static=static_table(static),
        static_others=max(each.other_cores for each in static),
        num_requests=len(scaled.measured.answered.sent_s),
        scaled="\n".join(_scaled_rows(scaled)),
        times="\n".join(_times_rows(scaled)),
        decisions="\n".join(_decision_rows(scaled)),
        changes=" and ".join(
            str(num_changes(each)) for each in (scaled.measured, scaled.simulated)
        ),
        report_age_s=scaled.report_age_s,
        scaled_others=scaled.other_cores,
        causes=_CAUSES,
    )
    REPORT.write_text(report, encoding="utf-8")
    PLOT.write_text(draw(scaled), encoding="utf-8")


def num_changes(course: Course) -> int:
    """How often a plan had other targets than the one before."""
    targets = [dict(step.plan.targets) for step in course.steps]
    return sum(before != after for before, after in pairwise(targets))


def mean_over_time(steps: Sequence[Step], count: _Count) -> float:
    """The mean of a number that holds from one step to the next."""
    at_s = np.array([step.plan.at_s for step in steps])
    values = np.array([count(step) for step in steps])
    return float((values[:-1] * np.diff(at_s)).sum() / (at_s[-1] - at_s[0]))


def num_waiting(step: Step) -> float:
    """Requests without an engine, as the policy was told; 0 where it was told nothing."""
    load = step.observation.load
    return 0.0 if load is None else load.num_waiting


def num_on_engines(step: Step) -> float:
    """Requests on engines, likewise."""
    load = step.observation.load
    return 0.0 if load is None else load.num_in_flight


def num_in(name: str, *states: SliceState) -> _Count:
    """Slices of a class in one of `states`."""
    return lambda step: sum(each.state in states for each in step.observation.fleet.of_class(name))


def static_table(runs: Sequence[StaticRun]) -> str:
    """Measured / simulated (error) in milliseconds, and what each request took longer."""
    return "\n".join(_static_rows(runs))


def _static_rows(runs: Sequence[StaticRun]) -> Iterator[str]:
    yield (
        "| engines | of the law's rate | requests | TTFT p50 | TTFT p95 | TPOT p50 | TPOT p95 "
        "| added to TTFT | added to TPOT |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for run in runs:
        measured, simulated = run.measured, run.simulated
        cells = [f"{run.num_engines}", f"{run.share:.0%}", f"{len(measured.sent_s)}"]
        pairs = ((measured.ttft_s, simulated.ttft_s), (measured.tpot_s, simulated.tpot_s))
        for found, foretold in pairs:
            cells += [_compared(found, foretold, percentile) for percentile in (50, 95)]
        cells += [f"{np.nanmedian(found - foretold) * 1e3:+.1f}" for found, foretold in pairs]
        yield "| " + " | ".join(cells) + " |"


def _compared(
    found: npt.NDArray[np.float64], foretold: npt.NDArray[np.float64], percentile: int
) -> str:
    measured, simulated = (
        float(np.nanpercentile(each, percentile)) * 1e3 for each in (found, foretold)
    )
    return f"{measured:.0f} / {simulated:.0f} ({simulated / measured - 1:+.0%})"


def _scaled_rows(run: ScaledRun) -> Iterator[str]:
    yield "| | measured | simulated | error | simulated with the live decisions |"
    yield "|---|---|---|---|---|"
    sides = (run.measured, run.simulated, run.retold)
    for name, attribute in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        for percentile in (50, 95):
            values = [
                float(np.nanpercentile(getattr(each.answered, attribute), percentile)) * 1e3
                for each in sides
            ]
            yield _row(f"{name} p{percentile}, ms", values, "{:,.0f}")
    for words, count in (
        ("requests waiting at the gateway, mean", num_waiting),
        ("requests on engines, mean", num_on_engines),
    ):
        yield _row(words, [mean_over_time(each.steps, count) for each in sides], "{:.2f}")
    peaks = [max(num_waiting(step) for step in each.steps) for each in sides]
    yield _row("requests waiting at the gateway, most", peaks, "{:.0f}")
    for terms in run.settings.terms:
        for words, states in (("held", tuple(HELD_STATES)), ("ready", (SliceState.READY,))):
            means = [mean_over_time(each.steps, num_in(terms.name, *states)) for each in sides]
            yield _row(f"`{terms.name}` slices {words}, mean", means, "{:.2f}")
    means = [
        sum(
            mean_over_time(each.steps, num_in(terms.name, *HELD_STATES))
            for terms in run.settings.terms
        )
        for each in sides
    ]
    yield _row("all slices held, mean", means, "{:.2f}")


def _row(words: str, values: Sequence[float], form: str) -> str:
    measured, simulated, retold = (form.format(each) for each in values)
    error = f"{values[1] / values[0] - 1:+.0%}" if values[0] else ""
    return f"| {words} | {measured} | {simulated} | {error} | {retold} |"


def _times_rows(run: ScaledRun) -> Iterator[str]:
    yield "| class | slices | a replica asks for a slice | it has one | its engine is ready |"
    yield "|---|---|---|---|---|"
    for name, times in run.times.items():
        yield f"| `{name}` | {len(times.until_ready_s)} | " + " | ".join(_spans(times)) + " |"


def _spans(times: ClassTimes) -> Iterator[str]:
    for values in (times.until_asked_s, times.until_held_s, times.until_ready_s):
        if values:
            yield f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        else:
            yield ""


def _decision_rows(run: ScaledRun) -> Iterator[str]:
    yield "| class | slices | measured at, s | simulated at, s | later by, s |"
    yield "|---|---|---|---|---|"
    rows: list[tuple[float, str]] = []
    for terms in run.settings.terms:
        for sign in (1, -1):
            measured, simulated = (
                changes_of(course.steps, terms.name, sign)
                for course in (run.measured, run.simulated)
            )
            for found_s, foretold_s in matched(measured, simulated):
                cells = ["" if each is None else f"{each:.0f}" for each in (found_s, foretold_s)]
                if found_s is not None and foretold_s is not None:
                    cells.append(f"{foretold_s - found_s:+.0f}")
                else:
                    cells.append("only there")
                first_s = min(each for each in (found_s, foretold_s) if each is not None)
                rows.append((first_s, f"| `{terms.name}` | {sign:+d} | {' | '.join(cells)} |"))
    yield from (row for _, row in sorted(rows))


def changes_of(steps: Sequence[Step], name: str, sign: int) -> list[float]:
    """When a class was asked for one slice more (`sign` 1) or fewer (-1), once per slice."""
    found: list[float] = []
    for before, after in pairwise(steps):
        delta = after.plan.targets[name] - before.plan.targets[name]
        found += [after.plan.at_s] * max(0, sign * delta)
    return found


def matched(
    measured: Sequence[float], simulated: Sequence[float]
) -> Iterator[tuple[float | None, float | None]]:
    """Each change beside the one of the other side that it answers to, if there is one."""
    left, right = list(measured), list(simulated)
    while left and right:
        if abs(left[0] - right[0]) <= _SAME_DECISION_S:
            yield left.pop(0), right.pop(0)
        elif left[0] < right[0]:
            yield left.pop(0), None
        else:
            yield None, right.pop(0)
    yield from ((each, None) for each in left)
    yield from ((None, each) for each in right)


def draw(run: ScaledRun) -> str:
    """The scaled run over time, one panel below the other, as an SVG file."""
    panels: list[tuple[str, _Count]] = [
        ("waiting", num_waiting),
        ("on engines", num_on_engines),
    ]
    panels += [
        (f"{terms.name}, ready", num_in(terms.name, SliceState.READY))
        for terms in run.settings.terms
    ]
    with styled():
        figure = new_figure(_PANEL_IN * len(panels))
        every = figure.subplots(len(panels), 1, sharex=True)
        for axes, (words, count) in zip(every, panels, strict=True):
            _draw_panel(axes, run, words, count)
        until_s = max(each.steps[-1].plan.at_s for each in (run.measured, run.simulated))
        time_axis(every[-1], until_s)
        add_legend(figure, every[0])
        svg = to_svg(
            figure,
            "calibration",
            "The scaled run, measured and simulated",
            "Requests waiting, requests on engines and ready slices by class over time; the "
            "simulated lines follow the measured ones.",
        )
    head = svg.index(">") + 1
    style = f"<style>{THEME_CSS} svg {{ font-family: sans-serif; }}</style>"
    return svg[:head] + style + svg[head:] + "\n"


def _draw_panel(axes: Axes, run: ScaledRun, words: str, count: _Count) -> None:
    for place, (name, course) in enumerate(
        (("measured", run.measured), ("simulated", run.simulated))
    ):
        axes.step(
            [each.plan.at_s for each in course.steps],
            [count(each) for each in course.steps],
            where="post",
            color=colour(SERIES[place]),
            linestyle=PATTERNS[place],
            label=name,
        )
    axes.set_ylabel(words)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
