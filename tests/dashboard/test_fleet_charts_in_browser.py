"""The charts of the fleet page in a real Chromium, over the real edge and a staged history."""

from dataclasses import replace

import pytest

from .browser import Browser
from .fleet_stage import CHAT, CODE, NOW_S, Stage, serving
from .history_stage import example_history, samples
from .test_fleet_in_browser import FAINT_TEXTS, IS_LIVE

pytestmark = [
    pytest.mark.needs("chromium", "chromedriver"),
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
]

LEFT, END, ESCAPE = "\ue012", "\ue010", "\ue00c"
TITLES = [
    "Requests",
    "Output tokens",
    "Time to first token",
    "Time per output token",
    "Sequences",
    "Resumes and losses",
    "KV cache in use",
    "Chips by state",
    "Chips by compute class",
    "Cost",
    "Price of output",
]
# What is painted on a chart's canvas. `lines` are spans of the plot's columns with coloured pixels;
# `labels` counts the words left of the plot and below it.
PAINTED = """
const painted = (chart) => {
  const canvas = chart.querySelector('canvas');
  const over = chart.querySelector('.u-over');
  const [width, height] = [canvas.width, canvas.height];
  const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
  const at = (x, y) => data.subarray(4 * (y * width + x), 4 * (y * width + x) + 4);
  const isInk = ([red, green, blue, alpha]) => alpha > 0;
  const isColoured = ([red, green, blue, alpha]) =>
    alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40;
  const [left, top] = [over.offsetLeft, over.offsetTop];
  const [right, bottom] = [left + over.offsetWidth, top + over.offsetHeight];
  const range = (from, until) => Array.from({ length: until - from }, (_, index) => from + index);
  const spans = (places, has, gap) => {
    const found = [];
    for (const place of places) {
      if (!has(place)) continue;
      if (found.length && place - found.at(-1)[1] <= gap) found.at(-1)[1] = place;
      else found.push([place, place]);
    }
    return found;
  };
  const columns = (from, until, rows, is) =>
    spans(range(from, until), (x) => rows.some((y) => is(at(x, y))), 4);
  const [rows, below] = [range(top, bottom), range(bottom + 2, height)];
  const edge = [...range(0, width).map((x) => at(x, height - 1)),
    ...range(0, height).flatMap((y) => [at(0, y), at(width - 1, y)])];
  return {
    lines: columns(left, right, rows, isColoured),
    labels: columns(0, width, below, isInk).length +
      spans(range(0, bottom + 2), (y) => range(0, left - 2).some((x) => isInk(at(x, y))), 1).length,
    isCut: edge.some(isInk),
  };
};
"""
# Charts in which nothing is drawn, or something beyond their tile.
FAULTY = (
    PAINTED
    + """
return [...document.querySelectorAll('.chart')].filter((chart) => chart.checkVisibility())
  .filter((chart) => {
    const tile = chart.getBoundingClientRect();
    const canvas = chart.querySelector('canvas').getBoundingClientRect();
    const isOut = canvas.left < tile.left || canvas.right > tile.right ||
      canvas.bottom > tile.bottom;
    const { lines, labels, isCut } = painted(chart);
    return isOut || isCut || labels < 5 || !lines.some(([from, until]) => until > from);
  }).map((chart) => chart.querySelector('h3').textContent);
"""
)
CHART = """[...document.querySelectorAll('.chart')]
    .find((chart) => chart.querySelector('h3').textContent === arguments[0])"""
LEGEND = f"""return [...({CHART}).querySelectorAll('.legend li')]
    .map((row) => [...row.children].map((each) => each.textContent).filter(Boolean).join(' '))"""
POINT = f"""const plot = ({CHART}).querySelector('.plot'); const box = plot.getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent('pointermove', {{ clientX: box.left + arguments[1] }}));"""
# What an operator's tab does every two seconds, at once.
ASK = "document.dispatchEvent(new Event('visibilitychange'))"
NUM_NODES = "return document.querySelectorAll('#past *').length"


def stage_of(*gateway_ids: str, num_seconds: int = 290) -> Stage:
    stage = Stage.example()
    stage.show_history(example_history(*gateway_ids, num_seconds=num_seconds))
    return stage


