"""Makes `docs/operate/fleet.png`: the fleet page over the example fleet of the tests.

Run from the root of the tree: python -m scripts.fleet_screenshot [--scheme dark] [--width 420] FILE
"""

import argparse
import asyncio
from pathlib import Path

from tests.dashboard.browser import browser
from tests.dashboard.fleet_stage import Stage, serving


async def _take(address: str, width: int, scheme: str) -> bytes:
    async with serving(Stage.example()) as url, browser() as chromium:
        await chromium.emulate(width, 900, scheme=scheme)
        await chromium.open(f"{url}/fleet{address}")
        await chromium.until("return document.body.dataset.link === 'live'")
        await chromium.run("document.querySelector('.end details').open = true")
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
    given = parser.parse_args()
    given.file.write_bytes(asyncio.run(_take(given.address, given.width, given.scheme)))


if __name__ == "__main__":
    main()
