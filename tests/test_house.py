"""The floor plan: few things at each address, no circle among them, and one meaning for a name."""

import ast
from collections import defaultdict
from pathlib import Path

from scripts.shape import circles, num_entries, top_edges

ROOT = Path(__file__).parents[1]
PARTS = ("serving", "deployments", "autoscaling", "loadtest")
MAX_ENTRIES = 16


def test_no_package_has_more_entries_than_one_takes_in() -> None:
    packages = [path.parent for part in PARTS for path in (ROOT / part).rglob("__init__.py")]
    assert len(packages) > len(PARTS)
    sizes = {str(package.relative_to(ROOT)): num_entries(package) for package in packages}
    assert {name: size for name, size in sizes.items() if size > MAX_ENTRIES} == {}


def test_no_entries_of_a_part_are_in_a_circle() -> None:
    for part in PARTS:
        edges = top_edges(ROOT, part)
        assert len(edges) > 1
        assert circles(edges) == []


def test_public_class_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 500
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
