"""Where a model's or an adapter's files are. A leaf: gateway and engine both need it."""

from pathlib import Path

_PROJECT_ROOT = Path(__file__).resolve().parents[2]


def resolve_file(name: str) -> Path:
    """A file named in the configuration, looked for as `resolve_source` looks for folders."""
    for base in (Path.cwd(), _PROJECT_ROOT):
        if (base / name).is_file():
            return base / name
    return Path(name)


def resolve_source(source: str) -> str:
    """A model or adapter folder as an absolute path, or a Hugging Face id as it stands.

    A relative folder is looked for in the working directory, then beside the `serving` package:
    Ray's processes need not start where `serve_config.yaml` lies.
    """
    for base in (Path.cwd(), _PROJECT_ROOT):
        folder = base / source
        if folder.is_dir():
            return str(folder.resolve())
    return source
