"""Whether what the pages write and draw can be read, by WCAG's rule, in both schemes."""

import re
from pathlib import Path

import pytest

from loadtest.report import html
from loadtest.report.plot_style import SERIES, THEME_CSS

PAGE_CSS = (Path(html.__file__).parent / "page" / "page.css").read_text()
WORDS_ON_GROUND = [
    ("ink", "ground"),
    ("ink", "tile"),
    ("quiet", "ground"),
    ("quiet", "tile"),
    ("good", "tile"),
    ("good", "good-tint"),
    ("bad", "tile"),
    ("bad", "bad-tint"),
    ("odd", "odd-tint"),
    ("warn", "warn-tint"),
]
WORDS_IN_PLOTS = ("ink", "quiet", "event")
STATES = ("requested", "provisioning", "reserved", "probing", "loading", "ready", "draining")


def colours(css: str, scheme: str) -> dict[str, str]:
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): *(#[0-9a-f]{6});", light if scheme == "light" else dark))
    assert found
    return found


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(first: str, second: str) -> float:
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("words", "ground"), WORDS_ON_GROUND)
def test_words_of_the_page_stand_out(scheme: str, words: str, ground: str) -> None:
    page = colours(PAGE_CSS, scheme)
    assert contrast(page[words], page[ground]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_lines_of_plots_stand_out(scheme: str) -> None:
    ground = colours(PAGE_CSS, scheme)["tile"]
    plot = colours(THEME_CSS, scheme)
    words = {name: contrast(plot[f"plot-{name}"], ground) for name in WORDS_IN_PLOTS}
    lines = {name: contrast(plot[f"plot-{name}"], ground) for name in (*SERIES, *STATES)}
    assert {name: value for name, value in words.items() if value < 4.5} == {}
    assert {name: value for name, value in lines.items() if value < 3} == {}
