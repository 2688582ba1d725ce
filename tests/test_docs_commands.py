"""Commands of `slicewise` on pages: there are such commands, with such options."""

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deployments.cli import COMMAND_GROUP, build_cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Of blocks in a language of the shell, or in none.
_BLOCK = re.compile(r"^ *```(?:sh|bash|console)?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_ELLIPSIS = ("...", "…")


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every command of ours in the blocks of a page, without comments."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            before, found, after = line.partition("slicewise ")
            # At the line's start, or behind another command that runs it.
            if found and (not before.strip() or before.rstrip().endswith(("&&", "--", "$"))):
                yield shlex.split(re.split(r" (?:&&|\||>|&) ", after)[0], comments=True)


ON_PAGES = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for words in commands_in(page.read_text())
]


@pytest.fixture(scope="module")
def cli() -> typer.Typer:
    return build_cli(entry_points(group=COMMAND_GROUP))


@pytest.mark.parametrize("words", ON_PAGES)
def test_command_on_a_page_is_one_that_there_is(words: list[str], cli: typer.Typer) -> None:
    # Values stand for others, so it is parsed and not run.
    parsed = [word for word in words if word not in _ELLIPSIS]
    result = CliRunner().invoke(cli, [*parsed, "--help"])
    assert result.exit_code == 0, result.output


def test_command_that_there_is_not_would_be_found(cli: typer.Typer) -> None:
    page = "```sh\nslicewise render values.yaml --oout build   # words\n```\n"
    (words,) = commands_in(page)
    assert words == ["render", "values.yaml", "--oout", "build"]
    result = CliRunner().invoke(cli, [*words, "--help"])
    assert result.exit_code == 2
    assert "--oout" in result.output


def test_pages_have_commands() -> None:
    assert len(ON_PAGES) > 10
