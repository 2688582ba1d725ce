"""Links of the pages lead to files that there are, and to headings that these have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "models/slicewise-demo/README.md",
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
# A file or folder of ours in backticks, from the root.
_PATH = re.compile(
    r"`((?:serving|deployments|autoscaling|loadtest|tests|benchmarks|scripts|docs)/[\w./-]+)`"
)


def anchors_of(page: str) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = _HEADING.findall(_BLOCK.sub("", page))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, page: str) -> list[str]:
    """The links of `page`, which lies at `path`, that lead nowhere. The web is not asked."""
    dead = []
    for link in _LINK.findall(_BLOCK.sub("", page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        exists = target.exists() and target.is_relative_to(ROOT)
        if not exists or (
            anchor and anchor not in anchors_of(target.read_text() if file else page)
        ):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text()) == []


# The page of old names has them on purpose.
@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name != "names.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_that_a_page_names_exist(path: Path) -> None:
    named = _PATH.findall(path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_dead_links_would_be_found() -> None:
    links = "[a](none.md) [b](README.md) [c](README.md#no-such-heading) [d](#none)"
    page = f"# Here\n\n{links} [e](#here) [f](README.md#status)\n"
    dead = ["none.md", "README.md#no-such-heading", "#none"]
    assert dead_links(ROOT / "README.md", page) == dead


def test_map_of_the_docs_has_every_page() -> None:
    # Decisions and runbooks have pages of their own that list them.
    docs = ROOT / "docs"
    map_page = (docs / "README.md").read_text()
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    listed = {link.partition("#")[0] for link in _LINK.findall(map_page)}
    wanted = {page for page in pages if not page.startswith(("adr/", "operate/runbooks/"))}
    assert wanted - {"README.md"} - listed == set()
