"""The report page: whole, self-contained, readable in both schemes and without eyes."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from made_run import MadeRun, eventful_run, failed_request, made_request, steady_run

from loadtest.records import EventRecord
from loadtest.report.html import report_page
from loadtest.scorecard.measure import measure
from loadtest.scorecard.slo import NO_OBJECTIVES, GoodputLimits, LatencyLimits, ServiceLevel
from tests.dashboard.browser import browser

LEVEL = ServiceLevel(
    ttft_s=LatencyLimits(p95=1.0),
    error_ratio=0.05,
    goodput=GoodputLimits(ttft_s=0.5, at_least=0.5),
)
PRICES = {"spot": 0.593, "reserved": 1.2}


def page_of(run: MadeRun, level: ServiceLevel = LEVEL) -> str:
    stored = run.stored
    return report_page(measure(stored, level, PRICES), stored)


@pytest.fixture(scope="module")
def eventful_page() -> str:
    return page_of(eventful_run())


class Outline(HTMLParser):
    """Tags that are opened, ids, and whether every one is closed in order."""

    VOID = frozenset({"meta", "link", "br", "use", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    @property
    def is_closed(self) -> bool:
        return not self._open


def outline_of(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    return outline


def test_page_is_well_formed_and_every_table_and_plot_is_named(eventful_page: str) -> None:
    outline = outline_of(eventful_page)
    assert outline.is_closed
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.opened.count("table") == outline.opened.count("caption") > 5
    plots = outline.opened.count("svg")
    assert plots == outline.opened.count("figcaption") >= 11
    assert outline.opened.count("desc") == plots


def test_page_names_nothing_that_would_be_fetched(eventful_page: str) -> None:
    assert not re.search(r"\b(src|href)=\"(?!#|data:,)", eventful_page)
    assert "url(http" not in eventful_page
    assert "@import" not in eventful_page


def test_page_escapes_what_the_run_brings_along(eventful_page: str) -> None:
    assert "&lt;b&gt;zeta&lt;/b&gt;" in eventful_page
    assert "<b>zeta" not in eventful_page
    assert "lognormal &lt;200&gt;" in eventful_page


def test_plots_use_colours_of_the_page_only(eventful_page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", eventful_page, re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): *(#[0-9a-f]+)", drawings)) == set()
    used = set(re.findall(r"var\((--plot-[a-z]+)\)", drawings))
    themes = eventful_page.split("prefers-color-scheme: dark", 1)
    assert used
    for name in used:
        assert all(f"{name}:" in theme for theme in themes)


def test_same_run_gives_the_same_page(eventful_page: str) -> None:
    assert page_of(eventful_run()) == eventful_page


def test_invalid_run_says_so_first() -> None:
    page = page_of(steady_run().but(client=()))
    assert "<title>INVALID" in page
    assert re.search(r'class="verdict"[^>]*data-code="4"><strong>INVALID', page)
    assert "distorted the result" in page


@pytest.mark.parametrize(
    "run",
    [
        MadeRun(()),
        MadeRun((failed_request(0, 1.0, "connect"),), num_scheduled=None),
        MadeRun((made_request(0, 1.0, tokens=1, output_tokens=None),)),
        steady_run().but(end=None, events=(EventRecord(1.0, "kill", "$x_1$"),)),
        steady_run(60, lambda n, at_s: failed_request(n, at_s, f"kind_{n % 9}")),
    ],
    ids=["empty", "nothing succeeded", "no usage", "cut short", "many kinds of failure"],
)
def test_page_stands_whatever_is_missing(run: MadeRun) -> None:
    page = page_of(run, NO_OBJECTIVES)
    assert outline_of(page).is_closed
    assert "nan" not in page.lower().replace("nano", "")


def test_state_of_each_class_is_drawn(eventful_page: str) -> None:
    for title in ("Slices of compute class spot", "Slices of compute class reserved"):
        assert title in eventful_page
    assert "var(--plot-draining)" in eventful_page


@pytest.mark.browser
@pytest.mark.needs("chromium", "chromedriver")
async def test_browser_shows_the_page_without_complaint_or_request(
    tmp_path: Path, eventful_page: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(eventful_page, encoding="utf-8")
    grounds = []
    async with browser() as tab:
        for scheme in ("light", "dark"):
            for width in (1200, 390):
                await tab.emulate(width, 900, scheme=scheme)
                await tab.open(f"file://{quote(str(file))}")
                fits = "return document.documentElement.scrollWidth <= innerWidth"
                assert await tab.run(fits)
            ink = "return getComputedStyle(document.querySelector('svg.plot text')).fill"
            grounds.append(await tab.run(ink))
        fetched = "return performance.getEntriesByType('resource').map((each) => each.name)"
        assert await tab.run(fetched) == []
        assert await tab.complaints() == []
        assert await tab.text("h1") == "Load test"
    assert grounds[0] != grounds[1]
