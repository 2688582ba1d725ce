"""Defines `slicewise programs`: it lists a store of compiled programs, and prunes it."""

import json
import time
from typing import Annotated, NoReturn

import typer

from serving.artifacts.compile_cache.prune import (
    Holding,
    Pruning,
    carry_out,
    plan_pruning,
    read_holding,
)
from serving.artifacts.object_store.address import open_store
from serving.artifacts.object_store.store import MissingObjectError, ObjectStore, StoreError

_UNUSABLE = 2
_DAY_S = 24 * 3600.0
_GIB = 1024**3

programs = typer.Typer(
    help="Compiled programs that engines on TPU share through a store.", no_args_is_help=True
)
StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="Folder, gs:// or s3:// address: compile_cache.store")
]


@programs.command("list")
def list_command(store: StoreArgument) -> None:
    """One line for each key, the one used last first."""
    opened, holding = _read(store)
    for key in holding.keys:
        days = (time.time() - key.used_at_s) / _DAY_S
        num_bytes = sum(
            holding.blobs[digest].num_bytes for digest in key.blobs if digest in holding.blobs
        )
        typer.echo(
            f"{key.place.digest}  used {days:.1f} d ago  {key.num_programs} programs  "
            f"{num_bytes / _GIB:.3f} GiB  {_what(opened, key.place.record)}"
        )
    typer.echo(f"{len(holding.keys)} keys, {holding.num_bytes / _GIB:.3f} GiB")


@programs.command("prune")
def prune_command(
    store: StoreArgument,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="Keys that no engine has pulled for so long go.")
    ] = None,
    max_gib: Annotated[
        float | None, typer.Option(min=0, help="The longest unused go until the rest fits.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,  # noqa: FBT002 a flag of a command
) -> None:
    """Deletes keys that nobody needs, and bytes that no key names any more.

    Engines may pull and push meanwhile. The key used last stays in any case.
    """
    opened, holding = _read(store)
    pruning = plan_pruning(
        holding,
        time.time(),
        None if unused_days is None else unused_days * _DAY_S,
        None if max_gib is None else int(max_gib * _GIB),
    )
    if not dry_run:
        try:
            carry_out(opened, pruning)
        except StoreError as error:
            _fail(error)
    typer.echo(_format_pruning(pruning, "would go" if dry_run else "deleted"))


def _read(address: str) -> tuple[ObjectStore, Holding]:
    try:
        store = open_store(address)
        return store, read_holding(store)
    except (ValueError, StoreError) as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(_UNUSABLE) from error


def _what(store: ObjectStore, record: str) -> str:
    try:
        parts = json.loads(store.get(record))
        return f"{parts['source']} on {parts['generation']} {parts['topology']}"
    except (MissingObjectError, ValueError, KeyError, TypeError):
        return "no record"


def _format_pruning(pruning: Pruning, verb: str) -> str:
    lines = [f"{verb}: {key.place.digest}" for key in pruning.keys]
    blobs = f"{len(pruning.blobs)} blobs of {pruning.num_bytes / _GIB:.3f} GiB"
    return "\n".join([*lines, f"{verb}: {len(pruning.keys)} keys, {blobs}"])
