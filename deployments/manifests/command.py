"""Defines `slicewise render`, which turns values into manifests.

Owns the command line, and which files are written and removed.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from deployments.manifests.render import MARK, RENDERED_FOLDERS, render
from deployments.manifests.values import parse_values
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import ConfigError, UnsupportedVllmError

_PROBLEMS, _UNUSABLE = 1, 2
_DIGEST_LENGTH = 12


def render_command(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, metavar="VALUES")
    ],
    *,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write to.")],
) -> None:
    """Write the manifests of VALUES: serve_config.yaml with a part `cluster`."""
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        values = parse_values(load_yaml(text), installed_vllm_args())
    except yaml.YAMLError as error:
        typer.echo(f"{file}: not readable as YAML: {error}", err=True)
        raise typer.Exit(_PROBLEMS) from error
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"{file}: {problem}")
        raise typer.Exit(_PROBLEMS) from error
    except UnsupportedVllmError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_UNUSABLE) from error
    files = render(values, format_source(file.name, text))
    try:
        changed, removed = write_files(files, out)
    except FileExistsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_UNUSABLE) from error
    typer.echo(f"{out}: {len(files)} files, {changed} changed, {removed} removed")
    typer.echo(f"next: slicewise validate {out}")


def format_source(name: str, text: str) -> str:
    """Returns the source as a rendered file names it; the same on every machine."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{name} (sha256 {digest})"


def write_files(files: Mapping[str, str], out: Path) -> tuple[int, int]:
    """Writes what differs, removes what an earlier rendering left. Returns the number of each.

    Raises:
        FileExistsError: a file in the way is not a rendered one. Nothing has been written.
    """
    for name in files:
        target = out / name
        if target.exists() and not _is_rendered(target):
            message = f"{target}: not written by slicewise render; move it, or choose another --out"
            raise FileExistsError(message)
    changed = 0
    for name, text in files.items():
        target = out / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            changed += 1
    old = [
        path
        for rendered_folder in RENDERED_FOLDERS
        for path in (out / rendered_folder).rglob("*")
        if path.is_file()
    ]
    stale = [path for path in old if path.relative_to(out).as_posix() not in files]
    stale = [path for path in stale if _is_rendered(path)]
    for path in stale:
        path.unlink()
    return changed, len(stale)


def _is_rendered(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(len(MARK)) == MARK
