"""Which test files a change can reach: by imports, and by the names of files in their text.

Owns the graph of all Python files of the repository, read from their syntax, not by running them. A
file reaches what it imports anywhere in it, the packages around that, every module that one of its
strings names (a program in a string, `python -m ...`), and a test the `conftest.py` files above it.
What Ray imports when an application starts, `module:attribute`, is for the tests that start one.

A file that is no module is read by those that name it, and by tests that name a folder around it
with a pattern, or with no file of it. In a package it belongs to the package as well. A sentence
names no files. Pure but for `read_sources`.
"""

import ast
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TESTS = "tests"
_WHO_ASKS_FOR_ENTRY_POINTS = "importlib.metadata.entry_points"
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\.|:(?=\w))?")

_SPACE = re.compile(r"\s")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One Python file and what it says.

    `imports` are dotted names, of modules or of what is in them; `dotted` are such names in
    strings, with a point at the end where something follows that is not known yet. `names` are
    files and folders, each part of a path by itself.
    """

    path: str
    imports: frozenset[str]
    dotted: frozenset[str]
    names: frozenset[str]


def module_name(path: str) -> str:
    """The name by which `path`, relative to the root, is imported."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse_source(path: str, text: str) -> Source:
    """What one file says. Docstrings say nothing: they name modules that the file does not use."""
    tree = ast.parse(text)
    package = PurePosixPath(path).parent.parts
    imports: set[str] = set()
    strings: list[str] = []
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and node.body and isinstance(node.body[0], ast.Expr):
            docstrings.add(id(node.body[0].value))
        match node:
            case ast.Import(names=names):
                imports |= {each.name for each in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                around = ".".join(package[: len(package) - level + 1]) if level else ""
                base = ".".join(filter(None, (around, module)))
                imports |= {base} | {f"{base}.{each.name}" for each in names}
            case ast.Constant(value=str(said)) if id(node) not in docstrings:
                strings.append(said)
    dotted = {found for said in strings if "." in said for found in _DOTTED.findall(said)}
    # What begins with a slash is an address more often than a file.
    paths = [said for said in strings if not _SPACE.search(said) and not said.startswith("/")]
    names = {part for said in paths for part in said.split("/")}
    inside = {found for found in dotted if not found.endswith(":")}
    return Source(path, frozenset(imports), frozenset(inside), frozenset(names))


def read_sources(root: Path, paths: Iterable[str]) -> list[Source]:
    """Every Python file among these paths; one that is gone says nothing."""
    python = sorted(path for path in paths if path.endswith(".py"))
    texts = {path: (root / path).read_text() if (root / path).exists() else "" for path in python}
    return [parse_source(path, text) for path, text in texts.items()]


class Selection:
    """The graph of all sources, and what follows from a change."""

    def __init__(
        self, sources: Iterable[Source], paths: Iterable[str] = (), pyproject: str = ""
    ) -> None:
        """`paths` are all files, `pyproject` is the text that names the entry points."""
        self._files = _files_by_folder(paths)
        self._sources = {module_name(source.path): source for source in sources}
        self._below = _below(self._sources)
        self._tops = {name.partition(".")[0] for name in self._sources}
        self._bare = _bare_names(self._sources)
        self._entries = frozenset(_entry_points(tomllib.loads(pyproject)))
        self._reached = {name: self._reaches(name) for name in self._sources}

    def test_files(self, changed: Sequence[str]) -> list[str]:
        """The test files that these paths can reach, the nearest first."""
        distances = self._distances({name for path in changed for name in self._readers(path)})
        found = [
            (distance, self._sources[name].path)
            for name, distance in distances.items()
            if is_test_file(self._sources[name].path)
        ]
        return [path for _, path in sorted(found)]

    def _readers(self, path: str) -> Iterator[str]:
        """The modules that are, hold or name the file at `path`."""
        parts = PurePosixPath(path)
        own = module_name(path)
        if path.endswith(".py"):
            if own in self._sources:
                yield own
        else:
            package = ".".join(parts.parent.parts)
            if package in self._sources:
                yield package
        # `run` is a common word, `.ci` and `run` together are not.
        named = {parts.name} if parts.suffix else {parts.name, *parts.parent.parts[-1:]}
        folders = () if path.endswith(".py") else parts.parent.parts
        for name, source in self._sources.items():
            if named <= source.names or any(self._reads_all(source, each) for each in folders):
                yield name

    def _reads_all(self, source: Source, folder: str) -> bool:
        """Whether this is a test that reads a folder, and not only certain files of it."""
        if folder not in source.names or not source.path.startswith(f"{TESTS}/"):
            return False
        has_pattern = any("*" in name for name in source.names)
        return has_pattern or not self._files.get(folder, set()) & source.names

    def _distances(self, changed: set[str]) -> dict[str, int]:
        """How many steps each module is from the nearest changed one, of those that reach one."""
        users: dict[str, list[str]] = {}
        for name, reached in self._reached.items():
            for each in reached:
                users.setdefault(each, []).append(name)
        distances = dict.fromkeys(changed, 0)
        queue = deque(changed)
        while queue:
            name = queue.popleft()
            for user in users.get(name, ()):
                if user not in distances:
                    distances[user] = distances[name] + 1
                    queue.append(user)
        return distances

    def _reaches(self, name: str) -> frozenset[str]:
        """The modules one step away."""
        source = self._sources[name]
        found = {each for said in source.imports for each in self._resolve(said, source.path)}
        for said in source.dotted:
            found |= set(self._resolve(said.rstrip("."), source.path))
            if said.endswith("."):
                found |= self._below.get(said[:-1], frozenset())
        if _WHO_ASKS_FOR_ENTRY_POINTS in source.imports:
            found |= {each for entry in self._entries for each in self._resolve(entry, "")}
        found |= set(self._around(name))
        if source.path.startswith(f"{TESTS}/"):
            folders = list(PurePosixPath(source.path).parent.parts)
            depths = range(1, len(folders) + 1)
            conftests = (".".join([*folders[:depth], "conftest"]) for depth in depths)
            found |= {each for each in conftests if each in self._sources}
        return frozenset(found - {name})

    def _resolve(self, dotted: str, path: str) -> Iterator[str]:
        """The module that a name leads to, with the packages around it; nothing if it is not ours.

        Pytest has the folders of tests that are no packages on the path: what lies in them is
        imported by its bare name.
        """
        first, _, rest = dotted.partition(".")
        if first not in self._tops and path.startswith(f"{TESTS}/"):
            for module in self._bare.get(first, ()):
                yield from self._resolve(f"{module}.{rest}".rstrip("."), "")
            return
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if module in self._sources:
                yield module
                yield from self._around(module)
                return

    def _around(self, name: str) -> Iterator[str]:
        parts = name.split(".")
        packages = (".".join(parts[:length]) for length in range(1, len(parts)))
        yield from (each for each in packages if each in self._sources)


def is_test_file(path: str) -> bool:
    """Whether pytest would collect it."""
    name = PurePosixPath(path).name
    return path.startswith(f"{TESTS}/") and name.startswith("test_") and name.endswith(".py")


def _files_by_folder(paths: Iterable[str]) -> dict[str, set[str]]:
    """The names of all files below a folder of this name, at whatever depth."""
    found: dict[str, set[str]] = {}
    for path in map(PurePosixPath, paths):
        for folder in path.parent.parts:
            found.setdefault(folder, set()).add(path.name)
    return found


def _below(sources: Mapping[str, Source]) -> dict[str, frozenset[str]]:
    """The modules directly in each package."""
    below: dict[str, set[str]] = {}
    for name in sources:
        below.setdefault(name.rpartition(".")[0], set()).add(name)
    return {package: frozenset(names) for package, names in below.items()}


def _bare_names(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    """The modules and packages of tests by the last part of their names."""
    found: dict[str, set[str]] = {}
    for name in sources:
        parts = name.split(".")
        if parts[0] == TESTS:
            for length in range(2, len(parts) + 1):
                found.setdefault(parts[length - 1], set()).add(".".join(parts[:length]))
    return found


def _entry_points(pyproject: dict[str, object]) -> Iterator[str]:
    project = pyproject.get("project")
    if isinstance(project, dict):
        for group in project.get("entry-points", {}).values():
            yield from (place.partition(":")[0] for place in group.values())
