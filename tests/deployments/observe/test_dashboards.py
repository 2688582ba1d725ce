"""The dashboards' files are what their source says, and what Grafana can load."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import DASHBOARDS, GRAFANA

from scripts.dashboards.boards import BOARDS
from scripts.dashboards.grafana import render


def board(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_files_are_what_the_source_says() -> None:
    written = {path.stem: path.read_text() for path in DASHBOARDS}
    assert written == {name: render(each, BOARDS.values()) for name, each in BOARDS.items()}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_ids_places_and_queries_of_their_own(path: Path) -> None:
    panels = board(path)["panels"]
    ids = Counter(panel["id"] for panel in panels)
    titles = Counter(panel["title"] for panel in panels)
    assert max(ids.values()) == max(titles.values()) == 1
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
        assert panel["type"] == "row" or refs


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_that_queries_use_are_there(path: Path) -> None:
    document = board(path)
    names = {each["name"] for each in document["templating"]["list"]}
    text = json.dumps(document)
    assert len(names) > 2
    for name in names:
        assert f"${name}" in text or f"${{{name}}}" in text, f"{name} is used by no query"
    assert names >= {"datasource", "model", "compute_class"}


def test_dashboards_link_to_each_other() -> None:
    uids = {board(path)["uid"] for path in DASHBOARDS}
    for path in DASHBOARDS:
        links = {link["url"].removeprefix("/d/") for link in board(path)["links"]}
        assert links == uids - {board(path)["uid"]}


def test_provisioning_files_say_where_dashboards_and_prometheus_are() -> None:
    folder = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    (provider,) = yaml.safe_load((folder / "dashboards" / "slicewise.yaml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
