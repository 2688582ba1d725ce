"""The table of what stands in for a TPU is as long as the code that replaces something."""

import ast
from pathlib import Path

import pytest

from serving.engine.tpu_sim import replacements
from serving.engine.tpu_sim.replacements import (
    ATTENTION,
    REPLACEMENTS,
    Replacement,
    ReplacementError,
    as_markdown,
    replace,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "serving" / "engine" / "tpu_sim"
MODULES = sorted(PACKAGE.glob("*.py"))
ROW_NAMES = {name for name, value in vars(replacements).items() if isinstance(value, Replacement)}


def nodes() -> list[tuple[str, ast.AST]]:
    trees = [(path.name, ast.parse(path.read_text())) for path in MODULES]
    return [(name, node) for name, tree in trees for node in ast.walk(tree)]


def calls(*functions: str) -> list[ast.Call]:
    return [
        node
        for _, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in functions
    ]


def test_every_row_is_in_the_table_once() -> None:
    assert {each.what for each in REPLACEMENTS} == {
        getattr(replacements, name).what for name in ROW_NAMES
    }
    assert len(REPLACEMENTS) == len(ROW_NAMES)


def test_every_row_is_used_and_no_other() -> None:
    used = {
        node.args[0].id for node in calls("replace", "claim") if isinstance(node.args[0], ast.Name)
    }
    assert used - {"replacement"} == ROW_NAMES


def targets() -> list[tuple[str, ast.Attribute]]:
    """Every attribute that is assigned to, and in which module."""
    found = []
    for name, node in nodes():
        if isinstance(node, ast.Assign):
            found += [(name, target) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            found.append((name, node.target))
    return [(name, target) for name, target in found if isinstance(target, ast.Attribute)]


def test_nothing_of_another_package_is_set_but_through_the_table() -> None:
    """Attributes are set by `replace` alone, modules beside a `claim`."""
    setters = ("setattr", "delattr")
    named = [name for name, node in nodes() if isinstance(node, ast.Name) and node.id in setters]
    assert named == ["replacements.py"]
    owners = {ast.unparse(target.value) for _, target in targets()}
    assert owners <= {"self", "module"}


@pytest.mark.parametrize("function", ["leave_out_vision", "stand_in_for_tokamax"])
def test_a_function_that_puts_a_module_in_place_claims_it(function: str) -> None:
    tree = ast.parse((PACKAGE / "torch_on_cpu.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    puts = {node.name for node in found if "sys.modules[" in ast.unparse(node)}
    assert function in puts
    assert puts == {node.name for node in found if "claim(" in ast.unparse(node)}


def test_a_name_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(ReplacementError, match=r"json\.loads is not in the row 'attention kernel'"):
        replace(ATTENTION, __import__("json"), "loads", None)


def test_rows_say_what_is_not_proven() -> None:
    table = as_markdown()
    assert len(table.splitlines()) == len(REPLACEMENTS) + 2
    for row in REPLACEMENTS:
        assert f"| {row.what} | {row.stand_in} | {row.not_proven} |" in table
        assert row.what
        assert row.stand_in
        assert row.not_proven


def test_the_documentation_shows_the_table() -> None:
    assert as_markdown() in (ROOT / "docs/results/tpu-parity.md").read_text()
