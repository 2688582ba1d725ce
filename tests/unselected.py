"""Which test files an expression of markers (`pytest -m`) leaves without a single test.

A file's own `pytestmark` holds for all of its tests, and a test may add to it but take nothing
away. So a file is left out only if the expression is false with the file's markers, whichever of
the other markers its tests may carry beside them. Such a file need not be imported, and some import
vLLM or Ray for seconds.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator
from functools import cache

from _pytest.mark.expression import Expression


def module_markers(source: str) -> frozenset[str]:
    """The names in `pytestmark`, which every test of this source carries."""
    if "pytestmark" not in source:
        return frozenset()
    assigned = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Name) and each.id == "pytestmark" for each in node.targets)
    )
    return frozenset(itertools.chain.from_iterable(map(_names, assigned)))


@cache
def selects_nothing(expression: str, markers: frozenset[str], others: frozenset[str]) -> bool:
    """Whether no test with these markers, and any of the others, is selected."""
    if not expression:
        return False
    wanted = Expression.compile(expression)
    named = [name for name in sorted(others - markers) if name in expression]
    return not any(
        wanted.evaluate(lambda name, held=markers | set(more), **_: name in held)
        for more in _subsets(named)
    )


def _names(value: ast.expr) -> Iterator[str]:
    """The markers of `pytest.mark.NAME`, of a call of it, or of a list of these."""
    match value:
        case ast.List(elts=each) | ast.Tuple(elts=each):
            yield from itertools.chain.from_iterable(map(_names, each))
        case ast.Call(func=called):
            yield from _names(called)
        case ast.Attribute(value=ast.Attribute(attr="mark"), attr=name):
            yield name


def _subsets(names: list[str]) -> Iterable[tuple[str, ...]]:
    sizes = range(len(names) + 1)
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes)