async def show(page: Browser, url: str, fragment: str = "") -> None:
    await page.open(f"{url}/fleet{fragment}")
    await page.until(IS_LIVE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
async def test_charts_show_data_and_stay_in_their_place(
    page: Browser, width: int, scheme: str
) -> None:
    await page.emulate(width, 1200, scheme=scheme)
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        assert await page.texts(".chart h3") == TITLES
        assert await page.run(FAULTY) == []
        assert await page.run("return document.documentElement.scrollWidth") <= width
        assert await page.run(FAINT_TEXTS) == []
        assert await page.complaints() == []


async def test_pointing_at_a_time_shows_its_values_in_every_chart(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        assert await page.run(LEGEND, "Chips by compute class") == ["spot 16", "reserved 16"]
        assert await page.run(LEGEND, "Resumes and losses") == [
            "links lost 1",
            "resumed, lost 9",
            "moved, drained 0",
        ]
        # Half a minute after the loss: 180 s of 290 s, which end at the right.
        x = f"return 50 + (({CHART}).querySelector('.plot').clientWidth - 60) * 190 / 300"
        await page.run(POINT, "Output tokens", await page.run(x, "Output tokens"))
        assert await page.run(LEGEND, "Chips by compute class") == ["spot 0", "reserved 16"]
        assert await page.run(LEGEND, "Chips by state") == ["wanted, not held 16", "serving 16"]
        assert "waiting 7" in await page.run(LEGEND, "Sequences")
        assert (await page.text("#past .time")).startswith("at ")


async def test_keyboard_reads_the_same_and_says_it(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        await page.run(f"({CHART}).querySelector('.plot').focus()", "Sequences")
        spoken = "return document.activeElement.getAttribute('aria-valuetext')"
        last = await page.run(spoken)
        await page.press(*[LEFT] * 110)
        assert "waiting 7" in await page.run(spoken)
        await page.press(ESCAPE)
        assert await page.run(spoken) == last
        label = "return document.activeElement.getAttribute('aria-label')"
        assert "Sequences, number, last 5 minutes. on engines: 12 to 50" in await page.run(label)


async def test_seconds_without_a_look_are_gaps_and_chips_without_exporter_are_not_shown(
    page: Browser,
) -> None:
    stage = Stage.example()
    stage.show_history(example_history(silent=range(60, 90)))
    async with serving(stage) as url:
        await show(page, url)
        lines = f"{PAINTED} return painted({CHART}).lines"
        (before, after) = await page.run(lines, "Time to first token")
        width = await page.run(
            f"return ({CHART}).querySelector('.u-over').clientWidth", "Time to first token"
        )
        assert after[0] - before[1] == pytest.approx(30 / 300 * width, abs=4)
        assert await page.run(f"return ({CHART}).hidden", "TPU")


async def test_losses_of_slices_are_marked_and_said(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        assert [words.split(" ", 1)[1] for words in await page.texts("#past .events li")] == [
            "v6e-spot-1 draining host 2: the cloud takes it back (metadata preempted)",
            "v6e-spot-9 preempted its replica was not heard of for 5 s",
        ]
        marks = f"return ({CHART}).querySelectorAll('.mark-lost, .mark-leaving').length"
        assert await page.run(marks, "Output tokens") == 2


async def test_several_gateways_are_added_up_and_the_page_says_so(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        alone = await page.run(LEGEND, "Sequences")
        assert "Of gateway g1, kept since" in await page.text("#past [data-part=gateways]")
    async with serving(stage_of("g1", "g2")) as url:
        await show(page, url)
        await page.until_text("#past [data-part=gateways]", "Of 2 gateways together (g1, g2)")
        twice = [
            f"{words} {2 * int(count)}" for words, count in (each.rsplit(" ", 1) for each in alone)
        ]
        assert await page.run(LEGEND, "Sequences") == twice
        # The chips are the fleet's, the same for both.
        assert await page.run(LEGEND, "Chips by compute class") == ["spot 16", "reserved 16"]


async def test_charts_stand_still_while_the_dashboard_is_away_and_go_on_with_the_next(
    page: Browser,
) -> None:
    stage = stage_of("g1")
    async with serving(stage) as url:
        await show(page, url)
        stage.is_dashboard_away = True
        await page.run(ASK)
        await page.until_text("#past [data-part=gateways]", "The dashboard does not answer")
        assert await page.run("return document.body.dataset.link") == "live"
        assert await page.texts(".chart h3") == TITLES
        stage.is_dashboard_away = False
        stage.show_history(example_history("g2", dashboard_id="another", num_seconds=20))
        await page.run(ASK)
        await page.until_text("#past [data-part=gateways]", "Of gateway g2, kept since")
        assert await page.texts(".chart h3") == TITLES


async def test_day_of_answers_makes_the_page_no_larger(page: Browser) -> None:
    stage = stage_of("g1", num_seconds=10)
    later = list(samples(60, 150))[10:]
    async with serving(stage) as url:
        await show(page, url)
        await page.run("window.before = document.querySelector('#past canvas')")
        num_nodes = await page.run(NUM_NODES)
        time_shown = await page.text("#past .time")
        for second, sample in enumerate(later):
            stage.history.take(replace(sample, gateway_id="g1"), NOW_S + 0.5 + second)
            if second % 5 == 0:
                await page.run(ASK)
        await page.until(
            "return document.querySelector('#past .time').innerText !== arguments[0]", time_shown
        )
        assert await page.run("return window.before === document.querySelector('#past canvas')")
        # Another label of an axis is all that may come.
        assert await page.run(NUM_NODES) <= num_nodes + 60


async def test_range_is_kept_in_the_address_and_charts_can_be_hidden(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url, "#range=1h")
        await page.until("return document.querySelector('[name=range][value=\"1h\"]').checked")
        await page.until(
            f"return ({CHART}).querySelector('.plot').ariaLabel.includes('last hour')", "Cost"
        )
        await page.click("#past [value=off]")
        assert not await page.texts(".chart")
        assert await page.run("return location.hash") == "#range=off"
        await page.click("#past [value='5m']")
        await page.until(
            f"return ({CHART}).querySelector('.plot').ariaLabel.includes('5 min')", "Cost"
        )
        assert len(await page.texts(".chart")) == len(TITLES)


async def test_charts_are_of_the_model_that_is_chosen(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url, f"#model={CODE}")
        # Nothing ever asked for it here.
        await page.until_text("#past .chart .none", "No request has been counted yet.")
        await page.type("#model", CHAT)
        await page.until(f"return ({LEGEND.removeprefix('return ')}).length === 2", "Sequences")


async def test_same_is_told_as_a_table(page: Browser) -> None:
    async with serving(stage_of("g1")) as url:
        await show(page, url)
        await page.click("#past summary")
        await page.until_text("#past table", "Chips by state, chips: serving 32 16 29.8 32")
        assert "Price of output" in await page.text("#past table")


async def test_without_a_dashboard_there_are_no_charts_and_the_map_is_shown(page: Browser) -> None:
    stage = Stage.example()
    stage.is_dashboard_away = True
    async with serving(stage) as url:
        await show(page, url)
        assert not await page.texts(".chart")
        assert await page.run("return document.getElementById('past').hidden")
        assert len(await page.texts(".tile")) == 12
