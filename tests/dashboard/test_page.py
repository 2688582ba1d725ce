"""The page's files: all that it names is there, and the plotting library is the official one."""

import hashlib
import re

import pytest

from serving.dashboard.page import page_answers

# dist/uPlot.iife.js of the package uplot 1.6.16 at npm, read 2026-11-22.
UPLOT_SHA256 = "655bc8aa33781e8721c5af6b59f1699c03c9bda951aa74a6ab518ac20cc4326d"


def test_every_file_that_the_page_or_a_script_names_is_served() -> None:
    page = page_answers()
    html = page.get("/fleet")
    assert html is not None
    named = set(re.findall(r'(?:src|href)="(fleet/[^"]+)"', html.body.decode()))
    for name in sorted(named):
        part = page.get(f"/{name}")
        assert part is not None, name
    scripts = {path: part for path, part in page.items() if path.endswith(".js")}
    imported = {
        module
        for part in scripts.values()
        for module in re.findall(r'from "\./([^"]+)"', part.body.decode())
    }
    assert {"charts.js", "kinds.js"} <= imported
    assert {f"/fleet/{module}" for module in imported} <= scripts.keys()
    assert {"fleet/uPlot.iife.js", "fleet/uPlot.min.css", "fleet/fleet.js"} <= named


def test_plotting_library_is_what_its_makers_published() -> None:
    script = page_answers().get("/fleet/uPlot.iife.js")
    assert script is not None
    assert hashlib.sha256(script.body).hexdigest() == UPLOT_SHA256
    assert script.headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("path", ["/fleet/", "/fleet/__init__.py", "/fleet/../__init__.py", "/"])
def test_nothing_else_is_served(path: str) -> None:
    assert page_answers().get(path) is None
