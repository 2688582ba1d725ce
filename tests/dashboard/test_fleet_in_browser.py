"""The fleet page in a real Chromium, over the real edge and an example fleet."""

import itertools
from dataclasses import replace

import pytest

from serving.domain.slice_lifecycle import EndCause, SliceState
from serving.domain.slice_records import HostRecord

from .browser import Browser
from .fleet_stage import (
    CHAT,
    CODE,
    NOW_S,
    V6E,
    Stage,
    example_board,
    example_ended,
    held,
    ready,
    serving,
)

pytestmark = [
    pytest.mark.needs("chromium", "chromedriver"),
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
]

ENTER, SPACE, TAB = "\ue007", " ", "\ue004"
IS_LIVE = "return document.body.dataset.link === 'live'"
TIMES = "\N{MULTIPLICATION SIGN}"
TILE = """[...document.querySelectorAll('.tile')]
    .find((tile) => tile.querySelector('h3').textContent === arguments[0])"""

# The contrast of every shown text with what lies behind it, where it is below WCAG's AA.
FAINT_TEXTS = """
const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
const luminance = (color) => color.slice(0, 3).map((part) => part / 255)
  .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
const behind = (node) => {
  for (let each = node; each; each = each.parentElement) {
    const color = rgba(getComputedStyle(each).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
  const [a, b] = [rgba(getComputedStyle(node).color), behind(node)].map(luminance);
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) faint.push([walker.currentNode.data, contrast]);
}
return faint;
"""

# From now on, `touched` are the tiles in which anything changes; null for what is outside of tiles.
WATCH_TILES = """
window.touched = new Set();
const note = ({ target }) => window.touched.add(
  (target.nodeType === Node.TEXT_NODE ? target.parentElement : target)?.closest('.tile'));
new MutationObserver((changes) => changes.forEach(note)).observe(
  document.getElementById('classes'), { subtree: true, childList: true, characterData: true });
"""


async def show(page: Browser, url: str) -> None:
    await page.open(f"{url}/fleet")
    await page.until(IS_LIVE)


async def tile_text(page: Browser, name: str) -> str:
    text = str(await page.run(f"return ({TILE})?.innerText ?? 'no such tile'", name))
    return " ".join(text.split())


async def until_tile(page: Browser, name: str, words: str) -> None:
    await page.until(
        f"return ({TILE})?.innerText.replace(/\\s+/g, ' ').includes(arguments[1])", name, words
    )


