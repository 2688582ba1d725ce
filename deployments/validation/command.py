"""Defines `slicewise validate`: it reports what is wrong with a folder of manifests."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.engine_plan import SHIPPED_FACTS
from deployments.validation.documents import read_folder
from deployments.validation.sizes import model_sizes, size_problems, unknown_sizes
from deployments.validation.validate import folder_problems

_PROBLEMS, _UNUSABLE = 1, 2


def validate_command(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, readable=True, metavar="DIR")
    ],
    *,
    schemas: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, help="CRDs as YAML, a file or a folder; may be given several times."
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with files of model facts, for the sizes of models; beside the shipped.",
        ),
    ] = None,
) -> None:
    """Check the manifests in DIR: do they agree with each other, and with the schemas?"""
    found, problems = read_folder(folder)
    problems += folder_problems(found)
    size_of = model_sizes([*([models] if models is not None else []), SHIPPED_FACTS])
    problems += dict.fromkeys(size_problems(found, size_of))
    for source in unknown_sizes(found, size_of):
        typer.echo(f"note: {source}: its size is not known here, so its hosts were not checked")
    checked = "no schema given"
    if schemas:
        # Only those who have schemas need its library.
        from deployments.validation.schemas import (  # noqa: PLC0415
            SchemaFileError,
            read_schemas,
            schema_problems,
        )

        try:
            known = read_schemas(schemas)
        except SchemaFileError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(_UNUSABLE) from error
        problems += schema_problems(found, known)
        checked = f"{sum(map(known.has, found.manifests))} against a schema"
    for problem in problems:
        typer.echo(str(problem))
    if problems:
        typer.echo(f"{folder}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
        raise typer.Exit(_PROBLEMS)
    typer.echo(f"{folder}: ok, {len(found.manifests)} objects, {checked}")
