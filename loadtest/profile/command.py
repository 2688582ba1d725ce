"""Defines `slicewise profile`: it measures one slice and writes its profile for the autoscaler."""

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer

from loadtest.errors import ExitCode, LoadTestError


def profile_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the server, without /v1.")],
    model: Annotated[str, typer.Option(help="Model to measure.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder: profile.yaml, the runs.")],
    ttft: Annotated[float, typer.Option(help="Objective: seconds to the first token.")] = 3.0,
    tpot: Annotated[float, typer.Option(help="Objective: seconds per token after it.")] = 0.1,
    share: Annotated[float, typer.Option(help="Share of requests that have to meet both.")] = 0.99,
    input_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    seconds: Annotated[float, typer.Option(help="How long each load is judged.")] = 20.0,
    most_users: Annotated[int, typer.Option(help="Most streams of one engine for the law.")] = 64,
    max_num_seqs: Annotated[int, typer.Option(help="The engine's own limit of sequences.")] = 256,
    slices: Annotated[
        int | None, typer.Option(help="Slices that serve it; asked of /fleet if left out.")
    ] = None,
    engine: Annotated[str, typer.Option(help="What runs there, for the profile.")] = "vllm",
    tolerance: Annotated[float, typer.Option(help="How closely the rate is looked for.")] = 0.1,
    workers: Annotated[int, typer.Option(help="Client processes.")] = 1,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that has the API key.")
    ] = None,
) -> None:
    """Find what one slice carries at an objective, and write it for the autoscaler to plan with.

    Steady loads give the law of a step, then a search over rates gives the rate at which the
    objective still holds. Load nothing else meanwhile.
    """
    # Every `slicewise` command loads this module; these take a second.
    from loadtest.profile import measure  # noqa: PLC0415
    from loadtest.profile.bench import LoadTestBench  # noqa: PLC0415
    from loadtest.profile.step_time_fit import UnfitError  # noqa: PLC0415
    from loadtest.run.fleet_watch import read_fleet  # noqa: PLC0415
    from loadtest.run.launch import read_api_key  # noqa: PLC0415
    from loadtest.run.supervisor import RunFailedError  # noqa: PLC0415
    from serving.domain.capacity.slice_profile import write_profile  # noqa: PLC0415

    try:
        key = read_api_key(api_key_env, os.environ)
        ready = measure.slices_of(read_fleet(url, key), model)
        objective = measure.ProfileObjective(ttft, tpot, share)
        subject = measure.Subject(
            model=model,
            engine=engine,
            num_slices=slices or len(ready) or 1,
            generation=next((row["generation"] for row in ready), None),
            topology=next((row["topology"] for row in ready), None),
            load_s=measure.load_seconds(ready),
            max_num_seqs=max_num_seqs,
            num_engines=next((row.get("num_engines", 1) for row in ready), 1),
        )
        bench = LoadTestBench(
            url=url,
            model=model,
            objective=objective,
            seconds=seconds,
            out_dir=out,
            num_workers=workers,
            api_key_env=api_key_env,
            environ=os.environ,
            show=lambda _line: None,
        )
        profile, measured = measure.measure_slice(
            bench,
            subject,
            objective,
            measure.RequestLengths(input_tokens, output_tokens),
            most_users=most_users,
            tolerance=tolerance,
            show=typer.echo,
        )
    except LoadTestError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.USAGE) from error
    except (RunFailedError, measure.ProfileFailedError, UnfitError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.FAILED) from error
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    source = measure.describe_source(
        objective, measure.RequestLengths(input_tokens, output_tokens), measured
    )
    finished = profile.model_copy(update={"measured_on": today, "source": source})
    path = out / "profile.yaml"
    write_profile(finished, path)
    typer.echo(f"{source}\nwritten to {path}")
    if measured.sustained_per_s is None:
        raise typer.Exit(ExitCode.OBJECTIVE_MISSED)
