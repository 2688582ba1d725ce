"""Writes the dashboards: `python -m scripts.dashboards`."""

from pathlib import Path

from scripts.dashboards.boards import BOARDS
from scripts.dashboards.grafana import render

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "grafana" / "dashboards"


def main() -> None:
    """Writes every dashboard, whatever was there."""
    for name, board in BOARDS.items():
        path = FOLDER / f"{name}.json"
        path.write_text(render(board, BOARDS.values()), encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
