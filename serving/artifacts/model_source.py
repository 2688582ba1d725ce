"""Finds a model's or an adapter's files. A leaf: gateway and engine both need it."""

from pathlib import Path

_PROJECT_ROOT = Path(__file__).resolve().parents[2]


def resolve_file(name: str) -> Path:
    """Returns a file named in the configuration, found as `resolve_source` finds folders."""
    for base in (Path.cwd(), _PROJECT_ROOT):
        if (base / name).is_file():
            return base / name
    return Path(name)


def resolve_source(source: str) -> str:
    """Returns a model or adapter folder as an absolute path, or a Hugging Face id as it stands.

    A relative folder is searched in the working directory, then beside the `serving` package:
    Ray's processes need not start where `serve_config.yaml` lies.
    """
    for base in (Path.cwd(), _PROJECT_ROOT):
        folder = base / source
        if folder.is_dir():
            return str(folder.resolve())
    return source
