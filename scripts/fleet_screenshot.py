"""Makes the pictures of the fleet page, over the example fleet and history of the tests.

Run from the root of the tree, for the map or for its charts:
python -m scripts.fleet_screenshot [--charts] [--scheme dark] [--width 420] [FILE]
"""

import argparse
import asyncio
from pathlib import Path

from tests.dashboard.browser import browser
from tests.dashboard.fleet_stage import EXAMPLE_LINES, Stage, example_uses, serving
from tests.dashboard.history_stage import example_history

# Seconds of the history before the example fleet lost its spot slice.
_LOST_S = 160


async def _take(address: str, width: int, scheme: str, *, are_charts: bool) -> bytes:
    stage = Stage.example()
    stage.lines, stage.uses = EXAMPLE_LINES, tuple(example_uses())
    if are_charts:
        stage.show_history(example_history("5f0c2a9b41de", "c81e0b77d2f4", lost_s=_LOST_S))
    async with serving(stage) as url, browser() as chromium:
        await chromium.emulate(width, 900, scheme=scheme)
        await chromium.open(f"{url}/fleet{address}")
        await chromium.until("return document.body.dataset.link === 'live'")
        await chromium.run("document.querySelector('.end details').open = true")
        if are_charts:
            rest = ".summary, #tenants-section, #classes, #ended-section"
            await chromium.run(
                "document.querySelectorAll(arguments[0]).forEach((node) => node.hidden = true)",
                rest,
            )
        # Tiles outside of the window are not painted: the window becomes as tall as the page.
        await chromium.emulate(width, 10_000, scheme=scheme)
        height = await chromium.run("return Math.ceil(document.body.offsetHeight)")
        await chromium.emulate(width, height, scheme=scheme)
        return await chromium.screenshot()


def main() -> None:
    """Takes one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=Path("docs/operate/fleet.png"))
    parser.add_argument("--address", default="", help="What follows /fleet, such as #compact=")
    parser.add_argument("--width", type=int, default=1360)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--charts", action="store_true", help="Only the charts.")
    given = parser.parse_args()
    picture = _take(given.address, given.width, given.scheme, are_charts=given.charts)
    given.file.write_bytes(asyncio.run(picture))


if __name__ == "__main__":
    main()
