"""Measures the floor plan of the project: `python -m scripts.shape [FOLDER OF ANOTHER CHECKOUT]`.

Counts what stands at the top of `serving/`, the import layers and edges between these entries, the
circles among them, the largest package, and long modules. Reads the code, and imports nothing of
it.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_LONG_LINES = 400
_PARTS = ("serving", "deployments", "autoscaling", "loadtest")

Edges = Mapping[str, frozenset[str]]


def main() -> None:
    """Prints one figure a line."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    edges = top_edges(root, "serving")
    modules = [path for part in _PARTS for path in sorted((root / part).rglob("*.py"))]
    lines = {path: len(path.read_text().splitlines()) for path in modules}
    sizes = {path.parent: num_entries(path.parent) for path in modules}
    largest = max(sizes, key=lambda folder: sizes[folder])
    figures = {
        "packages and modules at the top of serving": len(edges),
        "import layers of serving": num_layers(edges),
        "import edges of serving": sum(map(len, edges.values())),
        "entries of serving in a circle": sum(len(ring) for ring in circles(edges)),
        "most entries of a package": f"{sizes[largest]} ({largest.relative_to(root)})",
        f"modules over {_LONG_LINES} lines": sum(num > _LONG_LINES for num in lines.values()),
        "product lines": sum(lines.values()),
        "words of the README": len((root / "README.md").read_text().split()),
    }
    for name, figure in figures.items():
        print(f"{name}: {figure}")


def num_entries(folder: Path) -> int:
    """Returns the modules and packages that lie in a folder, itself not counted."""
    packages = [path for path in folder.iterdir() if (path / "__init__.py").exists()]
    return len(packages) + sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def top_edges(root: Path, package: str) -> Edges:
    """Returns which entries at the top of a package each of them imports."""
    edges: dict[str, set[str]] = {}
    for path in (root / package).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if len(parts) == 2 and parts[1] == "__init__":
            continue
        own = edges.setdefault(parts[1], set())
        own.update(name for name in _imported(path, package) if name != parts[1])
    return {name: frozenset(known & edges.keys()) for name, known in edges.items()}


def num_layers(edges: Edges) -> int:
    """Returns how many entries the longest chain of imports has; a circle counts as one entry."""
    ring_of = {name: ring for ring in circles(edges) for name in ring}
    depths: dict[frozenset[str], int] = {}

    def depth(ring: frozenset[str]) -> int:
        if ring not in depths:
            below = {ring_of.get(to, frozenset({to})) for name in ring for to in edges[name]}
            depths[ring] = 1 + max((depth(other) for other in below - {ring}), default=0)
        return depths[ring]

    return max(depth(ring_of.get(name, frozenset({name}))) for name in edges)


def circles(edges: Edges) -> list[frozenset[str]]:
    """Returns the sets of entries that reach one another by imports."""
    reached = {name: _reach(edges, name) for name in edges}
    rings = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in edges
        if name in reached[name]
    }
    return sorted(rings, key=sorted)


def _reach(edges: Edges, start: str) -> set[str]:
    found: set[str] = set()
    rest = list(edges[start])
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            rest += edges[name]
    return found


def _imported(path: Path, package: str) -> Iterator[str]:
    """The entries at the top of the package that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, _, rest = name.partition(".")
            if first == package and rest:
                yield rest.partition(".")[0]


if __name__ == "__main__":
    main()
