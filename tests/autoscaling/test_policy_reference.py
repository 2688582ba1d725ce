"""The reference of the policy's settings: complete, and the one in the page is today's."""

from pathlib import Path

from autoscaling.policy_config import PolicyConfig
from scripts.policy_reference import main, policy_reference

PAGE = Path(__file__).parents[2] / "docs/reference/policy.md"


def test_every_setting_stands_in_the_reference_with_a_description() -> None:
    rows = [row for row in policy_reference().splitlines() if row.startswith("| `")]
    names = {row.split("`")[1] for row in rows}
    schema = PolicyConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert names >= set(section["properties"])
    assert all(row.removesuffix(" |").rsplit("| ", 1)[1] for row in rows)


def test_sections_with_names_are_found() -> None:
    titles = [line for line in policy_reference().splitlines() if line.startswith("####")]
    assert titles[:2] == ["#### `policy_kwargs`", "#### `models.NAME`"]
    assert "#### `models.NAME.classes.NAME.profile`" in titles
    assert "#### `quotas[]`" in titles


def test_page_has_the_reference_of_today() -> None:
    assert main(["--check", str(PAGE)]) == 0
