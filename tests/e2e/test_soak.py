"""At 70 % of capacity for as long as one likes, memory and latencies stay what they were.

`SOAK_S=3600 make test-long` soaks for an hour instead of ten minutes.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.scorecard.compare import Comparison
from loadtest.scorecard.stored_run import read_run
from serving.domain.capacity.slice_profile import CapacityProfile

from .application import PROJECT_ROOT, Role, RunningApplication, application_args, paced_model
from .soak_analysis import KIB, MIB, Growth, Sample, compare_thirds, drifts, growth

NUM_REPLICAS = 2
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
PACE: dict[str, float] = {
    "ttft_ms": 20.0,
    "tpot_ms": 30.0,
    "tpot_per_seq_ms": 0.5,
    "prefill_tokens_per_s": 20_000.0,
    "max_num_seqs": 16,
}
TPOT_OBJECTIVE_S = 0.06
LOAD_RATIO = 0.7

# What one request may leave behind in any process, if the run is long enough to tell. What holds a
# prompt and its answer (192 token ids, their text, a detokenizer, a stream) is more than that.
ALLOWED_BYTES_PER_REQUEST = 4 * KIB
# In a minute nothing is warm yet; only a gross leak can be told from that.
GROSS_BYTES_PER_REQUEST = 64 * KIB
# How much worse the last third of a run may be than its first, on a machine that others use too.
ALLOWED_DRIFT_RATIO = 0.25
ROLES = {
    "gateway": Role.GATEWAY,
    "directory": Role.DIRECTORY,
    "slice replica": Role.SLICE_REPLICA,
    "engine host": Role.ENGINE_HOST,
    "Serve controller": Role.CONTROLLER,
}

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@dataclass(frozen=True)
class Timing:
    """Of one soak, in seconds."""

    duration_s: float
    warmup_s: float
    sample_every_s: float


SHORT = Timing(60.0, 10.0, 0.5)
LONG = Timing(float(os.environ.get("SOAK_S", "600")), 60.0, 2.0)


@dataclass(frozen=True)
class Soak:
    """What a soak left: the scorecard, the growth of each process, the latencies' change."""

    card: Mapping[str, Any]
    growth: Mapping[str, Growth]
    thirds: Comparison


def soak_rate_per_s() -> float:
    """`LOAD_RATIO` of what the law of the paced engines carries."""
    law = CapacityProfile(
        model="paced",
        engine="paced",
        base_s=PACE["tpot_ms"] / 1000,
        per_sequence_s=PACE["tpot_per_seq_ms"] / 1000,
        per_prompt_token_s=1 / PACE["prefill_tokens_per_s"],
        max_num_seqs=int(PACE["max_num_seqs"]),
        measured_on="2026-11-21",
        source="the pace that this test sets",
    )
    knee_per_s = law.max_requests_per_s(INPUT_TOKENS, OUTPUT_TOKENS, TPOT_OBJECTIVE_S)
    return LOAD_RATIO * NUM_REPLICAS * knee_per_s


def soak(out: Path, timing: Timing) -> Soak:
    """Starts the application, loads it, and reads what came of it."""
    rate_per_s = soak_rate_per_s()
    with RunningApplication(application_args(paced_model(NUM_REPLICAS, PACE))) as application:
        watched = {
            (name, process.pid): process
            for name, role in ROLES.items()
            for process in application.processes(role)
        }
        assert {name for name, _ in watched} == set(ROLES), "every kind of process is watched"
        samples: dict[str, list[Sample]] = {f"{name} {pid}": [] for name, pid in watched}

        def sample(at_s: float) -> None:
            for name, process in zip(samples, watched.values(), strict=True):
                samples[name].append(Sample(at_s, process.memory_info().rss))

        load(application.base_url, rate_per_s, timing, out, sample)
        application.wait_idle()
        assert all(process.is_running() for process in watched.values()), "none was replaced"
    return Soak(
        json.loads((out / "scorecard.json").read_text()),
        {name: growth(seen, rate_per_s) for name, seen in samples.items()},
        compare_thirds(read_run(out), seed=1),
    )


def load(
    url: str, rate_per_s: float, timing: Timing, out: Path, sample: Callable[[float], None]
) -> None:
    """Runs the load test as its users do, and samples for as long as requests are sent."""
    command = [str(Path(sys.executable).with_name("slicewise")), "loadtest", "--url", url]
    command += ["--rate", f"{rate_per_s:.3f}", "--duration", str(timing.duration_s)]
    command += ["--warmup", str(timing.warmup_s), "--out", str(out), "--check", "paced"]
    command += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    with (out.parent / "loadtest.log").open("wb") as log:
        client = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=log, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + timing.duration_s
        try:
            while client.poll() is None:
                now_s = time.monotonic()
                if now_s < until_s:
                    sample(now_s)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(timing.sample_every_s)
        finally:
            client.kill()


def report(found: Soak) -> str:
    requests = found.card["requests"]
    client = "; ".join(found.card["client"]["reasons"]) or "valid"
    lines = [
        f"{requests['total']} requests at {soak_rate_per_s():.2f}/s, {requests['failed']} failed; "
        f"{found.card['correctness']['checked']} answers checked; client: {client}"
    ]
    lines += [
        f"{name}: {each.middle_bytes / MIB:.1f} MiB at the middle, {each.end_bytes / MIB:.1f} at "
        f"the end, {each.slope / KIB:+.2f} KiB per request ({each.low / KIB:+.2f} to "
        f"{each.high / KIB:+.2f})"
        for name, each in found.growth.items()
    ]
    lines += [
        words for words in found.thirds.sentences if words.startswith(("TTFT", "TPOT", "E2E"))
    ]
    return "".join(f"\n    {line}" for line in lines) + "\n"


def assert_all_answers_are_known_ones(found: Soak, timing: Timing) -> None:
    requests, correctness = found.card["requests"], found.card["correctness"]
    assert requests["failed"] == 0, requests
    expected = soak_rate_per_s() * (timing.duration_s - timing.warmup_s)
    # Poisson: five times its standard deviation.
    assert abs(requests["total"] - expected) < 5 * expected**0.5
    assert correctness["checked"] == requests["total"]
    damage = [correctness[f"{kind}_tokens"] for kind in ("lost", "repeated", "foreign")]
    assert damage == [0, 0, 0]


def test_a_minute_at_70_percent_of_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = soak(tmp_path / "out", SHORT)
    with capsys.disabled():
        sys.stdout.write(report(found))
    assert_all_answers_are_known_ones(found, SHORT)
    gross = [n for n, each in found.growth.items() if each.is_shown_above(GROSS_BYTES_PER_REQUEST)]
    assert gross == []


@pytest.mark.timeout(LONG.duration_s + 300)
def test_memory_and_latencies_stay_flat_at_70_percent_of_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = soak(tmp_path / "out", LONG)
    with capsys.disabled():
        sys.stdout.write(report(found))
    assert_all_answers_are_known_ones(found, LONG)
    growing = {
        name: each
        for name, each in found.growth.items()
        if not each.is_shown_within(ALLOWED_BYTES_PER_REQUEST)
    }
    assert growing == {}
    assert drifts(found.thirds, ALLOWED_DRIFT_RATIO) == []
