"""Defines `slicewise loadtest`, the command line of one load test; `launch` carries it out."""

import os
from pathlib import Path
from typing import Annotated

import typer

from loadtest.client.check_kind import CheckKind
from loadtest.errors import ExitCode, LoadTestError
from loadtest.planned_request import Api


def loadtest_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the server, without /v1.")],
    duration: Annotated[
        float, typer.Option(help="Seconds in which requests are sent, warm-up included.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="New folder for all results.")],
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second; with --trace, the mean it is thinned to."),
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="Users who wait for their answers, instead of a rate.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(exists=True, help="Trace to replay, instead of a rate.")
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File of a workload, instead of a rate."),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma gaps of --rate; 1 is Poisson.")
    ] = 1.0,
    think_time: Annotated[float, typer.Option(help="Seconds that --users think.")] = 0.0,
    scale: Annotated[float, typer.Option(help="How much faster a trace's time runs.")] = 1.0,
    input_tokens: Annotated[
        int | None, typer.Option(help="Of each prompt; 256, or the trace's own, if left out.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Of each answer; 128, or the trace's own, if left out.")
    ] = None,
    max_context_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Longest context of the server; longer requests are cut."),
    ] = None,
    api: Annotated[Api, typer.Option(help="Endpoint that is asked.")] = Api.CHAT,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model or adapter, may be repeated; all base models if left out."),
    ] = None,
    warmup: Annotated[float, typer.Option(help="First seconds, which are not judged.")] = 0.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that requests in flight may take at the end.")
    ] = 60.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    retries: Annotated[int, typer.Option(help="Further attempts after a 429 or 503.")] = 0,
    workers: Annotated[int, typer.Option(help="Client processes, at most one per free core.")] = 1,
    seed: Annotated[int, typer.Option(help="Decides arrivals, lengths and prompts.")] = 1,
    check: Annotated[
        CheckKind, typer.Option(help="What answers are compared with.")
    ] = CheckKind.NONE,
    answers: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File of --check recorded; written if not there."),
    ] = None,
    slo: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of objectives.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="USD per chip and hour, by compute class."),
    ] = None,
    chaos: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="What is done to the platform, and when."),
    ] = None,
    sim_socket: Annotated[
        Path | None, typer.Option(help="Control socket of the simulation that --chaos acts on.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that has the API key.")
    ] = None,
) -> None:
    """Load a server, record every request and judge it: scorecard.json, report.html, a table.

    Exits with 0 when all is well, 1 when requests failed, 2 when the command is wrong, 3 when an
    objective was missed, 4 when the client itself distorted the numbers, 130 after Ctrl-C.
    """
    # Plots and prompts take a second to import, and every `slicewise` command loads this module.
    from loadtest.run.launch import LoadSource, LoadTestOptions, launch  # noqa: PLC0415

    source = LoadSource(
        rate_per_s=rate,
        num_users=users,
        trace=trace,
        workload=workload,
        burstiness=burstiness,
        think_time_s=think_time,
        scale=scale,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        api=api,
        max_context_tokens=max_context_tokens,
    )
    options = LoadTestOptions(
        url=url,
        source=source,
        duration_s=duration,
        out_dir=out,
        models=tuple(model or ()),
        warmup_s=warmup,
        drain_s=drain,
        request_s=timeout,
        max_retries=retries,
        num_workers=workers,
        seed=seed,
        check=check,
        answers_file=answers,
        slo=slo,
        prices=prices,
        chaos=chaos,
        sim_socket=sim_socket,
        api_key_env=api_key_env,
    )
    try:
        code = launch(options, os.environ, typer.echo)
    except LoadTestError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.USAGE) from error
    raise typer.Exit(code)
