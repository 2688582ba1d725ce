"""The configuration reference: complete, idempotent, and refused where it has no place."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from serving.config import application
from serving.config.reference import END, START, config_reference, main, with_reference

PAGE = f"# Title\n\n{START}\nstale words\n{END}\n\nrest\n"


def sections() -> Iterator[type[BaseModel]]:
    for value in vars(application).values():
        if isinstance(value, type) and issubclass(value, BaseModel) and value.model_fields:
            yield value


def test_every_field_stands_in_the_reference_with_a_description() -> None:
    reference = config_reference()
    missing = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description
        or not any(
            row.startswith(f"| `{name}` |") and " ".join(field.description.split()) in row
            for row in reference.splitlines()
        )
    ]
    assert missing == []


def test_rows_give_type_default_and_range() -> None:
    rows = config_reference().splitlines()
    assert (
        "| `replicas` | an integer or `auto` | `1` | 1 to 1024 | Gateways behind the Serve proxy. "
        "`auto`: as many as the most engines can keep busy. |"
    ) in rows
    assert any(row.startswith("| `name` | a string | required |") for row in rows)
    assert any(row.startswith("| `keys_file` | a string or null | `null` |") for row in rows)


def test_every_row_has_five_cells() -> None:
    rows = [row for row in config_reference().splitlines() if row.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}


def test_closed_arguments_are_listed_with_their_reason() -> None:
    assert "- set by Slicewise: `model` (from `source`)" in config_reference().splitlines()


def test_writing_keeps_the_rest_of_the_page_and_is_idempotent() -> None:
    page = with_reference(PAGE)
    assert page.startswith("# Title\n")
    assert page.endswith("\n\nrest\n")
    assert "stale words" not in page
    assert with_reference(page) == page


def test_check_fails_until_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    path.write_text(PAGE)
    assert main(["--check", str(path)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert path.read_text() == PAGE
    assert main(["--write", str(path)]) == 0
    assert main(["--check", str(path)]) == 0


@pytest.mark.parametrize(
    "page", ["", START, END, f"{END}{START}", f"{START}{END}{END}", f"{START}{START}{END}"]
)
def test_page_without_one_pair_of_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    path = tmp_path / "README.md"
    path.write_text(page)
    assert main(["--write", str(path)]) == 2
    assert "config-reference:start" in capsys.readouterr().err
    assert path.read_text() == page


def test_missing_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(tmp_path / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err
