"""The architecture page names what there is: packages and modules at the top of the four parts."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("serving", "deployments", "autoscaling", "loadtest")
PAGE = (ROOT / "docs/architecture.md").read_text()
# One entry a line: its path, spaces, what it holds. Folders end with a slash.
_ENTRY = re.compile(rf"^((?:{'|'.join(PARTS)})/[\w./-]+?) +(\S.*)$")
_MODULE = re.compile(r"`((?:[\w-]+/)*\w+\.py)`")


def listed(page: str) -> list[tuple[str, str]]:
    """The entries of the block below the heading on folders, as path and description."""
    section = page.partition("## Folders and import rules")[2]
    lines = section.partition("```\n")[2].partition("```")[0].splitlines()
    found = [_ENTRY.match(line) for line in lines if line]
    assert all(found), [line for line in lines if line and not _ENTRY.match(line)]
    return [(entry[1], entry[2]) for entry in found if entry]


def top_level(part: str) -> set[str]:
    """The modules of a part and its folders that hold any file."""
    entries = set()
    for path in (ROOT / part).iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            entries.add(f"{part}/{path.name}")
        elif path.is_dir() and any(
            file.is_file() and "__pycache__" not in file.parts for file in path.rglob("*")
        ):
            entries.add(f"{part}/{path.name}/")
    return entries


def test_folder_list_is_the_tree() -> None:
    paths = {path for path, _ in listed(PAGE)}
    there = set().union(*map(top_level, PARTS))
    assert there - paths == set(), "not on the page"
    assert paths - there == set(), "on the page, and not in the tree"


def test_every_entry_is_listed_once_with_words_of_its_own() -> None:
    paths = Counter(path for path, _ in listed(PAGE))
    words = Counter(text for _, text in listed(PAGE))
    assert [path for path, count in paths.items() if count > 1] == []
    assert [text for text, count in words.items() if count > 1] == []


def test_modules_that_the_page_names_exist() -> None:
    modules = {
        f"/{path.relative_to(ROOT)}" for part in PARTS for path in (ROOT / part).rglob("*.py")
    }
    modules |= {f"/{path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("*.py")}
    named = set(_MODULE.findall(PAGE))
    assert len(named) > 20
    assert [
        name for name in sorted(named) if not any(m.endswith(f"/{name}") for m in modules)
    ] == []
