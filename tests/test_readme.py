"""The README stays a newcomer's page: short, with what somebody needs to begin."""

from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
MAX_WORDS = 900


def test_readme_is_read_in_one_sitting() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_readme_has_what_a_newcomer_needs_in_this_order() -> None:
    wanted = [
        "docs/architecture.svg",
        "## Start",
        "## The first request",
        "## Kill an engine",
        "## A simulated TPU cluster",
        "docs/README.md",
        "## Status",
    ]
    places = [README.find(part) for part in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_status_of_the_readme_is_ten_lines() -> None:
    status = README.partition("## Status")[2].splitlines()
    assert [line.split(".")[0] for line in status if line[:1].isdigit()] == [
        str(number) for number in range(1, 11)
    ]
