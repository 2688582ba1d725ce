"""Runs the parts that are asked for, and puts them on record."""

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from benchmarks.conversations import report
from benchmarks.conversations.live import send
from benchmarks.conversations.loads import (
    ENGINE_ARGS,
    NUM_ENGINES,
    NUM_GATEWAYS,
    PACE,
    PACED_LOADS,
    VLLM_LOAD,
)
from benchmarks.conversations.records import (
    BEFORE,
    OURS,
    Part,
    Run,
    read_record,
    write_record,
)
from benchmarks.conversations.twin import replay
from benchmarks.ingress_report import present_commit
from benchmarks.servers import MODEL, Server, slicewise, vllm_model
from benchmarks.side_by_side.at_commit import checkout_of
from benchmarks.side_by_side.prompts import SOURCE
from benchmarks.side_by_side.systems import ENGINE_ENV
from loadtest.client.check_kind import CheckKind
from serving.artifacts.model_source import resolve_source
from tests.e2e.application import PROJECT_ROOT, paced_model

Say = Callable[[str], None]

PARTS = ("paced", "vllm")
NUM_PAIRS = 3
_SEED = 40


def run_parts(only: str | None, say: Say) -> None:
    """Runs these parts, with commas between them; `None`: all.

    Raises:
        ValueError: there is no such part.
    """
    names = PARTS if only is None else tuple(only.split(","))
    if unknown := set(names) - set(PARTS):
        raise ValueError(f"only={', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
    if "paced" in names:
        _store("paced", _part(_paced_runs(say)))
    if "vllm" in names:
        _store("vllm", _part(_vllm_runs(say)))
    say(f"written: {report.write_report()}")


def _store(name: str, part: Part) -> None:
    write_record(msgspec.structs.replace(read_record(), **{name: part}))


def _part(runs: Sequence[Run]) -> Part:
    return Part(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=present_commit(),
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        python=platform.python_version(),
        runs=tuple(runs),
    )


def _paced_runs(say: Say) -> list[Run]:
    """Each load on an application of its own, and then what the simulation makes of it."""
    runs = []
    model = paced_model(
        NUM_ENGINES, PACE, name=MODEL, frontend_args={"enable_prompt_tokens_details": True}
    )
    for pair, load in enumerate(PACED_LOADS):
        seed = _SEED + pair
        with slicewise(model, num_gateways=NUM_GATEWAYS) as server:
            sent = send(server, load, seed, CheckKind.PACED)
        runs += [sent.as_run(OURS, load, pair, seed), replay(sent, load, pair, seed)]
        for run in runs[-2:]:
            say(report.said_of(run))
    return runs


def _vllm_runs(say: Say) -> list[Run]:
    """Pairs: one system after the other under the same conversations, in turns which is first."""
    before = checkout_of(PROJECT_ROOT, BEFORE)
    runs = []
    for pair in range(NUM_PAIRS):
        systems = ((OURS, PROJECT_ROOT), (BEFORE, before))
        for system, checkout in systems[:: 1 if pair % 2 == 0 else -1]:
            seed = _SEED + pair
            with _vllm_application(checkout) as server:
                sent = send(server, VLLM_LOAD, seed, CheckKind.NONE)
            runs.append(sent.as_run(system, VLLM_LOAD, pair, seed))
            say(report.said_of(runs[-1]))
    return runs


def _vllm_application(checkout: Path) -> AbstractContextManager[Server]:
    deployments = [{"compute_class": "local", "replicas": NUM_ENGINES, "num_cpus": 0.01}]
    model = vllm_model(ENGINE_ARGS, ENGINE_ENV) | {
        "source": resolve_source(SOURCE),
        "frontend_args": {"enable_prompt_tokens_details": True},
        "deployments": deployments,
    }
    return slicewise(model, checkout, NUM_GATEWAYS)
