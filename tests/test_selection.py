import pytest

from tests.selection import Selection, Source, module_name, parse_source

FILES = {
    "app/__init__.py": "",
    "app/low.py": "VALUE = 1\n",
    "app/middle.py": "from app.low import VALUE\n",
    "app/lazy.py": "def run():\n    from . import low\n",
    "app/alone.py": '"""Says more than app.low does."""\n',
    "app/cli.py": "from importlib.metadata import entry_points\n",
    "app/page/__init__.py": "",
    "app/page/chart.py": "",
    "app/started.py": "",
    "tests/test_low.py": "import app.low\n",
    "tests/test_middle.py": "from app import middle\n",
    "tests/test_lazy.py": "from app.lazy import run\n",
    "tests/test_alone.py": "import app.alone\n",
    "tests/test_page.py": "import app.page\n",
    "tests/test_cli.py": "from app.cli import main\n",
    "tests/test_program.py": 'PROGRAM = "import app.low; print(app.low.VALUE)"\n',
    "tests/test_family.py": 'name = f"app.page.{kind}"\n',
    "tests/test_deployed.py": 'ARGS = {"import_path": "app.started:build"}\n',
    "tests/test_words.py": 'SAID = "see notes/one.md for more"\n',
    "tests/test_one_note.py": 'TEXT = (ROOT / "notes" / "one.md").read_text()\n',
    "tests/test_all_notes.py": 'TEXTS = [p.read_text() for p in (ROOT / "notes").glob("*.md")]\n',
    "tests/test_route.py": 'ROUTE = "/notes"\n',
    "tests/test_gate.py": 'GATE = ROOT / ".ci" / "run"\n',
    "tests/test_runs.py": 'COMMAND = ["run"]\n',
    "tests/deep/conftest.py": "from app.low import VALUE\n",
    "tests/deep/helper.py": "",
    "tests/deep/test_deep.py": "",
    "tests/deep/test_helped.py": "import helper\n",
    "tests/test_by_package.py": "from deep.helper import it\n",
    "tests/deep/test_also_helped.py": "from .helper import it\n",
}
OTHERS = ["notes/one.md", "notes/two.md", ".ci/run", "app/page/page.html", "other/three.txt"]
PYPROJECT = '[project.entry-points."app.commands"]\nplan = "app.alone:plan"\n'


@pytest.fixture(scope="module")
def selection() -> Selection:
    sources = [parse_source(path, text) for path, text in FILES.items()]
    return Selection(sources, [*FILES, *OTHERS], PYPROJECT)


def names(selection: Selection, *changed: str) -> set[str]:
    return {
        path.rpartition("test_")[2].removesuffix(".py") for path in selection.test_files(changed)
    }


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("tests/test_low.py", {"low"}),
        ("app/middle.py", {"middle"}),
        ("app/alone.py", {"alone", "cli"}),
        ("app/lazy.py", {"lazy"}),
        # What Serve imports by name, once an application starts.
        ("app/started.py", set()),
        ("tests/deep/helper.py", {"helped", "also_helped", "by_package"}),
        ("app/page/page.html", {"page", "family"}),
        ("app/page/chart.py", {"family"}),
        ("notes/one.md", {"one_note", "all_notes"}),
        ("notes/two.md", {"all_notes"}),
        ("other/three.txt", set()),
        (".ci/run", {"gate"}),
    ],
)
def test_change_selects_the_tests_that_reach_it(
    selection: Selection, changed: str, selected: set[str]
) -> None:
    assert names(selection, changed) == selected


def test_low_module_selects_whoever_imports_it_at_whatever_distance(selection: Selection) -> None:
    found = names(selection, "app/low.py")
    assert found >= {"low", "middle", "lazy", "program", "deep", "helped"}
    assert found.isdisjoint({"alone", "page", "words", "route"})


def test_nearest_tests_come_first(selection: Selection) -> None:
    found = selection.test_files(["app/low.py"])
    assert found.index("tests/test_low.py") < found.index("tests/test_middle.py")


def test_package_selects_all_that_import_anything_of_it(selection: Selection) -> None:
    assert names(selection, "app/__init__.py") >= {"low", "middle", "alone", "page"}


def test_file_that_is_gone_selects_those_that_still_import_it() -> None:
    left = parse_source("tests/test_left.py", "from app.gone import what\n")
    selection = Selection([left, Source("app/gone.py", *[frozenset[str]()] * 3)])
    assert selection.test_files(["app/gone.py"]) == ["tests/test_left.py"]


def test_several_changes_select_the_tests_of_all(selection: Selection) -> None:
    assert names(selection, "app/page/page.html", "notes/two.md") == {"page", "family", "all_notes"}


def test_name_of_a_package_is_that_of_its_folder() -> None:
    assert module_name("app/page/__init__.py") == "app.page"
    assert module_name("app/low.py") == "app.low"