async def test_fleet_is_shown_by_compute_class_with_counts_of_every_state(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        assert await page.texts("#classes h2") == ["flex-start", "local", "reserved", "spot"]
        assert await page.texts("#classes section > p") == [
            "0 of 2 ready, 64 chips held",
            "1 of 1 ready",
            "3 of 3 ready, 48 chips held",
            "2 of 6 ready, 56 chips held",
        ]
        states = ["requested", "provisioning", "reserved", "probing", "loading"]
        assert await page.texts(".count") == [
            *(f"1 {state}" for state in states),
            "6 ready",
            "1 draining",
        ]
        names = await page.texts("section:last-child > .tiles h3")
        assert names == [f"v6e-spot-{n}" for n in (1, 2, 3, 4)] + ["no slice yet"] * 2
        assert await page.texts("#models li") == [
            f"{CHAT} 54 requests in flight",
            f"{CODE} 112 requests in flight, 3 waiting for an engine",
        ]
        assert await page.text("#gateway") == "gateway 5f0c2a9b41de, up 2d04h"
        assert await page.run("return document.title") == "6/12 ready · Slicewise fleet"
        assert await page.complaints() == []


async def test_tiles_say_what_an_operator_asks(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        assert await tile_text(page, "v6e-spot-2") == (
            f"v6e-spot-2 ready v6e 4x4 · 4 hosts {TIMES} 4 chips for 41m00s model {CODE} "
            "in flight 31 KV cache 52% the engine takes requests history, 52m00s"
        )
        assert await tile_text(page, "v6e-spot-1") == (
            f"v6e-spot-1 draining v6e 4x4 · 4 hosts {TIMES} 4 chips for 11s gone in 19s "
            f"model {CHAT} in flight 24 KV cache 39% "
            "host 2: the cloud takes it back (metadata preempted) history, 3h23m"
        )
        assert await tile_text(page, "no slice yet") == (
            f"no slice yet provisioning wants v6e 4x4 for 4m00s model {CHAT} "
            "no slice of v6e 4x4 is free: 3 of 3 are held history, 4m00s"
        )
        assert "no slice: this machine" in await tile_text(page, "replica-here")
        dashed = """return [...document.querySelectorAll('.tile')]
            .filter((tile) => getComputedStyle(tile).borderTopStyle === 'dashed').length"""
        assert await page.run(dashed) == 2
        squares = f"""return [...({TILE}).querySelectorAll('.hosts > span')]
            .map((host) => host.style.getPropertyValue('--chips'))"""
        assert await page.run(squares, "v6e-spot-1") == ["4", "4", "4", "4"]
        assert await page.run(squares, "v6e-spot-3") == ["8"]


async def test_ended_lives_are_listed_with_their_cause(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        rows = await page.texts(".end")
        assert len(rows) == 5
        assert rows[0] == (
            f"preempted v6e-spot-9 spot · v6e · 4x4 · {CHAT} 2m10s ago "
            "its replica was not heard of for 5 s history, 2h11m"
        )
        causes = [row.partition(" v")[0] for row in rows]
        assert causes == ["preempted", "released", "unhealthy", "boot failed", "expired"]
        assert not await page.texts("#more")


async def test_words_of_a_history_stand_beside_each_other(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        await page.click(".end summary")
        boxes = """return [...document.querySelector('.end .history > li').children]
            .map((node) => node.getBoundingClientRect()).map((box) => [box.left, box.right])"""
        places = await page.run(boxes)
        assert len(places) == 5
        for (_, right), (left, _) in itertools.pairwise(places):
            assert right <= left


async def test_many_ended_lives_are_shown_on_demand(page: Browser) -> None:
    stage = Stage.example()
    for number in range(20):
        life = ready(f"old-{number}", 9999.0).end(EndCause.RELEASED, NOW_S - 9000, "leaving")
        stage.directory.end(held(f"old-{number}", V6E, CHAT, "spot", life))
    async with serving(stage) as url:
        await show(page, url)
        assert len(await page.texts(".end")) == 12
        assert await page.text("#more") == "show all 25"
        await page.click("#more")
        assert len(await page.texts(".end")) == 25


async def test_change_is_shown_in_place(page: Browser) -> None:
    stage = Stage.example()
    async with serving(stage) as url:
        await show(page, url)
        focus = f"window.before = {TILE}; window.before.querySelector('summary').focus()"
        await page.run(focus, "v6e-spot-2")
        await page.press(ENTER)
        await until_tile(page, "v6e-spot-2", "loading 2m00s")
        stage.now_s += 3
        record = stage.record("replica-v6e-spot-2")
        life = record.life.enter(SliceState.DRAINING, stage.now_s, "maintenance is announced")
        stage.put(replace(record, life=life, drain_deadline_s=stage.now_s + 60))
        await until_tile(page, "v6e-spot-2", "gone in 1m00s")
        text = await tile_text(page, "v6e-spot-2")
        assert text.startswith("v6e-spot-2 draining v6e 4x4")
        assert "maintenance is announced" in text
        # The history is still open, holds the new state, and the keyboard is where it was.
        assert "ready 41m03s" in text
        assert await page.run(f"return window.before === {TILE}", "v6e-spot-2")
        assert await page.run(
            "return document.activeElement === window.before.querySelector('summary')"
        )
        assert "5 ready" in await page.texts(".count")


async def test_slices_come_and_go(page: Browser) -> None:
    stage = Stage.example()
    async with serving(stage) as url:
        await show(page, url)
        record = stage.record("replica-v5p-res-2")
        life = record.life.end(EndCause.UNHEALTHY, NOW_S, "the engine hung")
        stage.directory.end(replace(record, life=life))
        stage.put(held("v5p-res-2b", V6E, CHAT, "on-demand", ready("v5p-res-2b", 1.0)))
        await page.until_text(".end", "unhealthy v5p-res-2")
        assert await tile_text(page, "v5p-res-2") == "no such tile"
        headings = await page.texts("#classes h2")
        assert headings == ["flex-start", "local", "on-demand", "reserved", "spot"]


async def test_only_what_changed_is_touched_in_a_large_fleet(page: Browser) -> None:
    stage = Stage()
    for number in range(500):
        name = f"s-{number}"
        stage.put(held(name, V6E, CHAT, f"class-{number % 4}", ready(name, 100.0)))
    async with serving(stage) as url:
        await show(page, url)
        await page.run(WATCH_TILES)
        record = stage.record("replica-s-321")
        life = record.life.enter(SliceState.DRAINING, NOW_S, "leaving")
        stage.put(replace(record, life=life))
        await page.until_text("#counts", "499 ready 1 draining")
        touched = "return [...window.touched].map((tile) => tile?.querySelector('h3').textContent)"
        names = await page.run(touched)
        # None stands for the heading of its compute class, whose count of ready slices changed.
        assert sorted(names, key=str) == [None, "s-321"]


async def test_names_are_text_and_never_markup(page: Browser) -> None:
    hostile = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
    stage = Stage()
    life = ready(hostile, 60.0).enter(SliceState.READY, NOW_S, f"reason {hostile}")
    record = held("x", V6E, f"model {hostile}", f"class {hostile}", life)
    host = HostRecord(0, f"node {hostile}", f"address {hostile}", 4)
    stage.put(replace(record, hosts=(host,), generation=hostile, topology=hostile))
    stage.directory.end(replace(next(example_ended()), replica_id=hostile, model=hostile))
    async with serving(stage) as url:
        await show(page, url)
        await page.click(".tile summary")
        await page.until_text(".host-list", "address <img")
        body = await page.text("body")
        for words in (f"reason {hostile}", f"model {hostile}", f"class {hostile}"):
            assert words in body
        assert await page.text(".tile h3") == hostile
        assert await page.run("return window.hacked ?? null") is None
        assert await page.run("return document.querySelectorAll('img').length") == 0
        scripts = "return [...document.scripts].map((script) => script.getAttribute('src'))"
        assert await page.run(scripts) == ["fleet/uPlot.iife.js", "fleet/fleet.js"]
        # What a script smuggled in some other way would meet.
        assert await page.run(
            "try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; }"
        ) in ("TypeError", "SyntaxError")


async def test_key_is_asked_for_and_a_wrong_one_is_refused_in_words(page: Browser) -> None:
    async with serving(Stage.example("right-key")) as url:
        await page.open(f"{url}/fleet")
        await page.until_text("#door", "This gateway wants an API key")
        assert await page.text("#key-problem") == ""
        assert await page.run("return document.activeElement.id") == "key"
        assert await page.run("return document.getElementById('key').type") == "password"
        await page.type("#key", "wrong-key")
        await page.press(ENTER)
        await page.until_text("#key-problem", "The gateway does not accept this key.")
        assert not await page.texts(".tile")
        await page.type("#key", "two words")
        await page.press(ENTER)
        await page.until_text("#key-problem", "no spaces")
        await page.type("#key", "right-key")
        await page.press(ENTER)
        await page.until(IS_LIVE)
        assert len(await page.texts(".tile")) == 12
        assert not await page.texts("#door")
        # It outlives a reload of this tab, and nothing else.
        await page.open(f"{url}/fleet")
        await page.until(IS_LIVE)
        assert await page.run("return [localStorage.length, document.cookie]") == [0, ""]
        await page.click("#forget")
        await page.until_text("#door", "This gateway wants an API key")
        assert await page.run("return sessionStorage.length") == 0
        assert not await page.texts(".tile")


async def test_gateway_that_fails_or_is_away_is_said_to_and_its_return_too(page: Browser) -> None:
    stage = Stage.example()
    async with serving(stage) as url:
        await show(page, url)
        stage.is_failing = True
        await page.until_text("#link", "no answer from the gateway (HTTP 500)")
        await page.until_text("#age", "shown is the fleet of")
        assert len(await page.texts(".tile")) == 12
        stage.is_failing = False
        await page.until(IS_LIVE)
        assert await page.text("#age") == ""
    await page.until_text("#link", "no answer from the gateway (not reachable)")


async def test_filter_by_model_is_kept_in_the_address(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        options = "return [...document.getElementById('model').options].map((each) => each.value)"
        assert await page.run(options) == ["", CHAT, CODE]
        await page.type("#model", CODE)
        await page.until_text("#total", "4 replicas, 40 chips held")
        assert await page.texts("#classes h2") == ["local", "spot"]
        assert not await page.texts(".end")
        await page.run("location.reload()")
        await page.until_text("#total", "4 replicas, 40 chips held")
        assert await page.run("return document.getElementById('model').value") == CODE


async def test_compact_view_leaves_name_state_and_hosts(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        await page.click("#compact")
        assert await tile_text(page, "v6e-spot-2") == "v6e-spot-2 ready for 41m00s"
        assert (await page.run("return location.hash")) == "#compact="


async def test_page_is_used_by_keyboard(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        focus = "return document.activeElement.id || document.activeElement.tagName"
        reached = []
        for _ in range(3):
            await page.press(TAB)
            reached.append(await page.run(focus))
        assert reached == ["model", "compact", "SUMMARY"]
        await page.press(SPACE)
        await until_tile(page, "v5e-flex-1", "host 7:")
        # Only the link's own change is read aloud, not every answer.
        live = (
            "return [...document.querySelectorAll('[role=status], [aria-live]')].map((e) => e.id)"
        )
        assert await page.run(live) == ["link"]


async def test_page_fits_a_narrow_window(page: Browser) -> None:
    await page.emulate(360, 1000)
    async with serving(Stage.example()) as url:
        await show(page, url)
        assert await page.run("return document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_has_the_contrast_of_wcag_aa(page: Browser, scheme: str) -> None:
    await page.emulate(1360, 6000, scheme=scheme)
    stage = Stage.example()
    async with serving(stage) as url:
        await show(page, url)
        await page.run("document.querySelectorAll('details').forEach((each) => each.open = true)")
        await page.until_text(".history", "requested")
        assert await page.run(FAINT_TEXTS) == []
        stage.is_failing = True
        await page.until_text("#link", "no answer")
        assert await page.run(FAINT_TEXTS) == []


async def test_plan_is_shown_with_its_reasons_and_alerts_stand_out(page: Browser) -> None:
    stage = Stage.example()
    stage.board = example_board("<b>the load is 70 s old</b>")
    async with serving(stage) as url:
        await show(page, url)
        assert await page.texts(".plan .targets") == [
            "flex-start 2 \u00b7 reserved 3 \u00b7 spot 4"
        ]
        assert await page.texts(".plan .quiet") == [
            "need 9 slices \u00b7 decided 4s ago \u00b7 next slice in 1m20s"
            " \u00b7 last change 1m35s ago"
        ]
        assert await page.texts(".plan .reasons li") == [
            "flex-start +2 need 9, 5 ready",
            "refused: spot +2 not relied on: a wish is 131 s late",
        ]
        assert await page.texts(".plan .alerts li") == ["<b>the load is 70 s old</b>"]
        assert await page.run(FAINT_TEXTS) == []
        assert await page.complaints() == []


async def test_fleet_that_does_not_scale_has_no_plans(page: Browser) -> None:
    async with serving(Stage.example()) as url:
        await show(page, url)
        assert await page.run("return document.getElementById('plans-section').hidden")


async def test_fleet_without_replicas_says_so(page: Browser) -> None:
    async with serving(Stage()) as url:
        await show(page, url)
        assert "No slice replica is listed" in await page.text("#empty")
        assert await page.text("#ended-note") == "None since the directory started."
