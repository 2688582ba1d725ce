"""The reference of part `cluster`: complete, and the one in the page is today's."""

from pydantic import BaseModel

from deployments.manifests import cluster_config
from deployments.manifests.reference import cluster_reference, main

from .examples import ROOT


def test_every_field_stands_in_the_reference_with_a_description() -> None:
    rows = [row for row in cluster_reference().splitlines() if row.startswith("| `")]
    sections = [
        value
        for value in vars(cluster_config).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.model_fields
    ]
    assert len(sections) > 8
    for section in sections:
        for name, field in section.model_fields.items():
            words = " ".join((field.description or "").split())
            assert words, name
            assert any(row.startswith(f"| `{name}` |") and words in row for row in rows), name


def test_page_has_the_reference_of_today() -> None:
    assert main(["--check", str(ROOT / "docs/operate/deploy-gke.md")]) == 0
