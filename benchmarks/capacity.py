"""How many streams one gateway carries, and what happens beyond: a ladder of closed loops.

Owns the ladder, what is measured on each step of it, and the verdict per system. The client is
`loadtest`'s, the servers are `servers` and `ray_serve_llm`. All of it shares one machine, so every
step says who used its CPU, other people's processes included.
"""

import contextlib
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.ray_serve_llm import Mode, missing_packages, ray_serve_llm
from benchmarks.servers import MODEL, Server, cpu_s, paced, slicewise
from loadtest.client.prompt_source import PromptFile, find_prompts
from loadtest.planned_request import Api
from loadtest.run.plan import PLAN_FILE, PROMPTS_FILE, RunPlan
from loadtest.run.supervisor import RunParts, run_load
from loadtest.scorecard.measure import Scorecard, measure
from loadtest.scorecard.slo import ServiceLevel
from loadtest.scorecard.stored_run import StoredRun, read_run
from loadtest.workload.spec import WorkloadSpec

# As slow as a slice that serves a large model.
TTFT_MS, TPOT_MS = 50.0, 20.0
INPUT_TOKENS, OUTPUT_TOKENS = 64, 200
MAX_NUM_SEQS = 4096
LADDER = (1, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
NUM_ROUNDS = 2
# Longer than an answer takes, so that the streams of a step begin spread over one.
WARMUP_S, WINDOW_S, DRAIN_S = 5.0, 8.0, 30.0
# What "carries" means.
MIN_THROUGHPUT_RATIO, MAX_TPOT_RATIO = 0.95, 1.25
# Where a ladder ends: at half its rate a stream takes twice as long as it should.
LOST_THROUGHPUT_RATIO = 0.5
# A step beside busier neighbours is taken again, so often at most; the quietest one counts.
MAX_OTHER_CORES, MAX_TRIES = 0.25, 3
_QUIET_POLL_S, _QUIET_PATIENCE_S = 2.0, 60.0

SLICEWISE = "Slicewise"


@dataclass(frozen=True, slots=True)
class Step:
    """One closed loop. Latencies are p50 and p99 in milliseconds, `None` where no answer was whole.

    `gap_ms` are the gaps between events that carry tokens: a server that collects tokens shows the
    pace in `tpot_ms` and does not keep it here, and in `tokens_per_chunk` how many it collects.
    `tokens_per_s` is over the steady window. `errors`
    counts failed requests by what they said. `cpu_us_per_token` is by role, the client's under
    `client`; `other_cores` are cores that processes which are no part of the measurement used
    meanwhile. `client_faults` are the client's own gates that were missed.
    """

    system: str
    turn: int
    streams: int
    tokens_per_s: float
    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None
    gap_ms: tuple[float, float] | None
    ok: int
    errors: tuple[tuple[str, int], ...]
    cpu_us_per_token: dict[str, float]
    other_cores: float
    client_faults: tuple[str, ...]
    tokens_per_chunk: float = 1.0

    @property
    def offered_tokens_per_s(self) -> float:
        """What as many streams take in with an engine and nothing else."""
        answer_s = (TTFT_MS + (OUTPUT_TOKENS - 1) * TPOT_MS) / 1e3
        return self.streams * OUTPUT_TOKENS / answer_s

    @property
    def misses(self) -> tuple[str, ...]:
        """Why it is not carried; empty when every stream had its pace."""
        ratio = self.tokens_per_s / self.offered_tokens_per_s
        tpot_ratio = None if self.tpot_ms is None else self.tpot_ms[1] / TPOT_MS
        checks = {
            "requests failed": bool(self.errors),
            f"throughput {ratio:.0%}": ratio < MIN_THROUGHPUT_RATIO,
            "no whole answer": tpot_ratio is None,
            f"TPOT p99 {tpot_ratio or 0:.2f} x pace": (tpot_ratio or 0) > MAX_TPOT_RATIO,
        }
        return tuple(words for words, is_missed in checks.items() if is_missed)

    @property
    def is_carried(self) -> bool:
        """Whether every stream had its pace."""
        return not self.misses

    @property
    def is_lost(self) -> bool:
        """Whether the ladder need not go on."""
        is_slow = self.tokens_per_s < LOST_THROUGHPUT_RATIO * self.offered_tokens_per_s
        return is_slow or bool(self.errors)


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU seconds so far: by role of the server, of this process and its children, of all."""

    server: dict[str, float]
    client_s: float
    machine_s: float
    at_s: float


def run(ray_python: str = sys.executable, note: Callable[[Step], None] = print) -> list[Step]:
    """All ladders of all rounds, the systems in turns; Slicewise alone if Ray Serve LLM is missing.

    `ray_python` is the interpreter that has what Ray Serve LLM needs; `note` hears of each step.
    """
    starts: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
        SLICEWISE: lambda: slicewise(paced(TTFT_MS, TPOT_MS, MAX_NUM_SEQS))
    }
    if missing := missing_packages(ray_python):
        print(f"Ray Serve LLM is left out: {ray_python} lacks {', '.join(missing)}; ", end="")
        print(f"{ray_python} -m pip install {' '.join(missing)}")
    else:
        starts |= {str(mode): _ray_start(mode, ray_python) for mode in Mode}
    steps: list[Step] = []
    prompts: PromptFile | None = None
    for turn in range(NUM_ROUNDS):
        for start in starts.values():
            with start() as server:
                # The first server has a tokenizer to ask; all have the same model.
                prompts = prompts or find_prompts(server.url, [MODEL], None)
                for step in _climb(server, prompts, turn):
                    steps.append(step)
                    note(step)
    return steps


def _ray_start(mode: Mode, python: str) -> Callable[[], contextlib.AbstractContextManager[Server]]:
    pace = {
        "ttft_s": TTFT_MS / 1e3,
        "time_per_token_s": TPOT_MS / 1e3,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_model_len": 2048,
        "vocab_size": 2**31,
    }
    return lambda: ray_serve_llm(mode, pace, python)


def _climb(server: Server, prompts: PromptFile, turn: int) -> Iterator[Step]:
    """Up to the first step that is lost; then twice the last one that was carried."""
    _measured(server, prompts, turn, 8)  # imports, caches and connections of the first requests
    last_carried, done = 0, set()
    for streams in LADDER:
        step = _undisturbed(server, prompts, turn, streams)
        done.add(streams)
        if step.is_carried:
            last_carried = streams
        yield step
        if step.is_lost:
            break
    if last_carried and 2 * last_carried not in done:
        yield _undisturbed(server, prompts, turn, 2 * last_carried)


def _undisturbed(server: Server, prompts: PromptFile, turn: int, streams: int) -> Step:
    tries: list[Step] = []
    while len(tries) < MAX_TRIES:
        _await_quiet()
        tries.append(_measured(server, prompts, turn, streams))
        if tries[-1].other_cores <= MAX_OTHER_CORES:
            break
    return min(tries, key=lambda step: step.other_cores)


def _await_quiet() -> None:
    """Waits until the machine does little; the step tells if it never did."""
    until_s = time.monotonic() + _QUIET_PATIENCE_S
    num_cores = psutil.cpu_count()
    while time.monotonic() < until_s:
        if psutil.cpu_percent(_QUIET_POLL_S) / 100 * num_cores <= MAX_OTHER_CORES:
            return


def _measured(server: Server, prompts: PromptFile, turn: int, streams: int) -> Step:
    plan = RunPlan.of(
        url=server.url,
        workload=WorkloadSpec.from_users(
            streams, input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS, api=Api.CHAT
        ),
        models=(MODEL,),
        duration_s=WARMUP_S + WINDOW_S,
        warmup_s=WARMUP_S,
        drain_s=DRAIN_S,
        seed=turn * 10_000 + streams,
    )
    with tempfile.TemporaryDirectory(prefix="capacity-") as folder:
        out = Path(folder)
        plan.write(out / PLAN_FILE)
        (out / PROMPTS_FILE).write_text(prompts.model_dump_json())
        processes = server.processes()
        before = _usage(processes)
        run_load(plan, RunParts(out, None, None, None, lambda _: None))
        after = _usage(processes)
        stored = read_run(out)
    return _step(server.name, turn, streams, stored, before, after)


def _step(
    system: str, turn: int, streams: int, stored: StoredRun, before: _Usage, after: _Usage
) -> Step:
    card: Scorecard = measure(stored, ServiceLevel(), None)
    num_chunks = max(1, sum(each.num_chunks for each in stored.requests))
    # An answer that was cut says nothing of its tokens but in its events.
    num_tokens = max(1, sum(each.output_tokens or each.num_chunks for each in stored.requests))
    used_s = {role: after.server[role] - before.server[role] for role in after.server}
    used_s["client"] = after.client_s - before.client_s
    others_s = after.machine_s - before.machine_s - sum(used_s.values())
    errors = Counter(
        f"{each.error}: {each.detail}" for each in stored.requests if each.error is not None
    )
    return Step(
        system=system,
        turn=turn,
        streams=streams,
        tokens_per_s=card.throughput.output_tokens_per_s or 0.0,
        ttft_ms=_p50_p99_ms(card.ttft_s.p50, card.ttft_s.p99),
        tpot_ms=_p50_p99_ms(card.tpot_s.p50, card.tpot_s.p99),
        gap_ms=_p50_p99_ms(card.icl_s.p50, card.icl_s.p99),
        ok=card.requests.ok,
        errors=tuple(errors.most_common()),
        cpu_us_per_token={role: each_s / num_tokens * 1e6 for role, each_s in used_s.items()},
        other_cores=others_s / (after.at_s - before.at_s),
        client_faults=card.client.reasons,
        tokens_per_chunk=num_tokens / num_chunks,
    )


def _p50_p99_ms(p50_s: float | None, p99_s: float | None) -> tuple[float, float] | None:
    return None if p50_s is None or p99_s is None else (p50_s * 1e3, p99_s * 1e3)


def _usage(processes: Mapping[str, Sequence[psutil.Process]]) -> _Usage:
    children, own = (
        resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)
    )
    client_s = sum(each.ru_utime + each.ru_stime for each in (children, own))
    machine = psutil.cpu_times()
    busy_s = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return _Usage(cpu_s(processes), client_s, busy_s, time.monotonic())
