"""The JSON of Grafana 11 and later: panels on a grid, variables, a dashboard.

Owns the form. What is shown stands in `boards`. Pure; the same input gives the same text.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Of Grafana 11; later ones migrate it when they load it.
_SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are PromQL by legend; `unit` is Grafana's name of it.

    `thresholds` are values from which on a colour holds. `is_stacked` adds the series up.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    text: str = ""
    is_stacked: bool = False
    thresholds: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `variables` are queries of label values, by the variable's name."""

    uid: str
    title: str
    text: str
    variables: Mapping[str, str]
    rows: tuple[Row, ...]


def render(board: Board, others: Iterable[Board]) -> str:
    """The dashboard's file."""
    document = {
        "annotations": {"list": [_alerts_annotation()]},
        "description": board.text,
        "editable": True,
        "graphTooltip": 1,
        "links": [_link(other) for other in others if other.uid != board.uid],
        "panels": list(_panels(board.rows)),
        "refresh": "15s",
        "schemaVersion": _SCHEMA_VERSION,
        "tags": ["slicewise"],
        "templating": {"list": [_datasource(), *map(_variable, *_pairs(board.variables))]},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "title": board.title,
        "uid": board.uid,
        "version": 1,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _pairs(variables: Mapping[str, str]) -> tuple[list[str], list[str]]:
    return list(variables), list(variables.values())


def _panels(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y},
            "id": number,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            number += 1
            yield _panel(panel, number, {"h": _HEIGHT, "w": panel.width, "x": x, "y": y})
            x += panel.width
        y += _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.thresholds.items()]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 40 if panel.is_stacked else 8,
            "lineWidth": 1,
            # A gap is a gap: missing is not zero.
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
        }
    return {
        "datasource": _DATASOURCE,
        "description": panel.text,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "gridPos": place,
        "id": number,
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "datasource": _DATASOURCE,
                "editorMode": "code",
                "expr": query,
                "format": "table" if panel.kind == "table" else "time_series",
                "instant": panel.kind != "timeseries",
                "legendFormat": legend,
                "range": panel.kind == "timeseries",
                "refId": chr(ord("A") + index),
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
        "title": panel.title,
        "type": panel.kind,
    }


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value_and_name",
    },
    "table": {"cellHeight": "sm", "showHeader": True},
    "bargauge": {
        "displayMode": "gradient",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
}


def _datasource() -> dict[str, Any]:
    return {
        "current": {},
        "label": "Prometheus",
        "name": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "type": "datasource",
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        # Also what has no such label: a slice that nobody has, a request that never had an engine.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE,
        "definition": query,
        "includeAll": True,
        "label": name.replace("_", " "),
        "multi": True,
        "name": name,
        "query": {"qryType": 1, "query": query, "refId": "Prometheus"},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def _link(other: Board) -> dict[str, Any]:
    return {
        "includeVars": True,
        "keepTime": True,
        "title": other.title,
        "type": "link",
        "url": f"/d/{other.uid}",
    }


def _alerts_annotation() -> dict[str, Any]:
    return {
        "datasource": _DATASOURCE,
        "enable": True,
        "expr": 'ALERTS{alertstate="firing"}',
        "iconColor": "red",
        "name": "Alerts",
        "titleFormat": "{{alertname}}",
    }
