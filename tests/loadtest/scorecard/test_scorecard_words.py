"""Values in words, and the way plots are drawn."""

import pytest

from loadtest.report.plot_style import (
    EventMark,
    add_legend,
    colour,
    mark_events,
    new_figure,
    styled,
    time_axis,
    to_svg,
)
from loadtest.scorecard.formats import DASH, format_number, format_ratio, format_seconds, format_usd


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, DASH),
        (0.0, "0 ms"),
        (0.00085, "850 µs"),
        (0.04214, "42.1 ms"),
        (0.9996, "1.00 s"),
        (0.055, "55 ms"),
        (1.274, "1.27 s"),
        (75.0, "75 s"),
        (1234.5, "1,234 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds_keep_three_digits(value: float | None, words: str) -> None:
    assert format_seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, DASH),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.9999999, ">99.999 %"),
        (0.0000001, "<0.001 %"),
        (0.9995, "99.95 %"),
        (0.962, "96.2 %"),
        (0.00124, "0.124 %"),
    ],
)
def test_share_is_whole_only_when_it_is(value: float | None, words: str) -> None:
    assert format_ratio(value) == words


def test_numbers_and_money_keep_what_matters() -> None:
    assert [format_number(value) for value in (0.593, 5.014, 12345.6, 7.0, None)] == [
        "0.593",
        "5.01",
        "12,346",
        "7",
        DASH,
    ]
    assert format_usd(13.118).startswith("13.12")
    assert format_usd(0.0312).startswith("0.0312")


def drawn(marks: list[EventMark], label: str = "load") -> str:
    with styled():
        figure = new_figure()
        axes = figure.subplots()
        axes.plot([0, 100], [1, 2], color=colour("blue"), label=label)
        time_axis(axes, 100.0)
        mark_events(axes, marks)
        add_legend(figure, axes)
        return to_svg(figure, "made", "A <title>", "What there is & more")


def test_drawing_becomes_one_named_element_without_outside_references() -> None:
    svg = drawn([])
    assert svg.startswith('<svg class="plot" role="img" aria-labelledby="made-title')
    assert "A &lt;title&gt;</title>" in svg
    assert "What there is &amp; more</desc>" in svg
    assert "matplotlib" not in svg
    assert svg.count("http") == 2  # the two namespaces


def test_events_close_together_share_a_place() -> None:
    svg = drawn([EventMark(1, 10.0), EventMark(2, 10.5, 20.0), EventMark(3, 60.0)])
    assert ">1,2</text>" in svg
    assert ">3</text>" in svg


def test_label_with_dollars_is_no_formula() -> None:
    assert "$x_1$" in drawn([], "$x_1$")
