"""What the fleet page shows of tenants, in a real Chromium over the real edge."""

from dataclasses import replace

import pytest

from serving.domain.usage.quotas import Period, Quota, QuotaKind, TenantUse

from .browser import Browser
from .fleet_stage import CHAT, CODE, EXAMPLE_LINES, Stage, example_uses, serving
from .test_fleet_in_browser import FAINT_TEXTS, show

pytestmark = [
    pytest.mark.needs("chromium", "chromedriver"),
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
]

DAILY = Quota(QuotaKind.TOKENS, 1000, Period.DAY)
# Boxes of shown texts that go beyond their tile.
JUTTING = """
return [...document.querySelectorAll('.tenant')].flatMap((tile) => {
  const { left, right } = tile.getBoundingClientRect();
  return [...tile.querySelectorAll('*')].filter((node) => node.checkVisibility())
    .map((node) => [node.className, node.getBoundingClientRect()])
    .filter(([, box]) => box.left < left || box.right > right).map(([name]) => name);
});
"""


def example() -> Stage:
    stage = Stage.example()
    stage.lines, stage.uses = EXAMPLE_LINES, tuple(example_uses())
    return stage


async def test_tenants_are_shown_with_their_lines_and_quotas(page: Browser) -> None:
    async with serving(example()) as url:
        await show(page, url)
        assert await page.texts(".tenant") == [
            "search 600 of 600 requests per minute 100% 1,204 refused 9 of 32 concurrent 28%",
            "batch-evaluation 120 batch waiting 43.8125 of 50 usd per day 87%",
            "acme 4 interactive, 3 standard waiting "
            f"1,250,000 of 5,000,000 tokens per day of {CHAT} 25% 3.2 of 50 usd per day 6% "
            "2 of 32 concurrent 6% 12 of 600 requests per minute 2% 1 quota more, less used",
            "default 1 batch waiting",
            "guests 0 of 100,000 tokens per day 0%",
        ]
        assert await page.text("#tenants-note") == "128 in line at this gateway"
        assert not await page.texts("#more-tenants")
        levels = "return [...document.querySelectorAll('.quota')].map((q) => q.dataset.level)"
        assert (await page.run(levels))[:3] == ["over", "below", "near"]
        assert await page.complaints() == []


async def test_lines_are_those_of_the_chosen_model_and_quotas_stay(page: Browser) -> None:
    async with serving(example()) as url:
        await show(page, url)
        await page.type("#model", CODE)
        await page.until_text("#tenants-note", "124 in line at this gateway")
        names = await page.texts(".tenant h3")
        assert names == ["search", "batch-evaluation", "acme", "default", "guests"]
        assert await page.texts(".tenant .line") == [
            "120 batch waiting",
            "3 standard waiting",
            "1 batch waiting",
        ]


async def test_what_tenants_use_is_changed_in_place(page: Browser) -> None:
    stage = example()
    async with serving(stage) as url:
        await show(page, url)
        await page.run("window.before = document.querySelector('.tenant')")
        first, *others = stage.uses
        stage.uses = (replace(first, used=30.0, refused=0), *others)
        await page.until_text("#tenants", "30 of 600 requests per minute 5%")
        assert await page.texts(".tenant h3") == [
            "batch-evaluation",
            "search",
            "acme",
            "default",
            "guests",
        ]
        assert await page.run("return document.querySelectorAll('.tenant')[1] === window.before")
        assert not await page.texts(".tenant .refused")


async def test_fifty_tenants_are_six_until_all_are_wanted(page: Browser) -> None:
    stage = Stage()
    stage.uses = tuple(
        TenantUse(f"t{number}", DAILY, 10 * number + part, 0)
        for number in range(50)
        for part in range(3)
    )
    stage.lines = {CHAT: [(f"t{number}", "standard", number) for number in range(50)], CODE: []}
    async with serving(stage) as url:
        await show(page, url)
        assert await page.texts(".tenant h3") == [f"t{number}" for number in range(49, 43, -1)]
        note = await page.text("#tenants-note")
        assert note == (
            "1,225 in line at this gateway · 435 of them in lines that are not shown · "
            "50 more quotas further from the limit"
        )
        # Two thirds of 150 quotas are told, those of 34 tenants.
        assert await page.text("#more-tenants") == "show all 34"
        await page.click("#more-tenants")
        assert len(await page.texts(".tenant")) == 34
        assert not await page.texts("#more-tenants")


@pytest.mark.parametrize("width", [360, 1360])
async def test_longest_names_stay_in_their_tile(page: Browser, width: int) -> None:
    await page.emulate(width, 2000)
    stage = Stage()
    name = "a" * 63
    quota = Quota(QuotaKind.TOKENS, 10**15, Period.DAY, frozenset({"m" * 90}))
    stage.uses = (TenantUse(name, quota, 10**15 - 1, 10**9),)
    stage.lines = {CHAT: [(name, each, 10**6) for each in ("interactive", "standard", "batch")]}
    async with serving(stage) as url:
        await show(page, url)
        assert "99% 1,000,000,000 refused" in await page.text(".tenant")
        assert await page.run(JUTTING) == []
        assert await page.run("return document.documentElement.scrollWidth") <= width


async def test_fleet_without_lines_and_quotas_has_no_tenants(page: Browser) -> None:
    stage = example()
    stage.lines, stage.uses = {}, ()
    async with serving(stage) as url:
        await show(page, url)
        assert await page.run("return document.getElementById('tenants-section').hidden")
        stage.uses = (TenantUse("acme", DAILY, 5, 0),)
        await page.until_text(".tenant", "acme 5 of 1,000 tokens per day 0%")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_of_tenants_has_the_contrast_of_wcag_aa(
    page: Browser, scheme: str
) -> None:
    await page.emulate(1360, 2000, scheme=scheme)
    async with serving(example()) as url:
        await show(page, url)
        assert len(await page.texts(".tenant")) == 5
        assert await page.run(FAINT_TEXTS) == []


async def test_names_of_tenants_are_text_and_never_markup(page: Browser) -> None:
    hostile = "<img src=x onerror='window.hacked = 1'>"
    stage = Stage()
    stage.uses = (TenantUse(hostile, replace(DAILY, models=frozenset({hostile})), 5, 0),)
    stage.lines = {CHAT: [(hostile, hostile, 2)], CODE: []}
    async with serving(stage) as url:
        await show(page, url)
        assert (await page.text(".tenant")).count(hostile) == 3
        assert await page.run("return document.querySelectorAll('img').length") == 0
